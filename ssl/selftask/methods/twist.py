"""TWIST: views of an image get the same class, each with confidence, and all classes are used.

V: views, B: images per rank, K: classes, which are unrelated to labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_grad, world_size
from selftask.methods.base import Method
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method

NUM_LARGE = 2  # views, each compared with all later ones


@register_method("twist")
class TWIST(Method):
    """TWIST (arXiv:2110.07402): views get the same class, with confidence; all classes are used.

    Loss: ``KL(p1, p2) + mean H(p) - H(mean p)`` of the class distributions p1 and p2 of two views,
    with a symmetric KL divergence, the entropy H, and means over images (eq. 6).

    Published: ImageNet linear top-1 of ResNet-50 72.6 after 800 epochs without multi-crop (authors'
    README).

    Use it to get classes as outputs.

    Differs from the authors' code:

    * The last epochs of the paper, which train on confident predictions as labels, are not
      implemented.
    * Entropies are over the images of all ranks; the authors' code sums the terms of the ranks.
    * BatchNorm statistics are those of one view; in the authors' code, those of all views of one
      size in the backbone, of all views in the head, and of groups of 256 images in the head's last
      layer.
    """

    paper = "Wang et al., Self-Supervised Learning by Estimating Twin Class Distributions, TIP 2023"
    columns = {
        "divergence": "Term of the loss: KL divergence between the classes of two views.",
        "sharpness": "Term of the loss: entropy of the classes of an image.",
        "diversity": "Term of the loss: minus the entropy of the mean over images.",
    }
    loss_reduction = "statistics"  # mean of the class distributions
    views = (2, None)
    per_view = True
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_classes: int = setting(4096, min=2, tiny=12)
        """Number of classes, K."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the head's two hidden layers."""
        temperature: float = setting(1.0, above=0)
        """Temperature of the distributions in both entropies, tau."""
        sharpness_weight: float = setting(0.0, min=-1)
        """Parameter lambda_1; the mean entropy of the images has the weight 1 + lambda_1."""
        diversity_weight: float = setting(1.0, min=0)
        """Weight of the entropy of the mean distribution, lambda_2."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build three layers; the last BatchNorm has neither scale nor shift."""
        hidden, classes = self.config.hidden_dim, self.config.num_classes
        return mlp(
            embed_dim,
            hidden,
            hidden,
            classes,
            bias=False,
            last_bias=False,
            last_norm=True,
            last_affine=False,
        )

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of eq. 6 for ``output`` (V, B, K), averaged over pairs of views."""
        config = self.config
        divergence, sharpness, diversity = twist_terms(output, temperature=config.temperature)
        return {
            "divergence": divergence,
            "sharpness": (1 + config.sharpness_weight) * sharpness,
            "diversity": -config.diversity_weight * diversity,
        }


@in_full_precision
def twist_terms(output: Tensor, *, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return symmetric KL divergence, mean entropy of the images, and entropy of their mean.

    Each is averaged over the pairs of one of the first two views and a later one. The mean in the
    last term is over the images of all ranks.

    Args:
        output: Logits (V, B, K).
        temperature: Temperature of both entropies; the divergence has the temperature 1.
    """
    log_p = F.log_softmax(output, dim=2)
    sharp = F.log_softmax(output / temperature, dim=2)
    entropy = -(sharp.exp() * sharp).sum(dim=2).mean(dim=1)  # (V,)
    mean = sum_with_grad(sharp.exp().mean(dim=1)) / world_size()  # (V, K)
    spread = torch.special.entr(mean).sum(dim=1)  # (V,)
    terms = []
    for first in range(NUM_LARGE):
        for second in range(first + 1, len(output)):
            gap = log_p[first] - log_p[second]  # (B, K)
            kl = ((log_p[first].exp() - log_p[second].exp()) * gap).sum(dim=1).mean() / 2
            means = [(values[first] + values[second]) / 2 for values in (entropy, spread)]
            terms.append(torch.stack([kl, *means]))
    divergence, sharpness, diversity = torch.stack(terms).mean(dim=0)
    return divergence, sharpness, diversity
