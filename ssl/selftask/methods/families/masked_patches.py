"""Methods that hide patches of an image and predict something at them.

Hidden patches are replaced by a mask token (``MaskedNetwork``, requires ``"tokens"``), or left out
and predicted from the others (``KeptNetwork``, requires ``"subset"``).

B: images per rank, N: patches of an image, K of them kept, in M groups of Q predicted, E: width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.distributed import accelerator
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid
from selftask.models.masks import hide_patches
from selftask.models.network import Network, PatchOutput
from selftask.models.patch_predictor import PatchPredictor, fix_sincos_positions

if TYPE_CHECKING:
    from selftask.task import Task


class MaskedPatches(Method):
    """Method that draws ``batch["mask"]`` for one view; the network gets ``(images, mask)``.

    ``check_grid`` is called for the size of the backbone before a run starts.
    """

    loss_reduction: ClassVar[Literal["samples", "gathered", "statistics"]] = "samples"
    sample_dim: ClassVar[int | None] = 0
    views = 1
    requires: ClassVar[tuple[str, ...]] = ("tokens",)
    draws_on_host: ClassVar[bool] = False
    """Whether ``draw_mask`` gets keys on the CPU and returns a tensor there, which is then copied.
    For masks that take one decision after another, which are many small kernels on a device.
    """

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return a network that applies the head to the patches of the masked image."""
        self.check_backbone(backbone)
        self.check_grid(adapter_of(backbone).built_grid)
        return MaskedNetwork(backbone, self.build_head(embed_dim(backbone)))

    def check_grid(self, grid: Grid) -> None:
        """Raise UserError if there are no masks for a grid of patches."""

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        (images,) = batch.all_views
        grid = adapter_of(task.base_model.backbone).grid(*images.shape[-2:])
        host, device = self.draws_on_host, images.device
        key = batch.key if host else batch.key.to(device, non_blocking=True)
        mask = self.draw_mask(task.config.train.seed, key, grid)
        batch["mask"] = accelerator.copy_to(device, mask) if host else mask
        batch.input = (images, batch["mask"])

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Any:
        """Draw a mask for each image: bool (B, N) or (B, h, w), True for hidden patches.

        Args:
            seed: Seed of the run.
            key: (B, 2), see ``random.keyed``; on the device, or on the CPU with ``draws_on_host``.
            grid: Rows and columns of patches.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no masks")

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image and the patches that the network sees."""
        (images,) = batch.all_views
        return {"image": images, "masked": hide_patches(images, batch["mask"].flatten(1))}


class MaskedNetwork(Network):
    """Backbone with hidden patches replaced by a trained token, then the head.

    Args:
        backbone: Backbone with ``"tokens"`` in its ``offers``.
        head: Patches (B, N, E) -> predictions.
        takes_map: Whether the head takes a map (B, E, h, w) instead.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, *, takes_map: bool = False) -> None:
        super().__init__(backbone, head)
        self.takes_map = takes_map
        self.mask_token = nn.Parameter(torch.empty(adapter_of(backbone).mask_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        features = self.extract(images, mask=mask.flatten(1), mask_token=self.mask_token)
        shown = features.tokens.map if self.takes_map else features.patches
        return PatchOutput(self.head(shown), features, mask)


class Kept(NamedTuple):
    """Patches that are encoded, and patches to predict from them."""

    keep: Tensor
    """(B, K), indices of the encoded patches."""
    asked: Tensor
    """(B, M, Q), indices of the patches to predict."""
    padding: Tensor | None = None
    """(B, K) bool, True for padding in ``keep``."""
    asked_padding: Tensor | None = None
    """(B, M, Q) bool, likewise for ``asked``."""


class KeptNetwork(Network):
    """Encoder of some patches, and a transformer that predicts others: (B, M, Q, outputs)."""

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        features = self.extract(images, keep=mask.keep, padding=mask.padding)
        predicted: Tensor = self.head(
            features.tokens.sequence,
            mask.keep,
            mask.asked,
            padding=mask.padding,
            asked_padding=mask.asked_padding,
            grid=adapter_of(self.backbone).grid(*images.shape[-2:]),
        )
        return PatchOutput(predicted, features, mask)


def build_kept_network(
    backbone: nn.Module,
    task: Task,
    initialize: Callable[[nn.Module], None],
    *,
    num_out: int,
    dim: int,
    depth: int,
    num_heads: int,
) -> KeptNetwork:
    """Return a backbone with fixed positions and a predictor of patches.

    Args:
        backbone: Backbone with ``"subset"`` in its ``offers``.
        task: The task; a backbone whose weights were loaded (``init``) is not changed.
        initialize: Sets the initial weights of predictor and backbone, in place.
        num_out: Number of outputs per patch.
        dim: Width of the predictor.
        depth: Blocks of the predictor.
        num_heads: Attention heads of a block.
    """
    grid, width = adapter_of(backbone).built_grid, embed_dim(backbone)
    predictor = PatchPredictor(
        width, grid, dim=dim, depth=depth, num_heads=num_heads, num_out=num_out
    )
    initialize(predictor)
    if task.config.init.backbone is None:
        fix_sincos_positions(backbone)
        initialize(backbone)
    return KeptNetwork(backbone, predictor)
