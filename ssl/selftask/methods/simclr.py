"""SimCLR: match the views of an image among all views of the batch.

V: views of an image, two in the paper; B: images per rank, W: ranks, D: width of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch, Loss
from selftask.config.fields import setting
from selftask.methods.families.batch_contrast import BatchContrast
from selftask.methods.families.consistency import ConsistencyConfig
from selftask.models.losses.contrast import view_cosines
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("simclr")
class SimCLR(BatchContrast):
    """SimCLR (arXiv:2002.05709): recognizes the other view among all views of the batch.

    ``consistency_weight`` adds the term of CO2 (arXiv:2010.02217).

    Loss: ``-log exp(cos/tau) / sum exp(cos/tau)`` of the cosine of a view with the other view of
    its image, and of its cosines with all other views (eq. 1).

    Use it as the first run on new images: it is simple and robust, and best with large batches.

    Differs from the authors' code:

    * An epoch omits the last partial batch and has 312 steps, so that warm-up and run have 3,120
      and 312,000 steps; in the authors' code, which counts images, 3,127 and 312,786.
    * Initial weights of convolutions and head are torch's, not TensorFlow's. Every layer of the
      head is followed by BatchNorm, which cancels the scale of its weights.
    * The head has two layers, as in the paper. The code's default of three is SimCLR v2's.
    """

    paper = (
        "Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, "
        "ICML 2020"
    )
    columns = {
        "recognition": "Term of the loss: recognizing the other view, without CO2's term.",
        "consistency": "Term of the loss: similarity to the same negatives (CO2).",
    }
    views = (2, None)

    @dataclass(frozen=True, kw_only=True)
    class Config(BatchContrast.Config, ConsistencyConfig):
        temperature: float = setting(0.1, above=0)
        """Temperature of the similarities, tau in eq. 1; 0.5 for CIFAR-10 in the paper, 0.2 in
        solo-learn.
        """
        scale: float = setting(1.0, above=0)
        """Factor of the whole loss; 2 in the paper's code, which sums both directions."""

    def forward(self, output: Tensor, batch: Batch) -> Loss:
        """Return ``scale`` times eq. 1 for ``output`` (V, B, D), averaged over pairs of views.

        With ``consistency_weight`` CO2's term is added, and both are returned by name.
        """
        loss = self.config.scale * info_nce(*output, temperature=self.config.temperature)
        if not self.config.consistency_weight:
            return loss
        return self.config.with_consistency(loss, *negatives_of_pairs(*output))

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ``scale`` * ln(1 + views * (batch - 1))."""
        return self.config.scale * math.log(1 + self.num_negatives)


@in_full_precision
def info_nce(*views: Tensor, temperature: float) -> Tensor:
    """Return the NT-Xent loss of this rank's views, averaged over images and pairs of views.

    Each of V * B rows (V views of B images) is compared with the V * B * W rows of W ranks. The
    denominator of a pair contains the positive and all views of other images. With two views this
    is eq. 1; with more, the other views of the same image are excluded.

    Args:
        *views: V tensors (B, D), not necessarily normalized.
        temperature: Temperature of the similarities, tau.
    """
    cosines, same = view_cosines(views)
    logits = cosines / temperature  # (VB, VBW)
    losses = []
    for positive in range(1, len(views)):  # view v and view v + positive, modulo V
        others = torch.cat([same[:positive], same[positive + 1 :]])
        hidden = logits.scatter(1, others.T, -torch.inf)
        losses.append(F.cross_entropy(hidden, same[positive]))
    return torch.stack(losses).mean()


@in_full_precision
def negatives_of_pairs(*views: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each pair of views, the cosines of both with all views of other images.

    Args:
        *views: (B, D) each, not necessarily normalized.

    Returns:
        Two tensors (PB, VBW) for P pairs, with -inf at the views of the same image.
    """
    cosines, same = view_cosines(views)
    by_view = cosines.scatter(1, same.T, -torch.inf).chunk(len(views))
    first, second = zip(*combinations(by_view, 2), strict=True)
    return torch.cat(first), torch.cat(second)
