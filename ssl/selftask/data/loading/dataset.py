"""Datasets of views for the loader, and the treatment of unreadable images.

Nothing here imports torch, so that mistakes in the ``data:`` section are reported at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from selftask.data.extras import ExtrasReader, read_extra_image
from selftask.data.loading.sample import Sample
from selftask.data.source import Source, channels_of
from selftask.errors import BadImage, UserError
from selftask.random.splitmix import hash_words
from selftask.random.views import draw_rng

if TYPE_CHECKING:
    import numpy as np

    from selftask.data.draw_recorder import DrawRecorder
    from selftask.data.loading.collate import BatchBuffer, Draw, RawBatch
    from selftask.data.transforms.pipeline import Compose, Normalizer
    from selftask.data.transforms.transform import Trace
    from selftask.data.views import Views

MAX_REPLACEMENTS = 100  # tried for one sample before giving up
MAX_FAILED_READS = 5  # in a row; with retries, each takes 0.5 s if the disk returns EIO
_REPLACEMENT = 0x7265706C  # "repl": separates these hashes from other uses of the same seed


class Dataset(ABC):
    """Base class of the loader's datasets, which read samples by key and collate them."""

    source: Source
    makes_views_on_device = False  # True: the loader may make the next batch's views ahead
    groups: Mapping[str, int]  # number of views of each group, in their order
    recorder: DrawRecorder | None = None  # recorder of the views' draws, if they are requested
    draw: Draw | None = None  # draws for method and dropout layers; called in a worker

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.source)

    @abstractmethod
    def sample(self, key: tuple[int, int], out: Sequence[np.ndarray] = ()) -> Sample:
        """Return the sample of a key (epoch, index); raises UserError, never BadImage.

        Views, uint8 (H, W, C), may be written to ``out`` (one array per view) or be new arrays.
        """

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        return self.sample(key)

    @property
    @abstractmethod
    def to_float(self) -> Sequence[Normalizer]:
        """Normalizer of each view, which converts its batch to the input of a network."""

    def collate(self, samples: Iterable[Sample], buffer: BatchBuffer) -> RawBatch:
        """Collate samples into a batch; called in a worker."""
        from selftask.data.loading.collate import collate

        return collate(samples, buffer, self.transform_keys)

    @property
    def transform_keys(self) -> list[str]:
        """Config key of the transforms of each view, for messages."""
        groups = self.groups.items()
        return [f"views.{name}.transforms" for name, count in groups for _ in range(count)]


def replacement(seed: int, epoch: int, index: int, attempt: int, num_images: int) -> int:
    """Return the index of the image to try at this attempt, in place of an unreadable one.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch; for a repeated image, the first number of its ``Batch.key``.
        index: Index of the sample's own image, the same at every attempt.
        attempt: Number of the attempt, from 0.
        num_images: Number of images of the source.
    """
    return hash_words(seed, _REPLACEMENT, epoch, index, attempt) % num_images


def read(source: Source, index: int) -> tuple[np.ndarray, int]:
    """Return an image, uint8 (H, W, C), and its label.

    Raises:
        BadImage: If the image cannot be read.
        UserError: If the image's shape violates the Source contract, or if the storage has failed
            MAX_FAILED_READS times in a row, since replacing images would not end then.
    """
    try:
        image, target = source[index]
    except BadImage as error:
        _check_storage(error)
        raise
    _FAILED.clear()
    channels = channels_of(source)
    if image.shape[2:] != (channels,):
        raise UserError(
            f"{source.path(index)}: an array of shape {image.shape}; (H, W, {channels}) is what "
            f"is expected of {type(source).__name__}, by its attribute `channels`"
        )
    return image, target


_FAILED: list[BadImage] = []  # consecutive reads of this process that failed in storage


def _check_storage(error: BadImage) -> None:
    if not error.storage_failed:
        _FAILED.clear()
        return
    _FAILED.append(error)
    if len(_FAILED) == MAX_FAILED_READS:
        _FAILED.clear()
        raise UserError(
            f"data: the last {MAX_FAILED_READS} reads failed; check the disk or the file system "
            f"of {error}"
        )


