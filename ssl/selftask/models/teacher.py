"""Teachers: a moving average of the trained network, or a network that is already trained."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.dropout import disable_stochastic_depth
from selftask.random.keyed import LAYER_DRAWS


class Teacher(nn.Module):
    """An exponential moving average of a network's parameters (MoCo eq. 2, BYOL eq. 1).

    Its parameters do not require gradients, so optimizers and DDP ignore them.

    Only parameters are averaged, not BatchNorm buffers. The teacher runs in train mode like the
    student: it normalises with the statistics of its own batch and has its own running averages, as
    in the published code of MoCo, BYOL and DINO. Its state is that of the sub-module ``network``.

    Args:
        network: Module to copy.
        drop_path: Whether the copy keeps stochastic depth and dropout; DINO's teacher does not.
    """

    moves: ClassVar[bool] = True  # False if parameters and buffers never change

    def __init__(self, network: nn.Module, *, drop_path: bool = True) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        if not drop_path:
            disable_stochastic_depth(self.network)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """EMA forward pass, without gradients."""
        LAYER_DRAWS.restart()
        return self.network(*args, **kwargs)

    @torch.no_grad()
    def update(self, network: nn.Module, *, momentum: float) -> None:
        """Update once: theta <- momentum * theta + (1 - momentum) * theta of ``network``.

        Args:
            network: The trained network, with the same parameters in the same order.
            momentum: Momentum in [0, 1], often from a schedule at ``task.where``; 1 leaves the
                teacher unchanged.
        """
        mine: list[Tensor] = list(self.network.parameters())
        theirs: list[Tensor] = list(network.parameters())
        if len(mine) != len(theirs):
            raise ValueError(f"a teacher of {len(mine)} parameters cannot follow {len(theirs)}")
        if mine and momentum < 1.0:
            torch._foreach_lerp_(mine, theirs, 1.0 - momentum)


class FrozenTeacher(Teacher):
    """A network that is already trained: in eval mode, without gradients, never updated.

    A checkpoint contains the SHA-256 digest of its weights instead of the weights, which are read
    again when the run is resumed.

    Args:
        network: Module to copy, with its weights.
    """

    moves: ClassVar[bool] = False
    digest: Tensor  # (32,) uint8

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, drop_path=False)
        self.network.eval()
        self.register_buffer("digest", weights_digest(self.network))

    def train(self, mode: bool = True) -> FrozenTeacher:
        """Stay in eval mode."""
        return super().train(False)  # type: ignore[return-value]

    def update(self, network: nn.Module, *, momentum: float) -> None:
        raise TypeError("a frozen teacher does not follow the network")

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the digest alone."""
        destination = {} if destination is None else destination
        destination[f"{prefix}digest"] = self.digest
        return destination

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Raise UserError if the digest is that of another teacher; keep the weights."""
        saved = state_dict.get(f"{prefix}digest")
        if saved is not None and not torch.equal(saved.cpu(), self.digest.cpu()):
            raise UserError(
                "method.teacher: its weights are not those with which this run began; give the "
                "same teacher, or another out="
            )
        own = self.network.state_dict(prefix=f"{prefix}network.")
        state_dict.update(own)  # so that the sub-modules find their weights
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def weights_digest(network: nn.Module) -> Tensor:
    """Return the SHA-256 digest of a network's state, (32,) uint8; zeros on the meta device."""
    state: Mapping[str, Tensor] = network.state_dict()
    if any(value.is_meta for value in state.values()):
        return torch.zeros(32, dtype=torch.uint8)
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)
