"""I-JEPA: from one block of an image, predict the features of four others.

Assran et al., Self-Supervised Learning from Images with a Joint-Embedding Predictive Architecture,
CVPR 2023, arXiv:2301.08243. The loss is the smooth L1 distance of the published code; the paper
writes L2.

B: images per rank, N: patches of an image, K: most patches of a context, M: target blocks, Q: most
patches of one, E: width of the backbone, T: its prefix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.models.masked_vit import (
    PatchPredictor,
    as_vit,
    encode,
    fix_sincos_positions,
    gather_tokens,
    grid_size,
    padded_indices,
    patch_tokens,
)
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.models.teacher import Teacher
from selftask.optim.schedules import build_schedule
from selftask.random.keyed import uniform
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task

Indices = tuple[Tensor, Tensor]  # of patches, and where they are padding

_SQUARE = (1.0, 1.0)  # as the image is
_DRAWS = 4  # for a block: its area, its shape, its row, its column


@register_method("ijepa")
class IJEPA(Method):
    """The teacher sees the whole image and says what is to be predicted; it is what is kept."""

    loss_reduction = "samples"
    views = 1
    requires = ("tokens",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_targets: int = setting(4, min=1)  # M
        target_scale: tuple[float, float] = (0.15, 0.2)  # of the image's area
        target_ratio: tuple[float, float] = (0.75, 1.5)  # height / width, relative to the image's
        context_scale: tuple[float, float] = (0.85, 1.0)  # before the targets are cut out
        min_context: int = setting(
            10, min=0
        )  # patches; with fewer left, the last targets may overlap
        max_context: float = 0.5  # of the image's patches; with more left, random ones go
        predictor_dim: int = setting(384, min=1, tiny=16)  # width
        predictor_depth: int = setting(6, min=1, tiny=1)  # blocks; 12 for ViT-L and larger
        predictor_heads: int = setting(12, min=1, tiny=2)
        # deviation of first weights; null: more in layers of few inputs, for networks much narrower
        # than a ViT-B, which with 0.02 pass on little but positions
        init_std: float | None = setting(0.02, above=0)
        # of the teacher; grows linearly to 1
        momentum: float = setting(0.996, min=0, max=1)

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            backbone = config["backbone"]
            if backbone.get("dynamic_img_size"):
                yield "backbone.dynamic_img_size: ijepa needs a fixed grid; set it to false"
            if backbone.get("pool") == "token":
                yield "backbone.pool: ijepa trains patches, not the class token; use pool: avg"
            if not 0 < self.max_context <= 1:
                yield f"max_context: {self.max_context}; 0 < share <= 1 is expected"
            for name in ("target_scale", "context_scale"):
                low, high = getattr(self, name)
                if not 0 < low <= high <= 1:
                    yield f"{name}: [{low}, {high}]; 0 < least <= largest <= 1 is expected"
            low, high = self.target_ratio
            if not 0 < low <= high:
                yield f"target_ratio: [{low}, {high}]; 0 < least <= largest is expected"
            elif self.target_scale[1] * max(high, 1 / low) > 1:
                yield f"target_ratio: [{low}, {high}] makes blocks longer than the image; less is"
            if self.predictor_dim % 4 or self.predictor_dim % self.predictor_heads:
                yield (
                    f"predictor_dim: {self.predictor_dim} must be divisible by 4 (its positions) "
                    f"and by predictor_heads={self.predictor_heads}"
                )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.momentum = build_schedule("linear", config.momentum, 1.0)

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        if as_vit(backbone, method="ijepa").global_pool == "token":
            raise UserError(
                "backbone.args: ijepa trains patches, not the class token; use global_pool: avg"
            )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Positions are fixed and weights drawn as published, unless they were loaded."""
        config = self.config
        self.check_backbone(backbone)
        vit = as_vit(backbone, method="ijepa")
        self.blocks = MultiBlockMask(config, grid_size(vit))
        predictor = PatchPredictor(
            vit,
            dim=config.predictor_dim,
            depth=config.predictor_depth,
            num_heads=config.predictor_heads,
            num_out=vit.embed_dim,
        )
        initialize(predictor, std=config.init_std)
        if task.config.init.backbone is None:
            fix_sincos_positions(vit)
            initialize(vit, std=config.init_std)
        return BlockPredictor(vit, predictor)

    def setup(self, task: Task) -> None:
        self.teacher = Teacher(task.base_model.backbone)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        (images,) = batch.all_views
        key = batch.key.to(images.device, non_blocking=True)
        context, targets = self.blocks.draw(task.config.train.seed, key)
        batch["targets"] = targets
        batch.input = (images, context, targets)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """The teacher's features of the whole image, each normalised, at the target blocks."""
        batch = task.last_batch
        indices, _ = batch["targets"]  # (B, M, Q)
        vit = as_vit(self.teacher.network, method="ijepa")
        features = vit.forward_features(batch.all_views[0])[:, vit.num_prefix_tokens :]  # (B, N, E)
        features = F.layer_norm(to_float32(features), features.shape[-1:])
        features = gather_tokens(features, indices.flatten(1))
        batch["features"] = features.view(*indices.shape, -1)  # (B, M, Q, E)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Smooth L1 distance, a mean over images, blocks and a block's patches in turn."""
        distance = F.smooth_l1_loss(to_float32(output), batch["features"], reduction="none")
        inside = ~batch["targets"][1]  # (B, M, Q), False where a block has fewer than Q patches
        of_patch = distance.mean(dim=3) * inside  # (B, M, Q)
        of_block = of_patch.sum(dim=2) / inside.sum(dim=2)  # (B, M)
        return of_block.mean()

    def on_update(self, task: Task) -> None:
        self.teacher.update(task.base_model.backbone, momentum=self.momentum(task.where))

    def export_backbone(self, network: nn.Module) -> nn.Module:
        """The teacher's, as in the paper's evaluations."""
        return self.teacher.network


