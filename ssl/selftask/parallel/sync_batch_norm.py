"""Synchronized BatchNorm over several ranks, on CPU and GPU.

torch's own SyncBatchNorm rejects CPU tensors, and waits for the device in each layer. On CUDA, this
implementation runs torch's kernels for statistics and elements, with one all-gather in the forward
pass and one all-reduce in the backward pass. Elsewhere it is composed of differentiable operations,
with two all-reduces in each pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from selftask.distributed.collectives import (
    all_gather_cat,
    all_reduce_sum,
    new_group,
    rank,
    sum_with_grad,
)
from selftask.distributed.simulated import SIMULATED
from selftask.errors import UserError
from selftask.parallel.rank_groups import rank_groups


class Ranks:
    """Ranks whose samples are normalized together; copies of a module share one object.

    Args:
        group: Process group of these ranks; None for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of (N, C, ...) with the statistics of the samples on all of its ``ranks``.

    Equivalent to BatchNorm on the concatenated batch; N may differ between ranks. Parameters,
    buffers and eval mode are those of torch's BatchNorm.
    """

    ranks: Ranks

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (N, C) or (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        if SIMULATED.active:
            return self._planned(input)
        if _has_kernels(input) and self.momentum is not None:
            return self._fused(input, self.momentum)
        return self._composed(input)

    def _fused(self, input: Tensor, momentum: float) -> Tensor:
        """Normalize with torch's CUDA kernels; every rank must have at least one sample."""
        follows = self.training and self.track_running_stats
        if follows:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        means, variances = (self.running_mean, self.running_var) if follows else (None, None)
        running = means, variances, momentum
        return _Fused.apply(input, self.weight, self.bias, running, self.eps, self.ranks.group)

    def _planned(self, input: Tensor) -> Tensor:
        """Return fake results, with the memory and traffic of torch's kernels."""
        sums = torch.empty(2 * self.num_features + 1, dtype=torch.float32, device=input.device)
        SIMULATED.all_gather(sums[None])

        def send(grad: Tensor) -> None:
            SIMULATED.all_reduce(sums[:-1])

        y = super().forward(input)
        if y.requires_grad:
            y.register_hook(send)
        return y

    def _composed(self, input: Tensor) -> Tensor:
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
        """Update the running statistics; they are cumulative averages if ``momentum`` is None."""
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


class _Fused(torch.autograd.Function):
    """BatchNorm by torch's CUDA kernels, with the statistics of all ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None, float],
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        x = _dense(x)
        mean, inverse_std = torch.batch_norm_stats(x, eps)
        rows = mean.new_full((1,), x.numel() // x.shape[1])
        every = all_gather_cat(torch.cat([mean, inverse_std, rows])[None], group)  # (W, 2C + 1)
        means, inverse_stds, counts = every.split([x.shape[1], x.shape[1], 1], dim=1)
        mean, inverse_std = torch.batch_norm_gather_stats_with_counts(
            x, means, inverse_stds, *running, eps, counts.flatten()
        )
        ctx.save_for_backward(x, weight, mean, inverse_std, counts.to(torch.int32))
        ctx.group = group
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse_std, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, counts = ctx.saved_tensors
        grad, needs = _dense(grads[0]), ctx.needs_input_grad
        sum_grad, sum_grad_x, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, inverse_std, weight, *needs[:3]
        )
        grad_x = None
        if needs[0]:
            sums = all_reduce_sum(torch.cat([sum_grad, sum_grad_x]), ctx.group)
            sum_grad, sum_grad_x = sums.chunk(2)
            grad_x = torch.batch_norm_backward_elemt(
                grad, x, mean, inverse_std, weight, sum_grad, sum_grad_x, counts
            )
        return (
            grad_x,
            grad_weight if needs[1] else None,
            grad_bias if needs[2] else None,
            *(None, None, None),
        )


def _has_kernels(x: Tensor) -> bool:
    """Return True for CUDA tensors outside torch.compile, which fuses the composed operations."""
    return x.is_cuda and not torch.compiler.is_compiling()


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` if it is in a channels_last format, else a contiguous tensor."""
    kept = (torch.channels_last, torch.channels_last_3d)
    return x if any(x.is_contiguous(memory_format=form) for form in kept) else x.contiguous()


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d``, synchronized."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d``, synchronized."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d``, synchronized."""


_SYNCHRONIZED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if a module contains BatchNorm, synchronized or not."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def synchronize_batch_norm(module: nn.Module, ranks: Ranks) -> None:
    """Replace every BatchNorm in ``module`` with a synchronized one of the same name and state.

    The new layer is still an instance of the former class, which rules of ``optimizer.groups`` may
    name.

    Raises UserError for BatchNorm classes other than BatchNorm1d, 2d and 3d of ``torch.nn``.
    """
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        if type(part) not in _SYNCHRONIZED:
            raise UserError(
                f"parallel.sync_batch_norm: {name} is a {type(part).__name__}, whose forward pass "
                "is its own; only BatchNorm1d, 2d and 3d of torch.nn can be synchronized"
            )
        part.__class__ = _SYNCHRONIZED[type(part)]
        part.__dict__["ranks"] = ranks


def separate_batch_norm(module: nn.Module) -> None:
    """Replace every synchronized BatchNorm in ``module`` with its former class."""
    former: dict[type[nn.Module], type[nn.Module]] = {b: a for a, b in _SYNCHRONIZED.items()}
    for part in module.modules():
        if type(part) in former:
            part.__class__ = former[type(part)]
            del part.__dict__["ranks"]


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
