"""Images and draws on their way from the workers to the engine."""

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
from selftask.data.loading.collate import Allocator, Batch, BatchBuffer, BatchFields
from selftask.data.loading.dataset import ViewDataset
from selftask.data.loading.sample import Sample
from selftask.data.source import Source
from selftask.data.transforms.resampling import resize
from selftask.data.views import Views
from selftask.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

    from selftask.data.draw_recorder import DrawRecorder


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A batch whose views are still to be made: ``views`` is one canvas with all images.

    With I images a sample it has I * B rows, the first images of all samples first.
    """

    sizes: Tensor | None = None  # (I*B, 2) float32 height and width; None: all fill the canvas
    packed: Packed | None = None  # the draws; None where there is no image

    def pin_memory(self) -> Self:
        """The same in page-locked memory."""
        return replace(
            super().pin_memory(),
            sizes=None if self.sizes is None else self.sizes.pin_memory(),
            packed=None if self.packed is None else self.packed.pin_memory(),
        )

    def to_sample(self, device: torch.device, to_float: Any) -> dict[str, Any]:
        """Views, target and index; ``to_float`` is the engine, which makes the views."""
        assert self.packed is not None, "left-out images are noticed before"
        pixels = self.views[0].to(device, non_blocking=True)
        sizes = None if self.sizes is None else self.sizes.to(device, non_blocking=True)
        return {
            "views": to_float(pixels, sizes, self.packed.to(device)),
            **self.rest(device),
        }


class DeviceDataset(ViewDataset):
    """Training samples whose views are made on the device: an image and what was drawn for it."""

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
        """``max_side``: pixels that the longer side of a handed-over image has at most."""
        super().__init__(source, views, seed, extras, recorder)
        self.engine = engine
        self.max_side = max_side

    @property
    def to_float(self) -> Any:
        """What makes a batch the input of a network: the engine."""
        return self.engine

    def make(
        self, images: list[np.ndarray], epoch: int, index: int, out: Sequence[np.ndarray] = ()
    ) -> tuple[list[np.ndarray], Any]:
        """The images themselves, and the draws for all of their views."""
        if self.max_side is not None:
            images = [shrunk(image, self.max_side) for image in images]
        (height, width), *further = (image.shape[:2] for image in images)
        return images, self.engine.draw(height, width, self.seed, epoch, index, further)

    def collate(self, samples: Iterable[Sample], places: BatchBuffer) -> DeviceBatch:
        """All images in one canvas, and all draws in one tensor."""
        listed = BatchFields()
        shown = [sample for sample in samples if listed.add(sample)]
        batch = DeviceBatch(views=[], **listed.of_batch(places.new))
        if not shown:
            return batch
        images = chain.from_iterable(zip(*(sample.views for sample in shown), strict=True))
        canvas, sizes = to_canvas([*images], places.new)
        try:
            packed = self.engine.pack([sample.drawn for sample in shown], sizes)
        except UserError as error:
            return replace(batch, problem=str(error))
        return replace(batch, views=[canvas], sizes=sizes_in_canvas(sizes), packed=packed)


def shrunk(image: np.ndarray, longest: int) -> np.ndarray:
    """The image with its longer side at most ``longest`` pixels, antialiased."""
    height, width = image.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1:
        return image
    return resize(image, max(1, round(height * scale)), max(1, round(width * scale)), "bilinear")


def to_canvas(images: list[np.ndarray], new: Allocator) -> tuple[Tensor, np.ndarray]:
    """uint8 (B, H, W, C) with each in its upper left corner, and their sizes (B, 2) int64."""
    sizes = np.array([image.shape[:2] for image in images], dtype=np.int64)
    shape = len(images), *sizes.max(0).tolist(), images[0].shape[2]
    canvas = new(shape, np.uint8)
    canvas.fill(0)
    for place, image in zip(canvas, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = image
    return torch.from_numpy(canvas), sizes


def sizes_in_canvas(sizes: np.ndarray) -> Tensor | None:
    """(B, 2) float32, or None where all are the same."""
    return None if (sizes == sizes[0]).all() else torch.from_numpy(sizes.astype(np.float32))
