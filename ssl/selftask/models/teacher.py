"""The teacher: a copy of a network that no gradient reaches and that follows the trained one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """An exponential moving average of a network's parameters (MoCo eq. 2, BYOL eq. 1).

    Its parameters do not require gradients, so optimizers leave it out and DDP does not reduce it.

    Averaged are *parameters only*. BatchNorm buffers stay the teacher's own: it runs in train mode
    like the student, normalises with the statistics of its own batch and keeps its own running
    averages of them, as the published code of MoCo, BYOL and DINO does. State is the plain
    sub-module ``network``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the averaged network makes of the same arguments, without a graph."""
        return self.network(*args, **kwargs)

    @torch.no_grad()
    def update(self, network: nn.Module, *, momentum: float) -> None:
        """theta <- momentum * theta + (1 - momentum) * theta of ``network``, in one fused call.

        ``network`` must have the parameters of the one copied, in the same order.
        """
        mine: list[Tensor] = list(self.network.parameters())
        theirs: list[Tensor] = list(network.parameters())
        if len(mine) != len(theirs):
            raise ValueError(f"a teacher of {len(mine)} parameters cannot follow {len(theirs)}")
        if mine:
            torch._foreach_lerp_(mine, theirs, 1.0 - momentum)
