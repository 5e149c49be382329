"""Measurement of the time of each stage of data loading; ``profile_report`` prints it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from selftask.batch import Batch
from selftask.config.schema import Config, num_views
from selftask.config.values.auto_values import cores
from selftask.data.data_module import DataModule, train_dataset
from selftask.data.inspect.check import has_own_files
from selftask.data.loading.collate import BatchBuffer
from selftask.data.loading.dataset import ViewDataset
from selftask.data.loading.open_data import Sources
from selftask.data.loading.sample import Sample
from selftask.data.reading.files import read_bytes
from selftask.data.source import Source, Wrapped
from selftask.distributed.accelerator import wait_for
from selftask.distributed.world import World
from selftask.errors import BadImage, UserError
from selftask.random.views import draw_rng
from selftask.registry import TRANSFORMS

MAX_PER_BATCH = 64  # images; larger batches take the same time per image
MAX_IMAGES = 256  # most images measured in each stage
MAX_BYTES = 256 << 20  # of decoded images kept for the next stage
T = TypeVar("T")


@dataclass
class StageTimes:
    """Result of ``measure``; seconds are per image in one process."""

    read_s: float | None  # None: images have no own files; reading is part of decode_s
    decode_s: float
    augment_s: float  # with data.augment_on=device: shrinking, and drawing parameters
    collate_s: float
    to_device_s: float  # with data.augment_on=device: also making the views
    loader_images_per_s: float  # with the configured workers
    decodes_per_sample: float
    num_images: int  # images measured
    batch_size: int
    num_workers: int
    processes: int  # processes of a node, which share its cores
    device: str
    num_cores: int
    augment_on: str = "cpu"  # data.augment_on
    cache: str = "none"  # data.cache
    views: list[tuple[int, int]] = field(default_factory=list)  # (width, height) of each
    image_pixels: float = 0.0  # median of the images
    transforms: dict[str, float] = field(default_factory=dict)  # name -> share of their time

    @property
    def stages(self) -> dict[str, float]:
        """Seconds per image of each stage that is measured separately."""
        named = {
            "read": self.read_s,
            "decode" if self.read_s is not None else "read+decode": self.decode_s,
            "augment" if self.augment_on == "cpu" else "draw": self.augment_s,
            "collate": self.collate_s,
            "to device" if self.augment_on == "cpu" else "device views": self.to_device_s,
        }
        return {name: seconds for name, seconds in named.items() if seconds is not None}

    @property
    def worker_s(self) -> float:
        """Seconds per image in a worker: all stages but the last, the copy to the device."""
        return sum(self.stages.values()) - self.to_device_s


def measure(
    config: Config, sources: Sources, device: torch.device, seconds: float, threads: int = 1
) -> StageTimes:
    """Measure each stage in this process, then the configured loader; no run folder is written.

    Args:
        config: Config of the run.
        sources: Opened data sources.
        device: Device to which batches are copied.
        seconds: Approximate time of each measurement.
        threads: torch threads of the main process; workers have one.

    Raises:
        UserError: If no image can be read, or no batch can be made.
    """
    config = _small_batches(config, len(sources.train))
    before = torch.get_num_threads()
    try:
        times = _one_process(config, sources.train, device, seconds, threads)
        config = replace(config, data=replace(config.data, on_error="skip", max_unreadable=1.0))
        with tempfile.TemporaryDirectory() as out:
            config = replace(config, out=out)
            rate = loader_rate(config, sources, device, seconds)
            decodes = decodes_per_sample(config, sources.train)
    finally:
        torch.set_num_threads(before)
    return replace(times, loader_images_per_s=rate, decodes_per_sample=decodes)


def _small_batches(config: Config, num_images: int) -> Config:
    size = max(1, min(config.train.batch_size, MAX_PER_BATCH, num_images))
    return replace(config, train=replace(config.train, batch_size=size, accumulate=1))


def _one_process(
    config: Config, source: Source, device: torch.device, seconds: float, threads: int
) -> StageTimes:
    torch.set_num_threads(1)  # as in a worker
    dataset = train_dataset(config, source)
    read_s, decode_s, images_of = _read_and_decode(dataset, source, seconds)
    augment_s, made = _each(
        lambda index: dataset.make(images_of[index], 0, index), range(len(images_of)), seconds
    )
    samples = [Sample(images, -1, 0, (0, 0), [], traces=traces) for images, traces in made]
    samples = samples[: config.train.batch_size]
    collate_s, batch = _repeat(
        lambda: dataset.collate(samples, BatchBuffer(len(samples))), seconds / 4
    )
    if batch.problem:
        raise UserError(batch.problem)
    torch.set_num_threads(threads)

    def to_device() -> Batch:
        finished = batch.finish(dataset, device)
        wait_for(device)
        return finished

    to_device_s, finished = _repeat(to_device, seconds / 4)
    return StageTimes(
        read_s=read_s,
        decode_s=decode_s,
        augment_s=augment_s,
        collate_s=collate_s / len(samples),
        to_device_s=to_device_s / len(samples),
        loader_images_per_s=0.0,
        decodes_per_sample=0.0,
        num_images=len(images_of),
        batch_size=config.train.batch_size,
        num_workers=config.data.num_workers,
        processes=config.launch.processes,
        device=str(device),
        num_cores=cores(),
        augment_on=config.data.augment_on,
        cache=config.data.cache,
        views=[(view.shape[-1], view.shape[-2]) for view in finished.all_views],
        image_pixels=float(np.median([image.shape[0] * image.shape[1] for image, *_ in images_of])),
        transforms=transform_shares(config, [image for image, *_ in images_of[:32]]),
    )


def _read_and_decode(
    dataset: ViewDataset, source: Source, seconds: float
) -> tuple[float | None, float, list[Any]]:
    """Return the seconds to read and to decode a sample, and the images of each sample.

    The first number is None if samples are not files of their own.
    """
    indices = _spread(len(source))
    first = next(_readable(source, indices))
    most = int(np.clip(MAX_BYTES // first.nbytes, 4, MAX_IMAGES))

    def read(index: int) -> int:
        return len(read_bytes(source.path(index)))

    read_s = _each(read, indices, seconds)[0] if has_own_files(source) else None
    decode_s, samples = _each(dataset.read, indices, seconds, most)
    if read_s is not None:  # these reads came from the page cache: subtract their time
        decode_s = max(decode_s - _each(read, indices, 0.2)[0], 0.0)
    return read_s, decode_s, [images for images, _, _ in samples]


def transform_shares(config: Config, images: Sequence[np.ndarray]) -> dict[str, float]:
    """Return each transform's fraction of the time of all transforms, largest first.

    Transforms are measured one by one. A pipeline may fuse several transforms and run them faster,
    but the most expensive one stays the same.

    Args:
        config: Config of the run.
        images: uint8 (H, W, C).
    """
    spent: dict[str, float] = {}
    numbers = num_views(config.views).values()
    for group, number in zip(config.views.values(), numbers, strict=True):
        steps = [
            (component.name, TRANSFORMS[component.name](**component.args))
            for component in group.transforms
            if component.name != "normalize"  # not measured: runs on the device
        ]
        for index, original in enumerate([images[0], *images]):
            rng, image = draw_rng(config.train.seed, 0, index, 0), original
            for name, transform in steps:
                started = time.perf_counter()
                image = transform(image, rng)
                seconds = time.perf_counter() - started if index else 0.0  # the first is a warm-up
                spent[name] = spent.get(name, 0.0) + max(1, number) * seconds
    total = max(sum(spent.values()), 1e-12)
    return {name: spent[name] / total for name in sorted(spent, key=lambda name: -spent[name])}


def _spread(num_images: int) -> Sequence[int]:
    """Return indices in random order, spread over the whole set; at most 10,000."""
    order: list[int] = np.random.default_rng(0).permutation(min(num_images, 10_000)).tolist()
    step = max(1, num_images // 10_000)
    return [step * index for index in order]


def _readable(source: Source, indices: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield readable images; raises UserError if there are no more."""
    for index in indices:
        with suppress(BadImage):
            yield source[index][0]
    raise UserError(f"none of {len(indices)} images can be read; see `selftask data check`")


