"""A network with two heads, one for whole images and one for their patches, as in iBOT.

V views, of which the first P have scores of patches; B images; M patches of these P * B views;
E features of the backbone; K outputs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import adapter_of
from selftask.models.network import Network


class ImageAndPatchScores(NamedTuple):
    """Output of ``PatchScoreNetwork``."""

    images: Tensor
    """(V, B, K), of pooled features."""
    patches: Tensor
    """(M, K), of patch tokens: view by view, image by image, row by row."""


class PatchScoreNetwork(Network):
    """Scores of images from pooled features, and of patches from the tokens of the last layer.

    Args:
        backbone: Backbone with ``"tokens"`` in its ``offers``.
        head: Pooled features (N, E) -> (N, K).
        patch_head: Patch tokens (M, E) -> (M, K).
        num_patch_views: Number of views whose patches are scored, P; None for all.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        patch_head: nn.Module,
        *,
        num_patch_views: int | None = None,
    ) -> None:
        super().__init__(backbone, head)
        self.patch_head = patch_head
        self.num_patch_views = num_patch_views

    def forward(self, views: Sequence[Tensor]) -> ImageAndPatchScores:  # type: ignore[override]
        """V tensors (B, C, H, W) -> scores. Adjacent views of the same size share a pass."""
        pooled, tokens = list[Tensor](), list[Tensor]()
        for _, neighbors in groupby(range(len(views)), key=lambda index: views[index].shape):
            indices = list(neighbors)
            features = self.extract([views[index] for index in indices])
            pooled.append(features.pooled)
            tokens.extend(features.tokens.patches.chunk(len(indices)))  # (B, N, E) of each view
        every = torch.cat(pooled)  # (V * B, E)
        patches = torch.cat([view.flatten(0, 1) for view in tokens[: self.num_patch_views]])
        images: Tensor = self.head(every)
        return ImageAndPatchScores(images.unflatten(0, (len(views), -1)), self.patch_head(patches))


def check_same_patches(student: nn.Module, teacher: nn.Module) -> None:
    """Raise UserError unless both backbones divide every image into the same grid of patches."""
    ours, theirs = adapter_of(student), adapter_of(teacher)
    for adapter, owner in ((theirs, "method.teacher"), (ours, "backbone")):
        if "tokens" not in adapter.offers:
            raise UserError(f"{owner}: has no grid of patches; method.patch_weight needs one")
    sides = [adapter.stride or adapter.patch_size[0] for adapter in (ours, theirs)]
    if sides[0] != sides[1]:
        raise UserError(
            f"method.patch_weight: the student has patches of {sides[0]} pixels and the teacher of "
            f"{sides[1]}; their grids must be the same"
        )
