"""``data.cache=device``: all images on the device, read once when training starts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.batches import DeviceBatch, DeviceDataset, shrunk, to_canvas
from selftask.data.extras import ExtraImages, ExtrasReader
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.collate import BatchBuffer, BatchFields
from selftask.data.loading.dataset import MAX_REPLACEMENTS, EvalDataset, replacement
from selftask.data.loading.loader import Batches, EvalBatches
from selftask.data.loading.sample import Sample
from selftask.data.loading.workers import PREFETCH
from selftask.data.sampling.sampler import epoch_of
from selftask.data.source import Source, channels_of
from selftask.data.transforms.pipeline import Compose
from selftask.distributed import accelerator
from selftask.distributed.out_of_memory import available_bytes
from selftask.errors import UserError
from selftask.logs import get_logger
from selftask.logs.stages import staged

log = get_logger(__name__)

_SHARE = 0.8  # of the free memory that images may take
_READ_AT_ONCE = 256  # batch size for reading
_Keys = list[tuple[int, int]]  # keys of a batch: epoch (which encodes the repeat) and index


class CachedBatches(Batches):
    """``Batches`` from images that are on the device; yields the same batches.

    Worker processes read the images when training starts. Bad files are treated as in ``Batches``.
    Each rank keeps all images.
    """

    dataset: DeviceDataset
    _cache: Cache | None = None

    def _open_reader(self) -> Any:
        if self._cache is None:
            self._cache = Cache.read(self.dataset, self.num_workers, self.device, self.bad_files)
        planner = Planner(self._cache, self.dataset)
        return CacheReader(planner, iter(self.sampler), pin=accelerator.pins_memory(self.device))


class Cache:
    """All images of a source in one tensor on a device, uint8 (I, N, H, W, C).

    It has I images of each of N samples. Each is in the upper left corner and padded with 0.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device, channels: int) -> None:
        """Create an empty cache; ``shape`` is (I, N)."""
        self.device = device
        self.pixels = torch.empty((*shape, 0, 0, channels), dtype=torch.uint8, device=device)
        self.labels = torch.full(shape[1:], -1, dtype=torch.int64)  # on the host
        self.sizes = np.zeros((*shape, 2), dtype=np.int64)  # 0: unreadable
        self.extras: dict[str, Tensor] = {}  # (N, ...) by name

    @staticmethod
    def read(
        dataset: DeviceDataset, num_workers: int, device: torch.device, bad_files: BadFiles
    ) -> Cache:
        """Read all images; raises UserError for too many bad ones or too little memory.

        Args:
            dataset: Dataset whose source is read.
            num_workers: Number of worker processes.
            device: Device that keeps the images.
            bad_files: Record of unreadable images.
        """
        started = time.perf_counter()
        source = dataset.source
        extra_images = [ExtraImages(source, name) for name in dataset.views.images]
        cache = Cache((1 + len(extra_images), len(source)), device, channels_of(source))
        for number, images in enumerate([source, *extra_images]):
            batches: Any = EvalBatches(
                CacheDataset(images, dataset.max_side, None if number else dataset.extras),
                batch_size=_READ_AT_ONCE,
                num_workers=num_workers,
                bad_files=bad_files,
            )
            for batch in staged("cache", batches.read(), len(batches)):
                cache.put(batch, number)
        cache.sizes *= cache.sizes.all((0, 2), keepdims=True)  # samples with an unreadable image: 0
        accelerator.wait_for(device)  # other streams read it
        log.info(
            "data.cache=device: %d images of up to %dx%d, %.0f MiB on %s, read in %.0f s",
            (cache.sizes[..., 0] > 0).sum(),
            *(cache.pixels.shape[3], cache.pixels.shape[2], cache.pixels.nbytes / 2**20, device),
            time.perf_counter() - started,
        )
        return cache

    def put(self, batch: DeviceBatch, number: int = 0) -> None:
        """Store one image of each sample of a batch.

        Args:
            batch: Batch of a ``CacheDataset``.
            number: Index of the image in the sample; 0 is the main image, with label and extras.

        Raises:
            UserError: If the images so far do not fit into the memory of the device.
        """
        (canvas,) = batch.views
        height, width = canvas.shape[1:3]
        self._make_room(height, width)
        index = batch.index.to(self.device)
        self.pixels[number, index, :height, :width] = canvas.to(self.device)
        if number == 0:
            self.labels[batch.index] = batch.labels
        assert batch.sizes is not None
        self.sizes[number, batch.index.numpy()] = batch.sizes.numpy()
        for name, values in batch.extras.items():
            if name not in self.extras:
                shape = len(self.labels), *values.shape[1:]
                self.extras[name] = torch.zeros(shape, dtype=values.dtype, device=self.device)
            self.extras[name][index] = values.to(self.device)

    def fill(self, plan: DeviceBatch) -> DeviceBatch:
        """Return a planned batch with its images, uint8 (I * B, H, W, C), and extras added.

        Images, extras and ``index`` are on the device.
        """
        index = plan.index.to(self.device, non_blocking=True)
        pixels = self.pixels.index_select(1, index).flatten(0, 1)
        extras = {name: values.index_select(0, index) for name, values in self.extras.items()}
        return replace(plan, views=[pixels], index=index, extras={**plan.extras, **extras})

    def _make_room(self, height: int, width: int) -> None:
        """Enlarge the canvas to this size if it is smaller; raises UserError if memory is short."""
        images, samples, *old, channels = self.pixels.shape
        new = max(height, old[0]), max(width, old[1])
        if tuple(old) == new:
            return
        number = images * samples
        needed, free = number * new[0] * new[1] * channels, free_bytes(self.device)
        if needed > _SHARE * free:
            raise UserError(
                f"data.cache=device: {number} images in {new[1]}x{new[0]} take "
                f"{needed / 2**30:.1f} GiB, and {self.device} has {free / 2**30:.1f} GiB free, of "
                f"which they may take {_SHARE:.0%}; use data.cache=none, or a smaller data.max_side"
            )
        pixels = torch.zeros(
            (images, samples, *new, channels), dtype=torch.uint8, device=self.device
        )
        pixels[:, :, : old[0], : old[1]] = self.pixels
        self.pixels = pixels


