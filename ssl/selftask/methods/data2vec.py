"""data2vec: predict a teacher's upper layers for the whole image from a masked image.

B: images per rank, N: patches of an image, E: width of the backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.masked_patches import BlockMasks
from selftask.models.block_mask import BlockMask
from selftask.models.features.extract import FeatureExtractor
from selftask.models.features.tokens import Grid
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("data2vec")
class Data2Vec(BlockMasks, EMATeacher):
    """data2vec (arXiv:2202.03555): predicts an EMA teacher's features of masked patches.

    Loss: ``smooth_l1(p, t)`` of masked patches, with predictions p and the mean t of the teacher's
    upper layers (eq. 4).

    Use it before fine-tuning a transformer, without a tokenizer.

    Differs from the authors' code:

    * The loss is a mean over the masked patches of an image, then over images; in the authors'
      code, over the masked patches of a batch. The number of masked patches differs slightly
      between images.
    * Positions are learned; the authors' code has relative position biases that all blocks share.
    * Warm-up takes 40 epochs and stochastic depth is 0.2, as in the paper; the command in the
      authors' repository has 10 and 0.25.
    """

    paper = (
        "Baevski et al., data2vec: A General Framework for Self-supervised Learning in Speech, "
        "Vision and Language, ICML 2022"
    )
    teacher_drop_path = False
    requires = ("tokens", "hidden")

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockMasks.Config, EMATeacher.Config):
        mask_ratio: float = setting(0.6, above=0, below=1)
        """Maximum share of the patches of an image that are masked, in blocks."""
        min_block: int = setting(16, min=1, tiny=4)
        """Smallest area of a masked block, in patches, unless fewer remain to be masked."""
        top_blocks: int = setting(6, min=1, tiny=2)
        """Number of the teacher's top blocks whose mean is the target, K."""
        norm_target: bool = False
        """Whether the mean of the top blocks is normalized, as in the published run of ViT-B."""
        beta: float = setting(2.0, above=0)
        """Error below which the smooth L1 loss is quadratic, beta in eq. 4."""
        momentum: Schedule = teacher_momentum(0.9998)
        """Momentum of the teacher, tau in section 3.1; a warm-up is linear from tau_0 to tau_e."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            depth = config["backbone"].get("depth")
            if isinstance(depth, int) and self.top_blocks > depth:
                yield f"top_blocks: {self.top_blocks}; the backbone has {depth} blocks"

    def build_head(self, embed_dim: int) -> nn.Module:
        return nn.Linear(embed_dim, embed_dim)

    def averaged(self, network: Any) -> nn.Module:
        return FeatureExtractor(network.backbone)

    def block_mask(self, grid: Grid) -> BlockMask:
        least, size = self.config.min_block, grid[0] * grid[1]
        return BlockMask(grid, min_patches=least, max_patches=size, max_tries=min(size, 64))

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, N, E), the mean of the teacher's normalized top layers.

        The teacher gets the whole images. With ``norm_target`` the mean is normalized, too.
        """
        batch = task.last_batch
        top_blocks = tuple(range(-self.config.top_blocks, 0))
        hidden = self.teacher(batch.all_views[0], layers=top_blocks).hidden
        targets = mean_of_layers([tokens.patches for tokens in hidden.values()])
        if self.config.norm_target:
            targets = F.layer_norm(targets, targets.shape[-1:])
        batch["targets"] = targets

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return smooth L1 (eq. 4), averaged over the masked patches of an image, then images.

        ``output.prediction`` is (B, N, E).
        """
        beta, mask = self.config.beta, batch["mask"]
        distance = F.smooth_l1_loss(
            to_float32(output.prediction), batch["targets"], reduction="none", beta=beta
        ).mean(dim=2)  # (B, N)
        of_image = (distance * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return of_image.mean()


def mean_of_layers(layers: Sequence[Tensor]) -> Tensor:
    """Return the mean of layers (B, N, E), each normalized over E (section 3.3)."""
    normalized = [F.layer_norm(to_float32(layer), layer.shape[-1:]) for layer in layers]
    return torch.stack(normalized).mean(dim=0)
