"""Data of a run: training batches from any step on, and labeled samples for tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from selftask.batch import Batch
from selftask.config.checks.requirements import required
from selftask.config.schema import Config
from selftask.data.cache.fill import decode_once
from selftask.data.cache.on_device import CachedBatches
from selftask.data.device.batches import DeviceDataset
from selftask.data.device.engine import Engine
from selftask.data.draw_recorder import DrawRecorder
from selftask.data.extras import ExtraImages, ExtrasReader
from selftask.data.fingerprint import fingerprint, sample_contents
from selftask.data.labels import is_labeled
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.collate import Draw
from selftask.data.loading.dataset import EvalDataset, ViewDataset
from selftask.data.loading.loader import Batches, EvalBatches, in_batches, in_equal_numbers
from selftask.data.loading.open_data import Sources, check_data, check_val
from selftask.data.source import Source, channels_of, extras_of
from selftask.data.tokenizers.base import Tokenizer, build_tokenizer
from selftask.data.transforms.pipeline import build_pipeline
from selftask.data.views import Views
from selftask.distributed.collectives import gather_objects, is_primary
from selftask.distributed.world import World
from selftask.logs import DETAIL, get_logger

log = get_logger(__name__)


class DataModule:
    """Data of a run on one rank.

    Workers are started only when batches are requested.

    Args:
        config: Config of the run.
        sources: Opened data.
        world: This process.
        device: Device of the batches.

    Raises:
        UserError: If the data are invalid, or too many images are known to be unreadable.
        ConfigError: If ``data``, ``views`` or ``eval.transforms`` are invalid for these data.
    """

    draw: Draw | None = None
    """Draws the random numbers of the method and of dropout layers for a batch; None: no draws.

    It must be set before ``train_batches`` is called.
    """

    def __init__(
        self, config: Config, sources: Sources, world: World, device: torch.device
    ) -> None:
        self.config = config
        self.world = world
        self.device = device
        self.train_source, self.val_source, val_sets = sources
        main = {} if self.val_source is None else {"": self.val_source}
        self.val_sources: dict[str, Source] = {**main, **val_sets}  # "": data.val
        sampler = check_data(config, self.train_source)
        out, files = config.out_folder, partial(BadFiles.of, data=config.data)
        self.val_bad_files = {
            name: files(
                source, path=out / f"bad_files_val{name and f'_{name}'}.txt", key=val_key(name)
            )
            for name, source in self.val_sources.items()
        }
        self.eval_pipeline = build_pipeline(
            config.eval.transforms, "eval.transforms", self.channels
        )
        self.batches = (CachedBatches if config.data.cache == "device" else Batches)(
            train_dataset(config, self.train_source, self._extras_of(self.train_source)),
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            num_workers=config.data.num_workers,
            rank=world.rank,
            world_size=world.size,
            device=device,
            bad_files=files(self.train_source, path=out / "bad_files.txt"),
            sampler=sampler,
        )
        has_labels = is_labeled(self.train_source) if self.val_sources else False
        self._labeled = {  # computed now, since it may read an image with the user's code
            name: is_labeled(source) for name, source in self.val_sources.items()
        }
        self.labeled_sets = [name for name in self._labeled if has_labels and self._labeled[name]]
        """Names of the validation sets that evaluations can test on; "" is ``data.val``."""
        self.batches.bad_files.refuse(self.train_source.unreadable().values())
        for name, source in self.val_sources.items():
            check_val(config, source, val_key(name))
            self.val_bad_files[name].refuse(source.unreadable().values())
        log.log(DETAIL, "sampler: %s", self.batches.sampler.describe())

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch over all ranks, as defined by the sampler."""
        return self.batches.sampler.sampler.num_samples

    @property
    def num_images(self) -> int:
        """Number of training images; every index of a batch is below it."""
        return len(self.train_source)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the training images, with hashes of the contents of some.

        It includes a description of the tokenizer if there are texts.
        """
        prints = fingerprint(self.train_source)
        prints["contents"] = sample_contents(self.train_source)
        if "text" in extras_of(self.train_source).values():
            prints["tokenizer"] = self.tokenizer.describe()
        return prints

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data's texts; building it may raise UserError."""
        return build_tokenizer(self.config.data.tokenizer)

    def _extras_of(self, source: Source) -> ExtrasReader | None:
        """Return a reader of a source's texts and arrays, or None if it has none."""
        kinds = {name: kind for name, kind in extras_of(source).items() if kind != "image"}
        if not kinds:
            return None
        has_text = "text" in kinds.values()
        return ExtrasReader(kinds, self.tokenizer if has_text else None)

    @property
    def channels(self) -> int:
        """Number of channels of every image."""
        return channels_of(self.train_source)

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without labels."""
        return self.train_source.num_classes

    @property
    def num_test_batches(self) -> int:
        """Number of batches in a test phase, the same on every rank that has an image."""
        return len(self._test_parts())

    @property
    def has_test(self) -> bool:
        """Whether ``data.val`` has what a test phase needs: labels, or the ``method.targets``."""
        method, source = self.config.method, self.val_source
        if source is not None and "numbers" in required(method.name):
            return extras_of(source).keys() >= {*method.args["targets"]}
        return self._labeled.get("", False)

    @property
    def data_wait_s(self) -> float:
        """Seconds that training has waited for samples so far."""
        return self.batches.data_wait_s

    @property
    def loader_s(self) -> float | None:
        """Mean seconds per batch of this rank's workers together, over the last 16 batches.

        None without workers and before the first batch.
        """
        batches = self.batches
        if not (batches.num_workers and batches.made_s):
            return None
        return sum(batches.made_s) / len(batches.made_s) / batches.num_workers

    def train_batches(self, first: int) -> Iterator[Batch]:
        """Return an endless iterator over this rank's training batches.

        Starts the workers at once. If ``data.cache`` is ``ram`` or ``disk``, the first call decodes
        all images.

        Args:
            first: Number of the first global batch, counted over all epochs from 0.
        """
        self._decode_once()
        self.batches.dataset.draw = self.draw
        self.batches.start(first)
        return iter(self.batches)

    def iterate_all(self) -> Iterator[Batch]:
        """Yield batches of this rank's training images once, in order, with the views of epoch 0.

        For methods that need a pass over the whole data set before the first step or between
        epochs. Unreadable images are skipped, so batches may be smaller. They are not replaced,
        since an image would then occur twice.
        """
        self._decode_once()
        dataset = copy.copy(self.batches.dataset)
        dataset.replaces = False
        yield from self._pass(dataset, self.batches.bad_files)

    def _decode_once(self) -> None:
        """If ``data.cache`` is ``ram`` or ``disk``, decode all images once and read from there."""
        data, dataset = self.config.data, self.batches.dataset
        if data.cache in ("ram", "disk") and dataset.source is self.train_source:
            decoded = decode_once(self.train_source, data, self.batches.bad_files)
            for name in dataset.views.images:
                images = ExtraImages(self.train_source, name)
                decoded.images[name] = decode_once(images, data, self.batches.bad_files)
            dataset.source = decoded

    def labeled_samples(self) -> Iterator[Batch]:
        """Yield batches of this rank's part of the training images, with evaluation transforms."""
        yield from self._eval_batches(self._whole_images, self.batches.bad_files)

    @property
    def _whole_images(self) -> Source:
        """Training images for evaluations: decoded ones if ``data.cache`` has them in full size."""
        return self.train_source if self.config.data.max_side else self.batches.dataset.source

    def test_samples(self, name: str = "") -> Iterator[Batch]:
        """Yield batches of this rank's part of a validation set, with evaluation transforms.

        Args:
            name: Name of the set in ``data.val_sets``; "" for ``data.val``.
        """
        yield from self._eval_batches(self.val_sources[name], self.val_bad_files[name])

    def chosen_samples(self, indices: np.ndarray, batch_size: int) -> Iterator[Batch]:
        """Yield the training images at ``indices`` (N,) in batches, with evaluation transforms.

        Each rank gets all images of its own ``indices``, except unreadable ones. The last batch may
        have fewer than ``batch_size``.
        """
        batches = self._eval_batches(self._whole_images, self.batches.bad_files)
        batches.batches = in_batches(indices.tolist(), batch_size)
        yield from batches

    def val_batches(self, name: str = "") -> Iterator[Batch]:
        """Yield this rank's part of a validation set's batches, with training views of epoch 0.

        The global batches have ``train.batch_size`` images and do not depend on the number of
        ranks. A set with fewer images is one smaller batch, whose size is a multiple of the number
        of ranks. Images beyond the last full batch are dropped, and unreadable ones replaced. The
        parts have the same size on every rank, as losses over all ranks require. The set must have
        at least one image for each rank.

        Args:
            name: Name of the set in ``data.val_sets``; "" for ``data.val``.
        """
        source = self.val_sources[name]
        ranks = self.world.size
        size = min(self.config.train.batch_size, len(source) // ranks * ranks)
        dataset = train_dataset(self.config, source, self._extras_of(source))
        batches = self._pass(dataset, self.val_bad_files[name])
        parts = np.arange(len(source) // size * size).reshape(-1, ranks, size // ranks)
        batches.batches = parts[:, self.world.rank].tolist()
        yield from batches

    def test_batches(self) -> Iterator[Batch]:
        """Return an iterator over this rank's batches of ``data.val``, with extras.

        The only view, of the group ``eval``, is made by the evaluation transforms. ``data.val``
        must be set and have at least one image for each rank. Every rank then has the same number
        of batches, as losses over all ranks require.
        """
        source = self.val_source
        assert source is not None
        samples = self._eval_batches(source, self.val_bad_files[""], self._extras_of(source))
        samples.batches = self._test_parts()
        return iter(samples)

    def _test_parts(self) -> list[Sequence[int]]:
        """Return the indices of the images in each of this rank's test batches."""
        world, count = self.world, len(self.val_source or ())
        return in_equal_numbers(count, self._eval_batch_size, world.rank, world.size)

    def _eval_batches(
        self, source: Source, bad_files: BadFiles, extras: ExtrasReader | None = None
    ) -> EvalBatches:
        dataset = EvalDataset(source, self.eval_pipeline, self.config.train.seed, extras)
        return self._pass(dataset, bad_files)

    def _pass(self, dataset: EvalDataset | ViewDataset, bad_files: BadFiles) -> EvalBatches:
        return EvalBatches(
            dataset,
            batch_size=self._eval_batch_size,
            num_workers=self.config.data.num_workers,
            rank=self.world.rank,
            world_size=self.world.size,
            device=self.device,
            bad_files=bad_files,
        )

    @property
    def _eval_batch_size(self) -> int:
        return max(1, self.config.train.batch_size // self.world.size)

    @property
    def _bad_files(self) -> dict[str, BadFiles]:
        """Records of unreadable images by config key, those of training images first."""
        val = {files.key: files for files in self.val_bad_files.values()}
        return {"data": self.batches.bad_files, **val}

    def share_unreadable(self) -> None:
        """Give every rank the unreadable images of all ranks; every rank must call this method.

        Raises UserError if there are more than ``data.max_unreadable`` allows, or new ones although
        ``data.on_error`` is ``fail``.
        """
        records = self._bad_files
        parts = gather_objects({key: files.unshared for key, files in records.items()})
        for key, files in records.items():
            files.merge({path: why for part in parts for path, why in part[key].items()})

    @property
    def num_unreadable(self) -> int:
        """Number of unreadable training images, as of the last ``share_unreadable``."""
        return len(self.batches.bad_files.counted)

    def unreadable(self) -> list[str]:
        """Return a sentence for each data set with unreadable images.

        The state is that of the last ``share_unreadable``.
        """
        return [text for files in self._bad_files.values() if (text := files.summary())]

    def unreadable_state(self) -> dict[str, dict[str, str]]:
        """Return the unreadable images of each data set with their reasons, for a checkpoint.

        Calls ``share_unreadable`` first, so every rank must call this method.
        """
        self.share_unreadable()
        return {key: dict(files.counted) for key, files in self._bad_files.items()}

    def restore_unreadable(self, state: dict[str, dict[str, str]]) -> None:
        """Restore the records of unreadable images; the first rank rewrites the list files.

        Args:
            state: Result of ``unreadable_state``. If it is empty, the first rank also removes the
                list files of all validation sets.
        """
        first = is_primary()
        if first and not state:  # lists of other validation sets, too
            for path in self.config.out_folder.glob("bad_files_val*.txt"):
                path.unlink(missing_ok=True)
        for key, files in self._bad_files.items():
            files.restore(state.get(key, {}), write=first)

    def close(self) -> None:
        """Stop the workers of the training batches."""
        self.batches.close()


def val_key(name: str) -> str:
    """Return the config key of a validation set; an empty name means ``data.val``."""
    return f"data.val_sets.{name}" if name else "data.val"


def train_dataset(
    config: Config, source: Source, extras: ExtrasReader | None = None
) -> ViewDataset:
    """Build a dataset of training views, made where ``data.augment_on`` says.

    Args:
        config: Config of the run.
        source: Source of the images.
        extras: Reader of texts and arrays, if the source has any.

    Raises:
        ConfigError: If there are no views, their transforms are invalid, or their draws are
            requested but unknown.
    """
    views, seed = Views(config.views, channels_of(source)), config.train.seed
    recorder = _recorder(config, views)
    if config.data.augment_on == "cpu":
        return ViewDataset(source, views, seed, extras, recorder)
    engine = Engine(views, config.views)
    return DeviceDataset(source, views, seed, engine, config.data.max_side, extras, recorder)


def _recorder(config: Config, views: Views) -> DrawRecorder | None:
    """Return a recorder of views' random draws; None if neither recipe nor method needs it."""
    boxes = "boxes" in required(config.method.name)
    asked = [name for name, group in config.views.items() if group.draws or boxes]
    return DrawRecorder(views, config.views, asked) if asked else None
