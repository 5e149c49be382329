"""data2vec: predict a teacher's upper layers on the whole image from masked patches.

Baevski et al., data2vec: A General Framework for Self-supervised Learning in Speech, Vision and
Language, ICML 2022, arXiv:2202.03555.

B: images per rank, N: patches of an image, E: width of the backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.models.block_mask import BlockMask
from selftask.models.build import embed_dim
from selftask.models.features.extract import FeatureExtractor, adapter_of, extract
from selftask.models.masks import hide_patches
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.models.teacher import Teacher
from selftask.optim.schedules import build_schedule
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("data2vec")
class Data2Vec(Method):
    """data2vec (arXiv:2202.03555): masked patches predict the layers of an EMA teacher."""

    loss_reduction = "samples"
    sample_dim = 0
    views = 1
    requires = ("tokens", "hidden")

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = setting(0.6, above=0, below=1)
        """Maximum share of masked patches."""
        min_block: int = setting(16, min=1, tiny=4)
        """Size of the smallest masked block, in patches."""
        top_blocks: int = setting(6, min=1, tiny=2)
        """Number of the teacher's top blocks whose mean is the target, K."""
        beta: float = setting(2.0, above=0)
        """Beta of the smooth L1 loss, eq. 4."""
        momentum: float | dict[str, Any] = setting(0.9998, of="schedules", min=0, max=1)
        """Momentum of the teacher, tau in section 3.1; a warm-up is linear from tau_0 to tau_e."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            depth = config["backbone"].get("depth")
            if isinstance(depth, int) and self.top_blocks > depth:
                yield f"top_blocks: {self.top_blocks}; the backbone has {depth} blocks"

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        self.check_backbone(backbone)
        self.block_mask(adapter_of(backbone).built_grid)
        return PatchRegression(backbone)

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError unless the top blocks have a token for each patch that can be masked."""
        adapter = adapter_of(backbone)
        if adapter.stride != adapter.patch_size[0]:
            raise UserError(
                "backbone: data2vec takes the mean of hidden layers, which have to be of one size; "
                f"take a vision transformer, not a {type(backbone).__name__}"
            )

    def block_mask(self, grid: tuple[int, int]) -> BlockMask:
        """Return BEiT's mask sampler. Raise UserError if ``min_block`` is too large."""
        num_masked = self.num_masked(grid)
        if num_masked < self.config.min_block:
            raise UserError(
                f"method.min_block={self.config.min_block} is more than the {num_masked} patches "
                f"that method.mask_ratio={self.config.mask_ratio} masks of {grid[0]}x{grid[1]}"
            )
        size = grid[0] * grid[1]
        return BlockMask(
            grid, min_patches=self.config.min_block, max_patches=size, max_tries=min(size, 64)
        )

    def num_masked(self, grid: tuple[int, int]) -> int:
        return int(self.config.mask_ratio * grid[0] * grid[1])

    def setup(self, task: Task) -> None:
        config = self.config
        self.teacher = Teacher(FeatureExtractor(task.base_model.backbone), drop_path=False)
        self.momentum_at = build_schedule(config.momentum, task.length)
        self.layers = tuple(range(-config.top_blocks, 0))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Draw the masks ``batch["mask"]`` (B, N)."""
        (images,) = batch.all_views
        grid = adapter_of(task.base_model.backbone).grid(*images.shape[-2:])
        key = batch.key.to(images.device, non_blocking=True)
        counts = torch.full((len(images),), self.num_masked(grid), device=images.device)
        batch["mask"] = self.block_mask(grid).draw(task.config.train.seed, key, counts)
        batch.input = (images, batch["mask"])

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, N, E), the teacher's layers on the whole image."""
        batch = task.last_batch
        hidden = self.teacher(batch.all_views[0], layers=self.layers).hidden
        batch["targets"] = mean_of_layers([tokens.patches for tokens in hidden.values()])

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return smooth L1 (eq. 4) at masked patches, averaged over each image, then over images.

        ``output`` is (B, N, E). The published code takes one mean over the masked patches of a
        batch; the number of masked patches differs slightly between images.
        """
        beta, mask = self.config.beta, batch["mask"]
        distance = F.smooth_l1_loss(
            to_float32(output), batch["targets"], reduction="none", beta=beta
        ).mean(dim=2)  # (B, N)
        of_image = (distance * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return of_image.mean()

    def visualize(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the image and the patches that the student sees."""
        (images,) = batch.all_views
        return {"image": images, "masked": hide_patches(images, batch["mask"])}

    def on_update(self, task: Task) -> None:
        self.teacher.update(task.base_model.backbone, momentum=self.momentum_at(task.where))


class PatchRegression(Network):
    """Backbone with masked patches, then a linear layer: (images, mask) -> (B, N, E)."""

    def __init__(self, backbone: nn.Module) -> None:
        width = embed_dim(backbone)
        super().__init__(backbone, nn.Linear(width, width))
        self.mask_token = nn.Parameter(torch.empty(adapter_of(backbone).mask_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        images, mask = inputs
        features = extract(self.backbone, images, mask=mask, mask_token=self.mask_token)
        self.embedding = features.pooled.detach()
        predicted: Tensor = self.head(features.tokens.patches)
        return predicted


def mean_of_layers(layers: Sequence[Tensor]) -> Tensor:
    """Return the mean of layers (B, N, E), each normalised over E (section 3.3)."""
    normalised = [F.layer_norm(to_float32(layer), layer.shape[-1:]) for layer in layers]
    return torch.stack(normalised).mean(dim=0)
