"""Attention of transformers whose tokens attend to earlier ones, as in language models."""

from __future__ import annotations

import torch
from timm.layers import Attention
from torch import Tensor


class CausalAttention(Attention):
    """timm's attention in which each token attends to itself and to the tokens before it.

    Shape:
        (B, T, E) -> (B, T, E). A bool ``attn_mask`` (B, 1, T, T) restricts it further.
    """

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = True) -> Tensor:
        if attn_mask is None:
            return super().forward(x, is_causal=True)
        length = x.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        return super().forward(x, attn_mask & earlier)
