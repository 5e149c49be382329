"""Synchronized BatchNorm over several ranks, on CPU and GPU.

torch's own SyncBatchNorm rejects CPU tensors, so code that uses it cannot be tested without a GPU.
This one runs two small all-reduces in the forward pass and two in the backward pass, through
autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selftask.distributed.collectives import (
    new_group,
    rank,
    sum_with_grad,
)
from selftask.errors import UserError
from selftask.parallel.rank_groups import rank_groups

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Ranks:
    """The ranks whose samples are normalized together. Copies of a module share the object."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of (N, C, ...) with the statistics of all rows of its ``ranks``.

    Equal to ``nn.BatchNorm`` on the concatenated batch; ranks may have different numbers of rows.
    State and parameters are those of ``nn.BatchNorm``, and so is its behavior in eval mode.
    """

    ranks: Ranks

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (N, C) or (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        x = input if input.dtype == torch.float64 else input.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        group = self.ranks.group
        rows = x.new_full((1,), x.numel() // x.shape[1])
        sums = sum_with_grad(torch.cat([x.sum(dims), rows]), group)
        count = sums[-1].detach()
        shape = [1, -1] + [1] * (x.dim() - 2)
        mean = sums[:-1] / count  # (C,)
        x = x - mean.view(shape)
        variance = sum_with_grad(x.square().sum(dims), group) / count  # (C,)
        if self.training and self.track_running_stats:
            self._follow(mean.detach(), variance.detach() * count / (count - 1))
        y = x * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        """Update the running statistics; cumulative averages without a momentum."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share: float | Tensor = (
            1.0 / self.num_batches_tracked.to(mean.dtype)
            if self.momentum is None
            else self.momentum
        )
        self.running_mean.add_((mean - self.running_mean) * share)
        self.running_var.add_((unbiased_variance - self.running_var) * share)


def synchronize_batch_norm(module: nn.Module, ranks: Ranks) -> None:
    """Replace every BatchNorm inside ``module`` by a synchronized one, with equal names and state.

    Raises UserError for a subclass of BatchNorm with a forward pass of its own.
    """
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        if type(part) not in _KNOWN:
            raise UserError(
                f"parallel.sync_batch_norm: {name} is a {type(part).__name__}, whose forward pass "
                "is its own; only BatchNorm1d, 2d and 3d of torch.nn can be synchronized"
            )
        part.__class__ = SyncBatchNorm
        part.__dict__["ranks"] = ranks


def form_groups(which: str | int) -> Ranks:
    """Create the process groups of synchronized BatchNorm and return this rank's.

    Every rank must call this function.

    Args:
        which: ``all`` ranks, those of one ``node``, or a number of consecutive ranks.

    Raises:
        UserError: If the ranks cannot be divided into groups of that size.
    """
    if which == "all":
        return Ranks(None)
    mine = None
    for members in rank_groups(which, "parallel.sync_batch_norm"):
        group = new_group(members)  # every rank must create every group
        if rank() in members:
            mine = group
    return Ranks(mine)
