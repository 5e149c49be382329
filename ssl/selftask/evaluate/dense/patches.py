"""Patch features of square images from a frozen backbone.

B images of S x S pixels, patches in a grid of h x w, E features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selftask.config.checks.grid import nominal_size
from selftask.config.fields import setting
from selftask.config.schema import Component, Config
from selftask.data.extras import ExtrasReader
from selftask.data.loading.dataset import EvalDataset
from selftask.data.loading.loader import EvalBatches
from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.source import Source, Wrapped, channels_of
from selftask.data.subset import Part, Subset
from selftask.data.transforms.pipeline import build_pipeline
from selftask.data.transforms.resampling import resize
from selftask.errors import UserError
from selftask.evaluate.chunks import InChunks
from selftask.evaluate.features import check_finite
from selftask.models.features.extract import adapter_of, extract, fixed_size, interpolates

_BATCH_SIZE = 16  # affects memory only


_NO_SIZE = "eval.transforms has no crop; give the size in pixels, such as size=224"


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Image size and layer of patch features."""

    size: int | None = setting(None, min=1)
    """Height and width in pixels to which images are resized, whatever their aspect ratio; null:
    the size of ``eval.transforms``.
    """
    layer: int | None = setting(None, min=-1000, max=1000)
    """Index of a hidden layer, -1 for the last; null: the output, after the final norm."""

    def problems(self, config: dict[str, Any] | None = None) -> Iterator[str]:
        transforms = config["eval"]["transforms"] if config else []
        if config and not self._size(map(Component.from_dict, transforms)):
            yield f"size: {_NO_SIZE}"

    def size_of(self, config: Config) -> int:
        """Return ``size`` or the size of ``eval.transforms``; raise UserError without either."""
        if (size := self._size(config.eval.transforms)) is None:
            raise UserError(f"size: {_NO_SIZE}")
        return size

    def _size(self, transforms: Iterable[Component]) -> int | None:
        return self.size or nominal_size(list(transforms))


class PatchFeatures:
    """Patch features of a frozen backbone.

    Args:
        backbone: A backbone with patches, see ``models.features``; the caller sets eval mode.
        size: Height and width of the images in pixels.
        layer: Number of a hidden layer, negative from the last; None for the output.

    Raises:
        UserError: If the backbone has no patches, no such layer, or does not accept the size.
    """

    def __init__(self, backbone: nn.Module, size: int, layer: int | None = None) -> None:
        adapter = adapter_of(backbone)
        self._layers = adapter.layer_numbers([] if layer is None else [layer], "layer")
        name, only = type(backbone).__name__, fixed_size(backbone)
        if interpolates(backbone):
            if patch := next((side for side in adapter.patch_size if side and size % side), None):
                low = max(1, size // patch) * patch
                raise UserError(
                    f"size: {size} pixels cannot be divided into the patches of {patch} pixels of "
                    f"a {name}; use {low} or {low + patch}"
                )
        elif only is not None and only != (size, size):
            raise UserError(
                f"size: {size}; a {name} takes images of {only[0]}x{only[1]} pixels only; "
                f"image_size={size} builds it for that size"
            )
        self.backbone = backbone
        self._run = InChunks(self._maps, "images")

    def __call__(self, images: Tensor) -> Tensor:
        """Return the patch features (B, E, h, w) of images (B, C, S, S), float32.

        Raises:
            UserError: If features are not finite.
        """
        (maps,) = self._run(images)
        check_finite(maps, "the patch features")
        return maps

    @torch.no_grad()
    def _maps(self, images: Tensor) -> tuple[Tensor]:
        features = extract(self.backbone, images, layers=self._layers)
        tokens = features.hidden[self._layers[0]] if self._layers else features.tokens
        return (tokens.map.float(),)


class Squared(Wrapped):
    """Images of a source, resized to squares, without labels.

    Args:
        source: The images.
        size: Height and width in pixels.
    """

    def __init__(self, source: Source, size: int) -> None:
        super().__init__(source)
        self.size = size
        self.labels, self.extras = None, type(self).extras

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, _ = self.source[index]
        return resize(image, self.size, self.size, "bilinear"), NO_LABEL


def limited(source: Source, images: int | None, seed: int = 0) -> Source:
    """Return at most ``images`` randomly chosen images in their original order; all if None."""
    if images is None or images >= len(source):
        return source
    return Subset(source, Part(count=images, seed=seed))


def square_batches(source: Squared, config: Config, device: torch.device, key: str) -> EvalBatches:
    """Return batches of the readable images, normalized as in ``eval.transforms``.

    Args:
        source: The images, whose extra arrays are read, too.
        config: Config with ``eval.transforms``, of which only ``normalize`` is used.
        device: Device that the batches are moved to.
        key: Config key of the images, for messages.
    """
    normalize = [t for t in config.eval.transforms if t.name == "normalize"]
    pipeline = build_pipeline(normalize, "eval.transforms", channels_of(source))
    dataset = EvalDataset(source, pipeline, extras=ExtrasReader(source.extras))
    return EvalBatches.of(
        dataset, source, config.data, batch_size=_BATCH_SIZE, device=device, key=key
    )
