"""Parameter groups by weight decay: none for biases and norms, optional for tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_TOKENS = ("cls_token", "pos_embed", "mask_token", "reg_token", "dist_token")


def split_decay(
    modules: Iterable[tuple[str, nn.Module]], *, decay_all: bool, decay_tokens: bool = False
) -> list[dict[str, Any]]:
    """Split the trainable parameters of named modules into groups with and without weight decay.

    A parameter shared by two modules is counted once.

    Args:
        modules: Named modules.
        decay_all: Apply weight decay to every parameter.
        decay_tokens: Also apply weight decay to a transformer's learned tokens and positions.

    Returns:
        Groups with ``decay: True`` and ``False``. ``adapt`` marks the parameters that LARS scales
        layer by layer, which are those that decay (You et al., section 4).
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for prefix, module in modules:
        for name, parameter in module.named_parameters(prefix):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_token = name.rpartition(".")[2] in _TOKENS
            decays = decay_tokens if is_token else parameter.ndim > 1
            (decayed if decays else plain).append(parameter)
    groups = [
        {"params": decayed, "decay": True, "adapt": True},
        {"params": plain, "decay": decay_all, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


def merge_alike(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups with equal settings. Each group costs a launch, or 10 us, at every step."""
    merged: list[dict[str, Any]] = []
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for other in merged:
            if {key: value for key, value in other.items() if key != "params"} == settings:
                other["params"] = [*other["params"], *group["params"]]
                break
        else:
            merged.append(dict(group))
    return merged