class CacheDataset(EvalDataset):
    """Images of a source as they are cached: untransformed, but with larger ones shrunk.

    ``max_side`` is the longest side in pixels; None: no limit.
    """

    def __init__(
        self, source: Source, max_side: int | None, extras: ExtrasReader | None = None
    ) -> None:
        super().__init__(source, Compose([]), extras=extras)
        self.max_side = max_side

    def sample(self, key: tuple[int, int], out: Sequence[np.ndarray] = ()) -> Sample:
        sample = super().sample(key)
        if self.max_side is None:
            return sample
        return replace(sample, views=[shrunk(image, self.max_side) for image in sample.views])

    def collate(self, samples: Iterable[Sample], buffer: BatchBuffer) -> DeviceBatch:
        """Pad images to a common size, and stack them."""
        fields = BatchFields()
        images = [sample.views[0] for sample in samples if fields.add(sample)]
        if not images:
            return DeviceBatch(views=[], **fields.of_batch(buffer.new))
        canvas, sizes = to_canvas(images, buffer.new)
        rest = fields.of_batch(buffer.new)
        return DeviceBatch(views=[canvas], **rest, sizes=torch.from_numpy(sizes))


@dataclass(frozen=True)
class Planner:
    """Planner of batches: finds the image indices and draws the view parameters for given keys."""

    cache: Cache
    dataset: DeviceDataset

    def plan(self, keys: _Keys) -> DeviceBatch:
        """Return a batch without its images, on the host.

        Raises:
            UserError: If an unreadable image has no readable replacement, or views cannot be
                stacked.
        """
        epochs, indices = np.array(keys, dtype=np.int64).T
        shown = indices.copy()
        for row in np.flatnonzero(self.cache.sizes[0, indices, 0] == 0):
            shown[row] = self._instead(*keys[row])
        sizes = self.cache.sizes[:, shown].reshape(-1, 2)
        packed = self.dataset.engine.draw_batch(self.dataset.seed, epochs, indices, sizes)
        key, draw = torch.tensor(keys), self.dataset.draw
        canvas_is_full = (sizes == self.cache.sizes.max((0, 1))).all()
        index = torch.from_numpy(shown)
        return DeviceBatch(
            views=[],
            labels=self.cache.labels[index],
            index=index,
            key=key,
            epoch=epoch_of(keys[0][0]),
            bad=[],
            num_left_out=0,
            extras=self._draws(keys, self.cache.sizes[:, shown]),
            sizes=None if canvas_is_full else torch.from_numpy(sizes.astype(np.float32)),
            packed=packed,
            drawn={} if draw is None else draw(key, packed.view_sizes),
        )

    def _draws(self, keys: _Keys, sizes: np.ndarray) -> dict[str, Tensor]:
        """Return the recorder's rows for images of sizes (I, B, 2), if there is a recorder."""
        engine, seed, recorder = self.dataset.engine, self.dataset.seed, self.dataset.recorder
        if recorder is None:
            return {}
        samples = zip(sizes.swapaxes(0, 1).tolist(), keys, strict=True)
        rows = [recorder.row(each, engine.draw(each, seed, *key)) for each, key in samples]
        return {recorder.name: torch.from_numpy(np.stack(rows))}

    def _instead(self, epoch: int, index: int) -> int:
        """Return the index that replaces an unreadable image's, the same as in ``ViewDataset``.

        Raises UserError if no readable image is found.
        """
        for attempt in range(MAX_REPLACEMENTS):
            shown = replacement(self.dataset.seed, epoch, index, attempt, self.cache.sizes.shape[1])
            if self.cache.sizes[0, shown, 0]:
                return shown
        raise UserError("data: no readable image was found in place of an unreadable one")


class CacheReader:
    """Iterator over batches from a cache; a thread draws the parameters a few batches ahead.

    Args:
        planner: Planner of the batches.
        batches: Keys of each batch.
        pin: Whether to copy plans to page-locked memory.
    """

    def __init__(self, planner: Planner, batches: Iterator[_Keys], *, pin: bool) -> None:
        self._planner = planner
        self._batches = batches
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draws")
        self._plans: deque[Future[DeviceBatch]] = deque()

    def __next__(self) -> DeviceBatch:
        while len(self._plans) < PREFETCH:
            self._plans.append(self._thread.submit(self._plan, next(self._batches)))
        return self._planner.cache.fill(self._plans.popleft().result())

    def _plan(self, keys: _Keys) -> DeviceBatch:
        plan = self._planner.plan(keys)
        return plan.pin_memory() if self._pin else plan

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes.

    For the CPU, this is the host memory available without swapping.

    Raises:
        UserError: If the available host memory is unknown.
    """
    available = (
        accelerator.free_bytes(device) if accelerator.is_accelerator(device) else available_bytes()
    )
    if available is None:
        raise UserError(
            "data.cache: the available memory of this machine is unknown; use data.cache=none"
        )
    return available
