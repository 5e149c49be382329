"""Trained modules that are never updated, such as teachers and tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.dropout import disable_stochastic_depth


class Frozen(nn.Module):
    """A module that is never trained: without gradients, always in eval mode.

    No optimizer gets its parameters, and it moves to the device with the method that contains it. A
    checkpoint contains the SHA-256 digest of its weights instead of the weights, which are read
    again when the run is resumed.

    Args:
        network: Module with its weights. It is not copied; pass a copy of a module that is also
            trained.
        key: Key of the config that names it, for messages.
    """

    digest: Tensor  # (32,) uint8

    def __init__(self, network: nn.Module, key: str = "method.teacher") -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()
        self.key = key
        disable_stochastic_depth(self.network)
        self.register_buffer("digest", weights_digest(self.network))

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass without gradients."""
        return self.network(*args, **kwargs)

    def train(self, mode: bool = True) -> Frozen:
        """Stay in eval mode."""
        return super().train(False)

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return only the digest."""
        destination = {} if destination is None else destination
        destination[f"{prefix}digest"] = self.digest
        return destination

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Raise UserError if the saved digest is of other weights; the weights are unchanged."""
        saved = state_dict.get(f"{prefix}digest")
        if saved is not None and not torch.equal(saved.cpu(), self.digest.cpu()):
            raise UserError(
                f"{self.key}: its weights (SHA-256 {_hex(self.digest)}) are not those with which "
                f"this run began ({_hex(saved)}); give the same module, or another out="
            )
        weights = self.network.state_dict(prefix=f"{prefix}network.")
        state_dict.update(weights)  # so that the sub-modules find their weights
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


def _hex(digest: Tensor) -> str:
    return bytes(digest.tolist()).hex()[:12]
