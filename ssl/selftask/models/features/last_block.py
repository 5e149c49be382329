"""The last block of a vision transformer, of which only the class token is pooled.

The patches are attended to, and their outputs are not computed: about three quarters of the block's
matrix products.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def is_plain(block: Any) -> bool:
    """Return True if a block is timm's ``Block``: not sharded, recomputed, compiled or hooked."""
    from timm.layers import Attention
    from timm.models.vision_transformer import Block

    return (
        type(block) is Block
        and type(block.attn) is Attention
        and block.attn.gate is None
        and block._compiled_call_impl is None
        and not any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())
    )


def class_token_of(block: Any, x: Tensor) -> Tensor:
    """Return ``block(x)[:, :1]`` for tokens (B, N, E) and a block that ``is_plain``."""
    x = x[:, :1] + block.drop_path1(block.ls1(_attend(block.attn, block.norm1(x))))
    output: Tensor = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return output


def _attend(attention: Any, x: Tensor) -> Tensor:
    """Return ``attention(x)[:, :1]``, with the operations of timm's ``Attention``."""
    heads = attention.qkv(x).unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = heads.unbind(0)  # (B, H, N, F)
    query, key = attention.q_norm(query[:, :, :1]), attention.k_norm(key)
    if attention.fused_attn:
        rate = attention.attn_drop.p if attention.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
    else:
        weights = ((query * attention.scale) @ key.transpose(-2, -1)).softmax(dim=-1)
        x = attention.attn_drop(weights) @ value
    output: Tensor = attention.proj_drop(attention.proj(attention.norm(x.flatten(1)[:, None])))
    return output