class BlockPredictor(Network):
    """Encodes the context, then predicts each target block on its own: (B, M, Q, E)."""

    def forward(self, inputs: tuple[Tensor, Any, Any]) -> Tensor:  # type: ignore[override]
        images, (keep, padding), (asked, asked_padding) = inputs
        vit = as_vit(self.backbone, method="ijepa")
        encoded = encode(vit, patch_tokens(vit, images), keep, padding=padding)  # (B, T + K, E)
        self.embedding = mean_token(encoded[:, vit.num_prefix_tokens :].detach(), padding)
        predicted: Tensor = self.head(
            encoded, keep, asked, padding=padding, asked_padding=asked_padding
        )
        return predicted


class MultiBlockMask:
    """Where the targets and the context of an image are, on a grid of rows and columns.

    The published code draws one size for a whole batch and then cuts every block to the smallest
    of the batch. Here an image's blocks are its own: tensors have room for the largest possible,
    or for ``max_context`` (cutting leaves the paper's contexts a quarter of the patches, table 6).
    """

    def __init__(self, config: IJEPA.Config, grid: tuple[int, int]) -> None:
        """Raises UserError where a block may be smaller than a patch."""
        self.config, self.grid = config, grid
        self.num_patches = grid[0] * grid[1]  # N
        areas = possible_areas(config.target_scale, config.target_ratio, grid)
        most_left = min(
            max(possible_areas(config.context_scale, _SQUARE, grid)), self.num_patches - min(areas)
        )
        self.most_target = max(areas)  # Q
        self.most_context = max(1, min(most_left, int(config.max_context * self.num_patches)))  # K

    def draw(self, seed: int, key: Tensor) -> tuple[Indices, Indices]:
        """Patches of the context, (B, K), and of each target, (B, M, Q), for keys (B, 2)."""
        config = self.config
        num_blocks = config.num_targets + 1
        draws = uniform(seed, key, _DRAWS * num_blocks + self.num_patches)
        of_block = draws[:, : _DRAWS * num_blocks].view(-1, num_blocks, _DRAWS)
        block = rectangles(of_block[:, 0], config.context_scale, _SQUARE, self.grid)  # (B, N)
        targets = rectangles(  # (B, M, N)
            of_block[:, 1:], config.target_scale, config.target_ratio, self.grid
        )
        context = cut_out(block, targets, least=config.min_context)
        return (
            padded_indices(context, self.most_context, draws[:, _DRAWS * num_blocks :]),
            padded_indices(targets, self.most_target),
        )


