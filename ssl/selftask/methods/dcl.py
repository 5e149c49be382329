"""DCL: SimCLR whose denominator does not contain the positive.

B: images per rank, N: images of all ranks, D: width of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad, rank
from selftask.methods.families.batch_contrast import BatchContrast
from selftask.models.losses.contrast import positives_and_negatives
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("dcl")
class DCL(BatchContrast):
    """DCL (arXiv:2110.06848): SimCLR without the positive in the denominator, for small batches.

    Loss: ``-cos(z1, z2)/tau + log sum exp(cos(z1, n)/tau)`` of the views z1 and z2 of an image,
    over views n of other images only (eq. 5). With ``sigma`` (DCLW, eq. 6) the first term is
    weighted by ``2 - N softmax(cos(z1, z2)/sigma)`` over the N images. The weight has a gradient,
    unlike in the library lightly.

    Published: ImageNet linear top-1 of SimCLR with this loss 68.2 at batch 256 after 200 epochs
    (abstract).

    Use it in place of ``simclr`` with batches of some hundred images.

    Differs from the authors' code:

    * Negatives, and the softmax of ``sigma``, are over the images of all ranks; in the authors'
      code, over those of one rank.
    """

    paper = "Yeh et al., Decoupled Contrastive Learning, ECCV 2022"

    @dataclass(frozen=True, kw_only=True)
    class Config(BatchContrast.Config):
        temperature: float = setting(0.1, above=0)
        """Temperature of the similarities, tau."""
        sigma: float | None = setting(None, above=0)
        """Temperature of the weights of positives (DCLW, eq. 6), which are larger for less similar
        views; 0.5 in the paper. null: equal weights (DCL).
        """

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 5, or of eq. 6 with ``sigma``, for ``output`` (2, B, D)."""
        return dcl_loss(*output, temperature=self.config.temperature, sigma=self.config.sigma)

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(2 * (batch - 1))."""
        return math.log(self.num_negatives)


@in_full_precision
def dcl_loss(first: Tensor, second: Tensor, *, temperature: float, sigma: float | None) -> Tensor:
    """Return the decoupled contrastive loss, a mean over the rows of both views.

    Args:
        first: (B, D), not necessarily normalized.
        second: (B, D); row b is the other view of image b.
        temperature: tau.
        sigma: Temperature of the weights 2 - N * softmax(cosines / sigma), which have a mean of 1;
            None: no weights.
    """
    positive, negative = positives_and_negatives(first, second)
    pull = positive / temperature  # (2B,)
    if sigma is not None:
        pull = pull * _weights(positive[: len(first)], sigma).repeat(2)
    return ((negative / temperature).logsumexp(dim=1) - pull).mean()


def _weights(cosines: Tensor, sigma: float) -> Tensor:
    """Return the weights (B,) of the positives of this rank, with their gradient."""
    everyone = gather_cat_with_grad(cosines)  # (N,)
    shares = F.softmax(everyone / sigma, dim=0).narrow(0, rank() * len(cosines), len(cosines))
    return 2 - len(everyone) * shares
