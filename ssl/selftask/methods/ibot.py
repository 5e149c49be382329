"""iBOT: DINO for whole images and, with the same head, for masked patches.

KoLeo and Sinkhorn-Knopp, which DINOv2 added later, are off by default. The center of patches is a
mean over all patches, not only masked ones.

B: images per rank; N: patches of a global view; M: masked patches of all global views on this rank;
K: outputs of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.run_length import RunLength
from selftask.methods.base import Task
from selftask.methods.dinov2 import DINOv2, Inputs, Masks
from selftask.methods.families.ema_teacher import Schedule, teacher_momentum
from selftask.models.block_mask import BlockMask, MaskSampler
from selftask.models.features.class_attention import ClassAttention
from selftask.models.masks import AttentionMask, in_image, padded_indices
from selftask.models.network import PatchOutput
from selftask.models.weights.trained import Scores
from selftask.optim.schedules import build_schedule, last_value
from selftask.registry import register_method


@register_method("ibot")
class IBOT(DINOv2):
    """iBOT (arXiv:2111.07832): DINO, and the same loss and head for hidden patches.

    With ``attention_masks`` it is AttMask (arXiv:2203.12719).

    Loss: ``DINO + w (-sum_k t_k log softmax(s/tau)_k)`` of hidden patches, with the student's
    scores s and the teacher's targets t (eq. 2).

    Published: ImageNet k-NN and linear top-1 of ViT-S/16 75.2 and 77.9, ViT-B/16 77.1 and 79.5
    (authors' README). AttMask: ViT-S/16 after 100 epochs 72.8 and 76.1 with hints, 72.5 and 75.7
    without (authors' README), 71.5 k-NN with blocks (paper).

    Use it in place of ``dino`` if features of patches matter, too.

    Differs from the authors' code:

    * The teacher's temperatures rise with each step; in the authors' code, with each epoch.
    * ``tied_heads`` applies to student and teacher. In the authors' code the teacher's heads are
      tied by default even if the student's are not, so that the teacher's patches go through the
      head for images.
    * AttMask: each view has its own mask ratio; in the authors' code all views of a GPU's batch
      have the same.
    * Swin transformers are masked by patches of the input; in the authors' code, by windows of 32
      pixels.
    """

    paper = "Zhou et al., iBOT: Image BERT Pre-Training with Online Tokenizer, ICLR 2022"
    loss_reduction = "samples"  # KoLeo's term, which is off by default, is "gathered"

    @dataclass(frozen=True, kw_only=True)
    class Config(DINOv2.Config):
        out_dim: int = setting(8192, min=1, tiny=16)
        """Number of prototypes, K."""
        tied_heads: bool = True
        """Whether images and patches share one head."""
        targets: Literal["sinkhorn", "centering"] = "centering"
        """How the teacher's outputs become targets. sinkhorn: balanced over the batch of all ranks;
        centering: a running mean is subtracted before the softmax.
        """
        patch_teacher_temperature: float | dict[str, Any] = setting(
            {"name": "constant", "start": 0.07, "warmup": "30 epochs", "warmup_start": 0.04},
            of="schedules",
            above=0,
        )
        """Temperature of the teacher for patches."""
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.996, "end": 1.0})
        """Momentum of the teacher."""
        koleo_weight: float = setting(0.0, min=0)
        """Weight of KoLeo, which spreads the embeddings; not part of iBOT."""
        attention_masks: Literal["high", "hint"] | None = None
        """Mask the patches to which the teacher's class token attends most: all of them (``high``),
        or all but some hints among the highest tenth (``hint``); null: random blocks.
        """

    def setup(self, task: Task) -> None:
        super().setup(task)
        if self.config.attention_masks:
            backbone: nn.Module = self.teacher.network.backbone  # type: ignore[assignment]
            self.class_attention = ClassAttention(backbone, "method.attention_masks")
        temperature = self.config.patch_teacher_temperature
        self.patch_temperature_at = build_schedule(temperature, task.length)

    @torch.no_grad()
    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Set masks and input; attention masks need the teacher's output before the network's."""
        super().prepare_batch(batch, task)
        if self.config.attention_masks:
            with task.autocast():
                batch["teacher"] = super().teacher_output(batch)
            batch["masks"] = masks_in_image(batch["masks"], self.class_attention.take())
            batch.input = batch.input._replace(masks=batch["masks"])

    def teacher_output(self, batch: Batch) -> PatchOutput:
        return batch["teacher"] if self.config.attention_masks else super().teacher_output(batch)

    def mask_sampler(self, grid: tuple[int, int]) -> MaskSampler:
        """Return the sampler of masks: by attention, or of blocks.

        The smallest area of a block is (min(grid) // 3) ** 2 patches, and at least one.
        """
        if self.config.attention_masks:
            return AttentionMask(grid, hints=self.config.attention_masks == "hint")
        least = max(1, (min(grid) // 3) ** 2)
        return BlockMask(grid, min_patches=least, max_patches=grid[0] * grid[1])

    def teacher_input(self, batch: Batch) -> Inputs:
        """Return the global views without masks; the teacher scores all of their patches."""
        whole = super().teacher_input(batch)
        every = torch.arange(whole.masks.mask.numel(), device=whole.masks.mask.device)
        return whole._replace(masks=whole.masks._replace(indices=every))

    def masked_scores(self, scores: Tensor, masks: Masks) -> Tensor:
        """Select the scores (M, K) of masked patches from the scores of all, (2 * B * N, K)."""
        return scores[masks.indices]

    def teacher_temperatures(self, where: float) -> tuple[float, float]:
        return self.teacher_temperature_at(where), self.patch_temperature_at(where)

    @property
    def chance_loss(self) -> float | None:
        """Loss of equal probabilities: ln(``out_dim``) * (``dino_weight`` + ``ibot_weight`` *
        ``mask_probability``).

        None with ``koleo_weight``.
        """
        config = self.config
        if config.koleo_weight:
            return None
        share = config.dino_weight + config.ibot_weight * config.mask_probability
        return math.log(config.out_dim) * share

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Return the teacher's heads, with their last temperatures and their centers."""
        scores = super().load_scores(embed_dim, checkpoint)
        length = RunLength(**checkpoint["length"])
        temperature = last_value(self.config.patch_teacher_temperature, length)
        assert scores.patches is not None
        return replace(scores, patches=replace(scores.patches, temperature=temperature))


def masks_in_image(masks: Masks, attention: Tensor) -> Masks:
    """Return masks in the order of the image; the number of masked patches of a view is the same.

    Args:
        masks: Masks of patches sorted by attention, the highest first.
        attention: (2 * B, N), of the patches in the order of the image.
    """
    mask = in_image(masks.mask, attention)
    indices, _ = padded_indices(mask.flatten(), len(masks.indices))
    return masks._replace(mask=mask, indices=indices)
