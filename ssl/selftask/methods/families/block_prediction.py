"""Methods that predict a teacher's features of blocks of an image from another block.

B: images per rank, N: patches of an image, K: maximum number of patches in a context, M: target
blocks, Q: maximum number of patches in a target block, D: width of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method, Task
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.masks import MultiBlockMask, hide_patches, mask_of
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.models.weights.lora import base_weight


class BlockPrediction(Method):
    """Method that predicts ``teacher_patches`` of several blocks of an image from the rest.

    Combine it with ``MaskedPatches``, and return ``Kept(*self.draw_blocks(...))`` from
    ``draw_mask``.
    """

    requires: ClassVar[tuple[str, ...]] = ("subset",)
    distance: ClassVar[Callable[..., Tensor]]
    """Loss function of ``torch.nn.functional`` for predictions and features (B, M, Q, D)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_targets: int = setting(4, min=1)
        """Number of target blocks, M."""
        target_scale: tuple[float, float] = (0.15, 0.2)
        """Range of a target's share of the image's area."""
        target_ratio: tuple[float, float] = (0.75, 1.5)
        """Range of height / width of a target, relative to the image's."""
        context_scale: tuple[float, float] = (0.85, 1.0)
        """Range of the context's share of the image's area, before the targets are cut out."""
        min_context: int = setting(10, min=0)
        """Minimum number of patches in a context; if fewer remain, targets may overlap it."""
        max_context: float = setting(0.5, above=0, max=1)
        """Maximum share of the image's patches in a context; random excess patches are dropped."""
        predictor_dim: int = setting(384, min=1, tiny=16)
        """Width of the predictor."""
        predictor_depth: int = setting(6, min=1, tiny=1)
        """Number of blocks of the predictor; 12 for ViT-L and larger."""
        predictor_heads: int = setting(12, min=1, tiny=2)
        """Number of attention heads of the predictor."""
        init_std: float | None = setting(0.02, above=0)
        """Initial standard deviation of weights. null: larger in layers with few inputs, for
        networks much narrower than ViT-B, in which 0.02 makes features small next to the positions.
        """

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            backbone = config["backbone"]
            if backbone.get("pool") == "token":
                yield "backbone.pool: patches are trained, not the class token; use pool: avg"
            for name in ("target_scale", "context_scale"):
                low, high = getattr(self, name)
                if not 0 < low <= high <= 1:
                    yield f"{name}: [{low}, {high}]; 0 < least <= largest <= 1 is expected"
            low, high = self.target_ratio
            if not 0 < low <= high:
                yield f"target_ratio: [{low}, {high}]; 0 < least <= largest is expected"
            elif self.target_scale[1] * max(high, 1 / low) > 1:
                yield (
                    f"target_ratio: [{low}, {high}] makes blocks longer than the image; take "
                    "values closer to 1, or a smaller target_scale"
                )
            if self.predictor_dim % 4 or self.predictor_dim % self.predictor_heads:
                yield (
                    f"predictor_dim: {self.predictor_dim} must be divisible by 4 (its positions) "
                    f"and by predictor_heads={self.predictor_heads}"
                )

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError if the backbone's embedding of an image is its class token."""
        if getattr(backbone, "global_pool", None) == "token":
            raise UserError(
                "backbone.args: patches are trained, not the class token; use global_pool: avg"
            )

    def network_options(self, backbone: nn.Module) -> dict[str, Any]:
        """Check the backbone, set ``self.masks``, and return options of ``build_kept_network``.

        Returns:
            The arguments ``initialize``, ``dim``, ``depth`` and ``num_heads``.

        Raises:
            UserError: If the method cannot train the backbone.
        """
        config = self.config
        self.check_backbone(backbone)
        self.masks = self.build_masks(adapter_of(backbone).built_grid)
        return {
            "initialize": partial(initialize, std=config.init_std),
            "dim": config.predictor_dim,
            "depth": config.predictor_depth,
            "num_heads": config.predictor_heads,
        }

    def build_masks(self, grid: Grid) -> MultiBlockMask:
        config = self.config
        return MultiBlockMask(
            grid,
            num_targets=config.num_targets,
            target_scale=config.target_scale,
            target_ratio=config.target_ratio,
            context_scale=config.context_scale,
            min_context=config.min_context,
            max_context=config.max_context,
        )

    def draw_blocks(self, seed: int, key: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """Draw the patches of each context and of its targets.

        Replaces ``self.masks`` if it is for another grid.

        Args:
            seed: Seed of the run.
            key: (B, 2) on the CPU, see ``random.keyed``.
            grid: Rows and columns of patches.

        Returns:
            Indices of the context (B, K) and of the targets (B, M, Q), then the padding of each, in
            the same shapes; see ``Kept``.
        """
        if grid != self.masks.grid:  # view size differs from that of the backbone
            self.masks = self.build_masks(grid)
        (keep, padding), (predict, predict_padding) = self.masks.draw(seed, key)
        return keep, predict, padding, predict_padding

    def teacher_patches(self, images: Tensor) -> Tensor:
        """Return the teacher's features of all patches (B, N, D), without gradients."""
        raise NotImplementedError(f"{type(self).__name__} has no teacher")

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["features"]`` (B, M, Q, D) of the target blocks.

        They are the teacher's features of the whole image, normalized over D.
        """
        batch = task.last_batch
        indices = batch["mask"].predict  # (B, M, Q)
        features = to_float32(self.teacher_patches(batch.all_views[0]))  # (B, N, D)
        features = F.layer_norm(features, features.shape[-1:])
        features = gather_tokens(features, indices.flatten(1))
        batch["features"] = features.view(*indices.shape, -1)  # (B, M, Q, D)

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the distance, averaged over patches of a block, blocks and images.

        ``output.prediction`` is (B, M, Q, D).
        """
        predicted = to_float32(output.prediction)  # (B, M, Q, D)
        distance = self.distance(predicted, batch["features"], reduction="none")
        inside = ~batch["mask"].predict_padding  # (B, M, Q)
        of_patch = distance.mean(dim=3) * inside  # (B, M, Q)
        of_block = of_patch.sum(dim=2) / inside.sum(dim=2)  # (B, M)
        return of_block.mean()

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its context, and each target block."""
        images, mask = batch.input
        blocks = {"context": (mask.keep, mask.padding)}
        for block in range(mask.predict.shape[1]):
            name = f"target {block + 1}"
            blocks[name] = (mask.predict[:, block], mask.predict_padding[:, block])
        shown = {
            name: hide_patches(images, ~mask_of(rows, unused, self.masks.num_patches))
            for name, (rows, unused) in blocks.items()
        }
        return {"image": images, **shown}


@torch.no_grad()
def initialize(module: nn.Module, *, std: float | None) -> None:
    """Initialize linear and convolutional layers: truncated normal weights, zero biases.

    Args:
        module: Module to initialize in place.
        std: Standard deviation of all weights, as in the published code. (That code divides the
            residual weights of block l by sqrt(2 l), and then draws all linear layers again.)
            None, for narrow networks: 1 / sqrt(3 n) for n inputs, at least 0.02; then the residual
            weights of block l of ``module.blocks`` are divided by sqrt(2 l).
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            weight = base_weight(part)
            deviation = std or max(0.02, (3 * weight[0].numel()) ** -0.5)
            nn.init.trunc_normal_(weight, std=deviation)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    blocks: Any = module.blocks if std is None else []
    for number, block in enumerate(blocks, start=1):
        for layer in (block.attn.proj, block.mlp.fc2):
            base_weight(layer).div_((2.0 * number) ** 0.5)
