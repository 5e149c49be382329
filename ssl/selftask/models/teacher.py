"""The teacher: an exponential moving average of the trained network, without gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """An exponential moving average of a network's parameters (MoCo eq. 2, BYOL eq. 1).

    Its parameters do not require gradients, so optimizers and DDP leave them out.

    Only parameters are averaged, not BatchNorm buffers. The teacher runs in train mode like the
    student, normalises with the statistics of its own batch and keeps its own running averages of
    them, as in the published code of MoCo, BYOL and DINO. Its state is that of the sub-module
    ``network``.

    Args:
        network: Module to copy.
        drop_path: Whether the copy keeps stochastic depth; DINO's teacher does not.
    """

    def __init__(self, network: nn.Module, *, drop_path: bool = True) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        if not drop_path:
            for module in self.network.modules():
                if hasattr(module, "drop_prob"):
                    module.drop_prob = 0.0  # type: ignore[assignment]

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """EMA forward pass, without gradients."""
        return self.network(*args, **kwargs)

    @torch.no_grad()
    def update(self, network: nn.Module, *, momentum: float) -> None:
        """Update once: theta <- momentum * theta + (1 - momentum) * theta of ``network``.

        Args:
            network: The trained network, with the parameters of the copied one in the same order.
            momentum: In [0, 1], often a schedule of ``optim.schedules`` at ``task.where``. 1 for a
                frozen teacher.
        """
        mine: list[Tensor] = list(self.network.parameters())
        theirs: list[Tensor] = list(network.parameters())
        if len(mine) != len(theirs):
            raise ValueError(f"a teacher of {len(mine)} parameters cannot follow {len(theirs)}")
        if mine and momentum < 1.0:
            torch._foreach_lerp_(mine, theirs, 1.0 - momentum)