def _each(
    work: Callable[[int], T], indices: Sequence[int], seconds: float, most: int = MAX_IMAGES
) -> tuple[float, list[T]]:
    """Call ``work`` for indices in turn; return the mean seconds of a call, and the results.

    It stops after ``most`` results or about ``seconds``. Unreadable images are skipped.
    """
    done: list[T] = []
    spent = 0.0
    for index in indices:
        started = time.perf_counter()
        with suppress(BadImage):  # `selftask data check` reports these
            done.append(work(index))
            spent += time.perf_counter() - started
        if len(done) >= most or (done and spent > seconds):
            break
    return spent / len(done), done


def _repeat(work: Callable[[], T], seconds: float) -> tuple[float, T]:
    """Return mean seconds of at least three calls of ``work`` after a warm-up, and its result."""
    result = work()
    started, times = time.perf_counter(), 0
    while times < 3 or time.perf_counter() - started < seconds:
        result = work()
        times += 1
    return (time.perf_counter() - started) / times, result


def loader_rate(config: Config, sources: Sources, device: torch.device, seconds: float) -> float:
    """Return the images per second of the loader when nothing else runs.

    The first ``1 + num_workers`` batches are not counted, since the workers are starting or have
    made them in advance.

    Args:
        config: Config of the run.
        sources: Opened data sources.
        device: Device to which batches are copied.
        seconds: Approximate time of the measurement.
    """
    data_module = DataModule(config, sources, World(), device)
    try:
        batches = data_module.train_batches(0)
        for _ in range(1 + config.data.num_workers):
            wait_for(next(batches).index.device)
        started, count = time.perf_counter(), 0
        least = 2 * max(1, config.data.num_workers)
        while count < least or time.perf_counter() - started < seconds:
            wait_for(next(batches).index.device)
            count += 1
        return count * config.train.batch_size / (time.perf_counter() - started)
    finally:
        data_module.close()


class _Counted(Wrapped):
    """Source that counts how often images are read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.asked = 0

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.asked += 1
        return super().__getitem__(index)


def decodes_per_sample(config: Config, source: Source) -> float:
    """Return how many images are read per sample of the first batch, with unreadable ones."""
    counted = _Counted(source)
    here = replace(config, data=replace(config.data, num_workers=0, cache="none"))
    data_module = DataModule(here, Sources(counted, None), World(), torch.device("cpu"))
    try:
        batch = next(data_module.train_batches(0))
        return counted.asked / len(batch.index)
    finally:
        data_module.close()
