"""Teachers: a moving average of the trained network."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from selftask.models.dropout import disable_stochastic_depth
from selftask.random.keyed import LAYER_DRAWS


class Teacher(nn.Module):
    """An exponential moving average of a network's parameters (MoCo eq. 2, BYOL eq. 1).

    Its parameters do not require gradients, so optimizers and DDP ignore them.

    Only parameters are averaged, not BatchNorm buffers. The teacher runs in train mode like the
    student: it normalizes with the statistics of its own batch and has its own running averages, as
    in the published code of MoCo, BYOL and DINO. Its state is that of the sub-module ``network``.

    Args:
        network: Module to copy.
        drop_path: Whether the copy keeps stochastic depth and dropout; DINO's teacher does not.
    """

    def __init__(self, network: nn.Module, *, drop_path: bool = True) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        self._draws = drop_path
        if not drop_path:
            disable_stochastic_depth(self.network)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """EMA forward pass, without gradients."""
        LAYER_DRAWS.restart()
        with nullcontext() if self._draws else LAYER_DRAWS.paused():
            return self.network(*args, **kwargs)

    @torch.no_grad()
    def update(self, network: nn.Module, *, momentum: float) -> None:
        """Update once: theta <- momentum * theta + (1 - momentum) * theta of ``network``.

        Args:
            network: The trained network, with the same parameters in the same order.
            momentum: Momentum in [0, 1], often from a schedule at ``task.where``; 1 leaves the
                teacher unchanged.

        Raises:
            ValueError: If the numbers of parameters differ.
        """
        mine: list[Tensor] = list(self.network.parameters())
        theirs: list[Tensor] = list(network.parameters())
        if len(mine) != len(theirs):
            raise ValueError(f"a teacher of {len(mine)} parameters cannot follow {len(theirs)}")
        if mine and momentum < 1.0:
            torch._foreach_lerp_(mine, theirs, 1.0 - momentum)
