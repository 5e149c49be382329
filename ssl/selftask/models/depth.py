"""Layer index of each parameter of a backbone, for layer-wise learning rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from selftask.errors import UserError


def parameter_depths(backbone: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return the layer index of each parameter by name: 0 for the stem, then one for each block.

    timm's ``group_matcher`` is used if the backbone has one; parameters that it assigns to the head
    are omitted. Otherwise parameters between two blocks belong to the next block, and those after
    the last block belong to the last block, as in timm.

    Args:
        backbone: Images -> features.
        blocks: Its blocks in order.

    Raises:
        UserError: If the backbone has no blocks.
    """
    matcher: Any = getattr(backbone, "group_matcher", None)
    if matcher is not None:
        return _by_matcher(backbone, matcher(coarse=False))
    layers = _without_downsampling(backbone, blocks)
    if not layers:
        raise UserError(
            f"optimizer.layer_decay: the layers of {type(backbone).__name__} are unknown: it has "
            "no blocks, such as children of a Sequential or ModuleList; take optimizer.groups, or "
            "give it a method group_matcher as timm's models have"
        )
    inside = {id(p): number for number, block in enumerate(layers, 1) for p in block.parameters()}
    named = list(backbone.named_parameters())
    first = next(place for place, (_, p) in enumerate(named) if id(p) in inside)
    depths, layer = {}, len(layers)
    for place, (name, parameter) in reversed([*enumerate(named)]):
        layer = inside.get(id(parameter), layer)
        depths[name] = layer if place >= first else 0
    return depths


def _by_matcher(backbone: nn.Module, matcher: Any) -> dict[str, int]:
    """Return timm's layer indices without parameters that its patterns assign to the head."""
    from timm.models._manipulate import group_with_matcher

    head = "head_of_selftask"  # like a head's parameters, it matches no pattern
    names = [*(name for name, _ in backbone.named_parameters()), head]
    layers = group_with_matcher(iter([(name, None) for name in names]), matcher, reverse=True)
    return {name: layer for name, layer in layers.items() if layer < layers[head]}


def _without_downsampling(backbone: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out downsampling modules: children of a rarer type between whole stages."""
    counts = Counter(type(block) for block in blocks)
    between = {
        id(child)
        for part in backbone.modules()
        if isinstance(part, nn.Sequential | nn.ModuleList)
        and any(isinstance(child, nn.Sequential | nn.ModuleList) for child in part)
        for child in part
    }
    most = max(counts.values(), default=0)
    return [b for b in blocks if id(b) not in between or counts[type(b)] == most]
