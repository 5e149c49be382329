"""IterNorm: decorrelate features of a batch by Newton's iteration (Huang et al., CVPR 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selftask.distributed.collectives import sum_with_grad, world_size
from selftask.models.precision import in_full_precision

EPS = 1e-5  # added to variances
MOMENTUM = 0.1  # share of a batch in the running averages, as in BatchNorm


class IterNorm(nn.Module):
    """Whiten groups of features (N, D) approximately, with statistics of the images of all ranks.

    arXiv:1904.03441. As BatchNorm, it uses running averages in evaluation mode.

    Args:
        num_features: Width, D.
        group_width: Number of features that are decorrelated together; a divisor of D.
        iterations: Newton steps, T; the more, the whiter.
    """

    def __init__(self, num_features: int, group_width: int, *, iterations: int = 5) -> None:
        super().__init__()
        self.iterations = iterations
        groups = num_features // group_width
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(groups, 1, group_width))
        self.register_buffer("running_whitening", torch.eye(group_width).repeat(groups, 1, 1))

    running_mean: Tensor
    running_whitening: Tensor

    def forward(self, features: Tensor) -> Tensor:
        return self._forward(features)

    @in_full_precision
    def _forward(self, features: Tensor) -> Tensor:
        groups, _, width = self.running_mean.shape
        x = features.view(-1, groups, width).transpose(0, 1)  # (G, N, D / G)
        if self.training:
            mean, whitening = self._statistics(x)
        else:
            mean, whitening = self.running_mean, self.running_whitening
        white = (x - mean) @ whitening
        return white.transpose(0, 1).reshape(features.shape) * self.weight + self.bias

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the whitening matrices of a batch, and update the averages."""
        num_images = x.shape[1] * world_size()
        mean = sum_with_grad(x.sum(dim=1, keepdim=True)) / num_images
        centered = x - mean
        covariance = sum_with_grad(centered.mT @ centered) / num_images
        whitening = newton_inverse_root(covariance, self.iterations)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), MOMENTUM)
            self.running_whitening.lerp_(whitening.to(self.running_whitening.dtype), MOMENTUM)
        return mean, whitening


def newton_inverse_root(covariance: Tensor, iterations: int) -> Tensor:
    """Return approximate inverse square roots of covariance matrices (..., n, n)."""
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    matrix = covariance + EPS * identity
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    matrix, root = matrix / trace, identity.expand_as(matrix)
    for _ in range(iterations):
        root = 1.5 * root - 0.5 * root @ root @ root @ matrix
    return root * trace.rsqrt()
