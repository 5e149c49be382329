"""FroSSL: views agree, and the correlations of each view have a small Frobenius norm.

V: views, B: images per rank, N: images of all ranks, D: width of the projector.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_equal_grad, sum_with_grad, world_size
from selftask.methods.families.projected import Projected
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("frossl")
class FroSSL(Projected):
    """FroSSL (arXiv:2310.02903): views agree, and the spectrum of features is flat.

    With ``spectrum: von_neumann`` it is I-VNE+ (Kim et al., VNE, CVPR 2023, arXiv:2304.01434).

    Loss: ``sum_v (2 ln |K_v| + gamma V D mean (z_v - m)^2)`` of the features z_v of V views, each
    of norm 1 over the images, and their mean m. |K_v| is the Frobenius norm of the Gram matrix of
    a view divided by its trace. With ``von_neumann``: minus the entropy of its eigenvalues, and
    minus gamma times the cosine of views.

    Use it for short runs with several views, without negatives or a teacher.

    Differs from the authors' code:

    * Statistics are over the images of all ranks.
    * The norm is always computed from the (D, D) matrix; it equals the norm of the (N, N) matrix.
    """

    paper = (
        "Skean et al., FroSSL: Frobenius Norm Minimization for Self-Supervised Learning, ECCV 2024"
    )
    columns = {
        "invariance": "Term of the loss: two views have the same embedding.",
        "norm": "Term of the loss: logarithm of the Frobenius norms; the spectrum is flat.",
        "entropy": "Term of the loss: minus the entropy of the spectrum, which is flat.",
    }
    loss_reduction = "statistics"  # lengths of the features, and their products
    views = (2, None)
    per_view = True
    min_batch_size = 2
    head_options = {"bias": False}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(1024, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        invariance_weight: float = setting(1.4, min=0)
        """Weight of the agreement of views (I-VNE+: of the cosine), gamma; 2 for 8 views."""
        spectrum: Literal["frobenius", "von_neumann"] = "frobenius"
        """Measure of the spectrum. frobenius: the Frobenius norm; von_neumann: the von Neumann
        entropy of unit vectors, which needs eigenvalues: the CPU waits for the GPU to compute them.
        """
        spectrum_weight: float = setting(1.0, min=0)
        """Weight of the spectrum's term."""

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return both weighted terms for ``output`` (V, B, D); ``spectrum`` selects the second."""
        config = self.config
        if config.spectrum == "frobenius":
            name, (invariance, spectrum) = "norm", frossl_terms(output)
        else:
            name, (invariance, spectrum) = "entropy", vne_terms(output)
        return {
            "invariance": config.invariance_weight * invariance,
            name: config.spectrum_weight * spectrum,
        }


@in_full_precision
def frossl_terms(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance of views from their mean, and the log norms, summed over views.

    Each of the D features is scaled to unit norm over the images of all ranks, so that the (D, D)
    matrix of their products has trace D.

    Args:
        output: (V, B, D).

    Returns:
        V * D times the squared distance of the views from their mean, averaged over images and
        features and summed over views; and the sum over views of 2 ln |K|, with K the matrix of
        products divided by its trace.
    """
    num_views, rows, dim = output.shape
    lengths = sum_with_grad(output.square().sum(dim=1, keepdim=True)).sqrt()
    units = output / lengths.clamp(min=1e-12)  # (V, B, D)
    products = sum_with_grad(units.mT @ units) / dim  # (V, D, D)
    norm = products.square().sum(dim=(1, 2)).log().sum()  # 2 ln |K|
    distance = (units - units.mean(dim=0)).square()  # (V, B, D)
    mean = sum_with_grad(distance.sum()) / (rows * world_size() * dim)
    return num_views * dim * mean, norm


@in_full_precision
def vne_terms(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return minus the mean cosine of pairs of views, and minus the von Neumann entropy.

    The latter is the entropy of the eigenvalues, which sum to 1, of the (D, D) second-moment matrix
    of the unit vectors of all ranks, averaged over views.

    Args:
        output: (V, B, D).
    """
    units = F.normalize(output, dim=2)
    pairs = itertools.combinations(units, 2)
    cosine = torch.stack([(first * second).sum(dim=1).mean() for first, second in pairs]).mean()
    num_images = units.shape[1] * world_size()
    eigenvalues = torch.linalg.eigvalsh(sum_with_equal_grad(units.mT @ units) / num_images)
    tiny = torch.finfo(eigenvalues.dtype).tiny
    entropy = torch.special.entr(eigenvalues.clamp(min=tiny)).sum(dim=1).mean()
    return -cosine, -entropy
