"""Names of vision transformers in Hugging Face's transformers, converted to Meta's and timm's."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]

_QUERY = re.compile(r"(?P<part>.*\battention\.)(?P<query>query|q_proj)\.(?P<leaf>weight|bias)")
_OTHERS = {"query": ("key", "value"), "q_proj": ("k_proj", "v_proj")}

_NAMES = (  # of ViT, ViT-MAE, DINOv2 and DINOv3, in this order
    (r"\bembeddings\.(cls_token|mask_token|register_tokens)$", r"\1"),
    (r"\bembeddings\.position_embeddings$", "pos_embed"),
    (r"\bembeddings\.patch_embeddings\.(?:projection\.)?", "patch_embed.proj."),
    (r"\b(?:encoder\.)?layer\.(\d+)\.", r"blocks.\1."),
    (r"\battention\.(?:output\.dense|o_proj)\.", "attn.proj."),
    (r"\battention\.(?:attention\.)?qkv\.", "attn.qkv."),
    (r"\b(?:intermediate\.dense|mlp\.up_proj)\.", "mlp.fc1."),
    (r"\b(?:output\.dense|mlp\.down_proj)\.", "mlp.fc2."),
    (r"\bmlp\.weights_in\.", "mlp.w12."),
    (r"\bmlp\.weights_out\.", "mlp.w3."),
    (r"\blayernorm_before\.", "norm1."),
    (r"\blayernorm_after\.", "norm2."),
    (r"\blayernorm\.", "norm."),
    (r"\blayer_scale([12])\.lambda1$", r"ls\1.gamma"),
)
_GATED = (  # SwiGLU of DINOv3
    (r"\bmlp\.gate_proj\.", "mlp.w1."),
    (r"\bmlp\.up_proj\.", "mlp.w2."),
    (r"\bmlp\.down_proj\.", "mlp.w3."),
)


def with_plain_names(state: State, backbone: State) -> dict[str, Tensor]:
    """Convert the state of a vision transformer of Hugging Face's transformers.

    Query, key and value are joined. DINOv3 has no bias of the keys: as in Meta's files, there is
    one, and a mask that zeroes it. Other files are returned unchanged, and so are all files if the
    backbone itself has such names.
    """
    queries = [match for key in state if (match := _QUERY.fullmatch(key))]
    if not queries or any(_QUERY.fullmatch(key) for key in backbone):
        return dict(state)
    joined = dict(state)
    for match in queries:
        _join(joined, **match.groupdict())
    gated = any(".mlp.gate_proj." in key for key in state)
    names = (*(_GATED if gated else ()), *_NAMES)
    return {_renamed(key, names): value for key, value in joined.items()}


def _join(state: dict[str, Tensor], part: str, query: str, leaf: str) -> None:
    """Replace the tensors of query, key and value by one, if their shapes are equal."""
    q, k, v = (state.get(f"{part}{name}.{leaf}") for name in (query, *_OTHERS[query]))
    masked = k is None and leaf == "bias"
    k = torch.zeros_like(q) if masked and q is not None else k
    if q is None or k is None or v is None or not q.ndim or not q.shape == k.shape == v.shape:
        return
    for name in (query, *_OTHERS[query]):
        state.pop(f"{part}{name}.{leaf}", None)
    state[f"{part}qkv.{leaf}"] = torch.cat([q, k, v])
    if masked:
        one = torch.ones_like(q)
        state[f"{part}qkv.bias_mask"] = torch.cat([one, k, one])


def _renamed(key: str, names: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in names:
        key = re.sub(pattern, replacement, key)
    return key