@contextmanager
def naming(source: Source, index: int) -> Iterator[None]:
    """Context manager that names an image in the errors of its transforms."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source.path(index)}: {error}") from error
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"The image is {source.path(index)}.")
        raise


class ViewDataset(Dataset):
    """Training samples: ``dataset[epoch, index]`` is a Sample with all views of one image.

    An unreadable image is replaced by another one, chosen by a hash of (seed, epoch, index). The
    draws remain those of (epoch, index). A sample therefore does not depend on worker, rank or
    resume. ``Sample.index`` is the index of the replacement, since methods with a memory bank have
    an entry for each image. If ``replaces`` is False, unreadable images are skipped instead. A
    skipped sample, or one without a readable image after MAX_REPLACEMENTS attempts, has no views.

    Args:
        source: Source of the images.
        views: Views to make of each image.
        seed: Seed of the draws.
        extras: Reader of the source's texts and arrays, if they are used.
        recorder: Recorder that adds the draws of views to the extras, if they are requested.
    """

    replaces = True

    def __init__(
        self,
        source: Source,
        views: Views,
        seed: int,
        extras: ExtrasReader | None = None,
        recorder: DrawRecorder | None = None,
    ) -> None:
        self.source = source
        self.views = views
        self.groups = views.groups
        self.seed = seed
        self.extras = extras
        self.recorder = recorder

    @property
    def to_float(self) -> Sequence[Normalizer]:
        return self.views.to_float

    def sample(self, key: tuple[int, int], out: Sequence[np.ndarray] = ()) -> Sample:
        epoch, index = key
        shown, bad = index, []
        for attempt in range(1 + MAX_REPLACEMENTS * self.replaces):
            try:
                images, target, extras = self.read(shown)
            except BadImage as error:
                bad.append(error)
                shown = replacement(self.seed, epoch, index, attempt, len(self.source))
            else:
                with naming(self.source, shown):
                    views, traces = self.make(images, epoch, index, out)
                if self.recorder is not None:
                    row = self.recorder.row([image.shape[:2] for image in images], traces)
                    extras = {**(extras or {}), self.recorder.name: row}
                return Sample(views, target, shown, key, bad, extras, traces)
        return Sample([], -1, index, key, bad)

    def read(self, index: int) -> tuple[list[np.ndarray], int, dict[str, np.ndarray] | None]:
        """Return all images of a sample, uint8 (H, W, C), its label, and its extras or None.

        Raises:
            BadImage: If an image or an extra field cannot be read.
            UserError: If a field violates the Source contract.
        """
        image, target = read(self.source, index)
        extra_images = [read_extra_image(self.source, index, name) for name in self.views.images]
        extras = None if self.extras is None else self.extras.read(self.source, index)
        return [image, *extra_images], target, extras

    def make(
        self, images: list[np.ndarray], epoch: int, index: int, out: Sequence[np.ndarray] = ()
    ) -> tuple[list[np.ndarray], list[Trace]]:
        """Return the views of a sample, and the draws of each view of ``Views.made``.

        If no recorder is set, the list of draws is empty.

        Args:
            images: Images of the sample, uint8 (H, W, C).
            epoch: First number of the sample's key.
            index: Second number of the sample's key.
            out: Arrays to which the views are written if possible, in order.
        """
        image, *extra_images = images
        traces: list[Trace] = []
        recorded = None if self.recorder is None else traces
        return self.views(image, self.seed, epoch, index, out, extra_images, recorded), traces


class EvalDataset(Dataset):
    """Samples for evaluation: one view by the evaluation transforms, the same every time.

    An unreadable image is skipped (its sample has no views) and not replaced, since the replacement
    would be counted twice.

    Args:
        source: Source of the images.
        pipeline: The evaluation transforms.
        seed: Seed of their draws, if some are random.
        extras: Reader of the source's texts and arrays, if they are used.
    """

    groups = MappingProxyType({"eval": 1})

    def __init__(
        self,
        source: Source,
        pipeline: Compose,
        seed: int = 0,
        extras: ExtrasReader | None = None,
    ) -> None:
        self.source = source
        self.pipeline = pipeline
        self.seed = seed
        self.extras = extras

    @property
    def to_float(self) -> Sequence[Normalizer]:
        return [self.pipeline.to_float]

    @property
    def transform_keys(self) -> list[str]:
        return ["eval.transforms"]

    def sample(self, key: tuple[int, int], out: Sequence[np.ndarray] = ()) -> Sample:
        index = key[1]
        try:
            image, target = read(self.source, index)
            extras = None if self.extras is None else self.extras.read(self.source, index)
        except BadImage as error:
            return Sample([], -1, index, (0, index), [error])
        rng = draw_rng(self.seed, 0, index, 0)
        with naming(self.source, index):
            view = self.pipeline(image, rng, out[0] if out else None)
        return Sample([view], target, index, (0, index), [], extras)
