"""Attention of the class token of a vision transformer to the patches.

B: images, P: prefix tokens, N: patches, H: attention heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import adapter_of
from selftask.models.precision import to_float32


class ClassAttention:
    """Attention weights from the class token to the patches in the last block of a transformer.

    Each forward pass of the backbone stores the weights. For this, the block computes attention
    without a fused kernel, which would not return them.

    Args:
        backbone: Vision transformer of timm or selftask with a class token.
        key: Config key that needs the weights, for messages.

    Raises:
        UserError: If the backbone has no class token, or its last block does not compute attention
            as timm does.
    """

    def __init__(self, backbone: nn.Module, key: str) -> None:
        adapter = adapter_of(backbone)
        attention: Any = getattr(adapter.layer(-1), "attn", None) if adapter.num_prefix else None
        if not hasattr(attention, "attn_drop"):
            raise UserError(
                f"{key}: a {type(backbone).__name__} has no class token whose attention can be "
                "read; take a vision transformer of timm or selftask"
            )
        attention.fused_attn = False
        attention.attn_drop.register_forward_hook(self._keep)
        self._num_prefix = adapter.num_prefix
        self._weights: Tensor | None = None

    def take(self) -> Tensor:
        """Return the weights of the last forward pass, float32 (B, N), averaged over heads.

        The weights are discarded, so the next call needs another forward pass before it.
        """
        assert self._weights is not None
        weights, self._weights = self._weights, None
        return weights

    def _keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        of_class_token = output.detach()[:, :, 0, self._num_prefix :]  # of (B, H, P + N, P + N)
        self._weights = to_float32(of_class_token).mean(dim=1)
