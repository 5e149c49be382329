"""bfloat16 on a CPU: which networks it accelerates, and attention as two matrix products.

The thresholds were measured with ``tools/bench/bfloat16.py``; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.distributed.device import computes_in_bfloat16

LEAST_WIDTH = 128
"""Mean width of matrix products from which ``train.precision=auto`` takes bfloat16 on a CPU."""
MOST_TOKENS = 1024
"""Longest sequence whose attention is computed as two matrix products."""


def gains_from_bfloat16(backbone: nn.Module) -> tuple[bool, str]:
    """Return whether a network trains faster in bfloat16 on a CPU that supports it, and why.

    Matrix products become faster; element-wise operations and casts of weights do not. The decision
    depends on the mean width of products, W / N, where W is the number of weights of all linear
    layers and convolutions, and N the number of their inputs and outputs at one position. W / N is
    the number of multiply-adds per number read or written. Grouped convolutions are up to 2.2 times
    slower in bfloat16, so the result is False for a network with any.

    Args:
        backbone: The network, on any device, also ``meta``.

    Returns:
        True if it trains faster, and the reason as text.
    """
    weights = ends = 0
    for layer in backbone.modules():
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            if getattr(layer, "groups", 1) > 1:
                return False, "grouped convolutions are slower in bfloat16 on a CPU"
            outputs = layer.weight.shape[0]
            weights += layer.weight.numel()
            ends += outputs + layer.weight.numel() // outputs
    width = weights // ends if ends else 0
    if width < LEAST_WIDTH:
        return False, f"products of mean width {width}, below {LEAST_WIDTH}, gain little on a CPU"
    return True, f"products of mean width {width}, at least {LEAST_WIDTH}, are faster on this CPU"


def attend_by_products(modules: list[nn.Module], device: torch.device) -> int:
    """Make timm's attention layers use two matrix products instead of torch's fused kernel.

    torch's kernel for a CPU takes 1.3 to 5 times as long in bfloat16, mainly in the backward pass.
    Only ``fused_attn`` of these layers is changed, so other models of the process are unaffected.

    Args:
        modules: Modules that are trained or called in bfloat16; modified in place.
        device: Device of the training.

    Returns:
        The number of changed layers: 0 on devices other than a CPU with bfloat16 instructions, and
        for images of more than ``MOST_TOKENS`` patches.
    """
    if device.type != "cpu" or not computes_in_bfloat16():
        return 0
    layers = [layer for module in modules for layer in module.modules()]
    patches = [getattr(layer, "num_patches", None) or 0 for layer in layers]
    if max((number for number in patches if isinstance(number, int)), default=0) > MOST_TOKENS:
        return 0
    fused = [layer for layer in layers if getattr(layer, "fused_attn", None) is True]
    for layer in fused:
        layer.fused_attn = False  # type: ignore[assignment]
    return len(fused)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax(Q K^T / sqrt(F)) V, computed by the faster of two methods.

    Args:
        query: (B, H, N, F), for H heads.
        key: (B, H, M, F).
        value: (B, H, M, F).

    Returns:
        (B, H, N, F): by two matrix products under autocast to bfloat16 on a CPU with bfloat16
        instructions, for at most ``MOST_TOKENS`` tokens; otherwise by torch's
        ``scaled_dot_product_attention``.
    """
    if not (
        query.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and max(query.shape[2], key.shape[2]) <= MOST_TOKENS
        and computes_in_bfloat16()
    ):
        return F.scaled_dot_product_attention(query, key, value)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return scores.softmax(dim=-1) @ value
