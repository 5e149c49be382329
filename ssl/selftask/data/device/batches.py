"""Batches for the device engine: images and parameters, made by the workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.engine import Engine
from selftask.data.device.packing import Packed
from selftask.data.extras import ExtrasReader
from selftask.data.loading.collate import Allocator, BatchBuffer, BatchFields, RawBatch
from selftask.data.loading.dataset import ViewDataset
from selftask.data.loading.sample import Sample
from selftask.data.source import Source
from selftask.data.transforms.resampling import resize
from selftask.data.transforms.transform import Trace
from selftask.data.views import Views
from selftask.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

    from selftask.data.draw_recorder import DrawRecorder


@dataclass(frozen=True)
class DeviceBatch(RawBatch):
    """Batch whose views are not made yet; ``views`` has one tensor instead, the canvas.

    The canvas is uint8 (I * B, H, W, C) for I images per sample: the first images of all samples,
    then the second ones, and so on, each in the upper left corner and padded with 0. ``views`` is
    empty if there is no image, or until ``Cache.fill`` adds the canvas.
    """

    sizes: Tensor | None = None  # (I*B, 2) float32 height and width; None: images fill the canvas
    packed: Packed | None = None  # parameters of the views; None if there is no image

    @property
    def view_sizes(self) -> list[tuple[int, int]]:
        assert self.packed is not None, "it has images"
        return self.packed.view_sizes

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory, except its key."""
        return replace(
            super().pin_memory(),
            sizes=None if self.sizes is None else self.sizes.pin_memory(),
            packed=None if self.packed is None else self.packed.pin_memory(),
        )

    def make_views(self, dataset: Any, device: torch.device) -> list[Tensor]:
        """Return V float32 views (B, C, H, W), made by the engine of a DeviceDataset."""
        assert self.packed is not None, "batches without images are rejected before"
        pixels = self.views[0].to(device, non_blocking=True)
        sizes = None if self.sizes is None else self.sizes.to(device, non_blocking=True)
        return dataset.engine(pixels, sizes, self.packed.to(device))


class DeviceDataset(ViewDataset):
    """Training samples as images and parameters, from which the device makes the views."""

    makes_views_on_device = True

    def __init__(
        self,
        source: Source,
        views: Views,
        seed: int,
        engine: Engine,
        max_side: int | None = None,
        extras: ExtrasReader | None = None,
        recorder: DrawRecorder | None = None,
    ) -> None:
        """Set up the dataset.

        Args:
            source: Source of the images.
            views: Views to make of each image.
            seed: Seed of the draws.
            engine: Engine that makes the views.
            max_side: Longest side in pixels, to which larger images are shrunk; None: no limit.
            extras: Reader of the source's texts and arrays, if they are used.
            recorder: Recorder that adds the draws of views to the extras, if they are requested.
        """
        super().__init__(source, views, seed, extras, recorder)
        self.engine = engine
        self.max_side = max_side

    def read(self, index: int) -> tuple[list[np.ndarray], int, dict[str, np.ndarray] | None]:
        images, target, extras = super().read(index)
        if self.max_side is not None:
            images = [shrunk(image, self.max_side) for image in images]
        return images, target, extras

    def make(
        self, images: list[np.ndarray], epoch: int, index: int, out: Sequence[np.ndarray] = ()
    ) -> tuple[list[np.ndarray], list[Trace]]:
        """Return the images to send to the device, uint8 (H, W, C), and the draws of all views.

        ``out`` is not used.
        """
        return self.engine.prepare(images, self.seed, epoch, index)

    def collate(self, samples: Iterable[Sample], buffer: BatchBuffer) -> DeviceBatch:
        """Put all images into one canvas, and all parameters into one tensor.

        If views cannot be stacked, the batch has ``problem`` and no images.
        """
        fields = BatchFields()
        shown = [sample for sample in samples if fields.add(sample)]
        batch = DeviceBatch(views=[], **fields.of_batch(buffer.new))
        if not shown:
            return batch
        images = chain.from_iterable(zip(*(sample.views for sample in shown), strict=True))
        canvas, sizes = to_canvas([*images], buffer.new)
        try:
            packed = self.engine.pack([sample.traces for sample in shown], sizes)
        except UserError as error:
            return replace(batch, problem=str(error))
        return replace(batch, views=[canvas], sizes=sizes_in_canvas(sizes), packed=packed)


def shrunk(image: np.ndarray, longest: int) -> np.ndarray:
    """Shrink an image, uint8 (H, W, C), so that no side has more than ``longest`` pixels.

    The aspect ratio is kept, and the result antialiased. Smaller images are returned unchanged.
    """
    height, width = image.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1:
        return image
    return resize(image, max(1, round(height * scale)), max(1, round(width * scale)), "bilinear")


def to_canvas(images: list[np.ndarray], new: Allocator) -> tuple[Tensor, np.ndarray]:
    """Put images into the upper left corners of a canvas.

    Args:
        images: B images, uint8 (h, w, C), of any size.
        new: Allocator of the canvas.

    Returns:
        The canvas, uint8 (B, H, W, C) with the largest height and width, padded with 0; and height
        and width of the images, int64 (B, 2).
    """
    sizes = np.array([image.shape[:2] for image in images], dtype=np.int64)
    shape = len(images), *sizes.max(0).tolist(), images[0].shape[2]
    canvas = new(shape, np.uint8)
    canvas.fill(0)
    for row, image in zip(canvas, images, strict=True):
        row[: image.shape[0], : image.shape[1]] = image
    return torch.from_numpy(canvas), sizes


def sizes_in_canvas(sizes: np.ndarray) -> Tensor | None:
    """Return the sizes as float32 (B, 2); None if all are equal, so that they fill the canvas."""
    return None if (sizes == sizes[0]).all() else torch.from_numpy(sizes.astype(np.float32))