def rectangles(
    draws: Tensor, scale: tuple[float, float], ratio: tuple[float, float], grid: tuple[int, int]
) -> Tensor:
    """A rectangle of patches for the four draws (..., 4) of each: bool (..., N)."""
    area, shape, down, right = draws.unbind(dim=-1)
    area = scale[0] + (scale[1] - scale[0]) * area
    shape = ratio[0] + (ratio[1] - ratio[0]) * shape
    rows = _stretch((area * shape).sqrt(), down, grid[0])  # (..., rows)
    columns = _stretch((area / shape).sqrt(), right, grid[1])  # (..., columns)
    return (rows[..., :, None] & columns[..., None, :]).flatten(-2)


def _stretch(share: Tensor, draw: Tensor, length: int) -> Tensor:
    """A stretch of that share of ``length`` places, rounded, anywhere it fits: (..., length)."""
    size = (share * length).round()
    first = (draw * (length - size + 1)).floor().minimum(length - size)  # draw < 1, but rounding
    places = torch.arange(length, device=share.device)
    return (places >= first[..., None]) & (places < (first + size)[..., None])


def possible_areas(
    scale: tuple[float, float], ratio: tuple[float, float], grid: tuple[int, int]
) -> list[int]:
    """The numbers of patches that ``rectangles`` can have: they fix the size of tensors.

    A side of h patches was rounded from between h - 1/2 and h + 1/2. Raises UserError where one
    may have been rounded to nothing.
    """
    rows, columns = grid
    shortest = min(grid) * (scale[0] * min(ratio[0], 1 / ratio[1])) ** 0.5
    if shortest <= 0.5:
        raise UserError(
            f"method: blocks of {scale[0]:.0%} of the image are smaller than a patch where there "
            f"are {rows}x{columns}; raise target_scale or take a smaller backbone.patch_size"
        )
    heights = _possible_sides(rows, scale[0] * ratio[0], scale[1] * ratio[1])
    widths = _possible_sides(columns, scale[0] / ratio[1], scale[1] / ratio[0])
    return [
        height * width
        for height in heights
        for width in widths
        if (height - 0.5) * (width - 0.5) <= scale[1] * rows * columns
        and (height + 0.5) * (width + 0.5) >= scale[0] * rows * columns
        and (height - 0.5) / rows <= ratio[1] * (width + 0.5) / columns
        and (height + 0.5) / rows >= ratio[0] * (width - 0.5) / columns
    ]


def _possible_sides(length: int, least: float, most: float) -> range:
    return range(math.ceil(length * least**0.5 - 0.5), math.floor(length * most**0.5 + 0.5) + 1)


def cut_out(block: Tensor, targets: Tensor, *, least: int) -> Tensor:
    """``block`` (B, N) without the patches of ``targets`` (B, M, N): the context (B, N).

    If fewer than ``least`` are left, the last target may overlap, then the last two, and so on, as
    in the published code (which first tries other places for the block).
    """
    covered = F.pad(targets.int(), (0, 0, 1, 0)).cumsum(dim=1) > 0  # by the first 0, 1, ... M
    left = block[:, None] & ~covered  # (B, M + 1, N)
    enough = left.sum(dim=2) >= least  # (B, M + 1)
    number = (enough * torch.arange(enough.shape[1], device=block.device)).amax(dim=1)  # (B,)
    return left[torch.arange(len(left), device=block.device), number]


def mean_token(tokens: Tensor, padding: Tensor) -> Tensor:
    """The mean of (B, K, E) tokens that are not padding: (B, E)."""
    inside = ~padding[..., None]
    return (tokens * inside).sum(dim=1) / inside.sum(dim=1)


@torch.no_grad()
def initialize(module: nn.Module, *, std: float | None) -> None:
    """Truncated normal weights of linear layers and patches, zero biases.

    With ``std`` as the published code leaves them: it divides what block l adds by sqrt(2 l), but
    then draws all linear layers anew. Without, for narrow networks: at least 1 / sqrt(3 n) for n
    inputs, and that division stays.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            deviation = std or max(0.02, (3 * part.weight[0].numel()) ** -0.5)
            nn.init.trunc_normal_(part.weight, std=deviation)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    blocks: Any = module.blocks if std is None else []
    for number, block in enumerate(blocks, start=1):
        for layer in (block.attn.proj, block.mlp.fc2):
            layer.weight /= (2.0 * number) ** 0.5
