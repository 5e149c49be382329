"""SigLIP: CLIP's towers, trained to classify whether an image and a caption match.

B: images per rank; W: ranks; D: width of the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad, rank, world_size
from selftask.methods.base import Task
from selftask.methods.clip import CLIP
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("siglip")
class SigLIP(CLIP):
    """SigLIP (arXiv:2303.15343): decides for each image and each caption whether they match.

    Loss: ``-mean_i sum_j ln sigmoid(z_ij (t x_i.y_j + b))`` of images x_i and captions y_j; z_ij is
    1 if they match, else -1, and t and b are learned (algorithm 1).

    Use it in place of ``clip`` for batches of any size.

    Differs from the authors' code:

    * The towers are those of ``clip``, and differ as stated there; in the authors' code the text
      transformer has no causal mask, and images are pooled by attention.
    """

    paper = "Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023"
    columns = {"bias": "Learned bias of the logits."}

    @dataclass(frozen=True, kw_only=True)
    class Config(CLIP.Config):
        temperature: float = setting(0.1, above=0)
        """Initial temperature, 1 / t; it is learned."""
        bias: float = -10.0
        """Initial bias of the logits, b; it is learned. Below 0, since most pairs do not match."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.text_dim % self.text_heads:
                yield f"text_heads: {self.text_heads} does not divide text_dim={self.text_dim}"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bias = nn.Parameter(torch.tensor(config.bias))

    def on_forward(self, task: Task) -> None:
        """Log temperature and bias."""
        super().on_forward(task)
        if task.should_log:
            task.log("bias", self.bias.detach())

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of algorithm 1 for ``output`` (2, B, D): images, then captions."""
        return judge_pairs(output[0], output[1], self.log_scale, self.bias)

    def on_update(self, task: Task) -> None:
        """Do nothing: unlike in CLIP, the scale of the logits is not limited."""

    @property
    def chance_loss(self) -> float:
        """Loss of equal logits with the best bias: ln(batch) + (batch - 1) ln(batch / (batch - 1)).

        Each pair then matches with probability 1 / batch.
        """
        others = self.batch_size - 1
        return math.log(self.batch_size) + others * math.log(self.batch_size / others)


@in_full_precision
def judge_pairs(images: Tensor, captions: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
    """Return -ln sigmoid(z (t cos + b)), summed over all ranks' captions and averaged over images.

    z is 1 for an image and its caption, else -1. Captions are taken rank by rank, and their logits
    (B, B) are recomputed in the backward pass, so that no (B, B * W) matrix is kept.

    Args:
        images: (B, D), not necessarily normalized.
        captions: (B, D), not necessarily normalized; row b belongs to image b.
        log_scale: ln t, a scalar.
        bias: b, a scalar.
    """
    images, captions = F.normalize(images, dim=1), F.normalize(captions, dim=1)
    everyone = gather_cat_with_grad(captions).chunk(world_size())
    sums = [
        checkpoint(
            _negative_log_likelihood,
            *(images, theirs, log_scale, bias, number == rank()),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for number, theirs in enumerate(everyone)
    ]
    return torch.stack(sums).sum() / len(images)


def _negative_log_likelihood(
    images: Tensor, captions: Tensor, log_scale: Tensor, bias: Tensor, are_matches: bool
) -> Tensor:
    """Return the summed loss of all pairs; image i matches caption i if ``are_matches``."""
    logits = log_scale.exp() * images @ captions.T + bias  # (B, B)
    signs = -torch.ones_like(logits)
    if are_matches:
        signs.fill_diagonal_(1.0)
    return -F.logsigmoid(signs * logits).sum()
