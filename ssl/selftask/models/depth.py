"""Layer index of each parameter of a backbone, for layer-wise learning rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from selftask.errors import UserError


def parameter_depths(backbone: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return the layer index of each parameter by name: 0 for the stem, then one for each block.

    If the backbone has timm's ``group_matcher``, its layers are used. Otherwise parameters between
    two blocks belong to the next block. Parameters after the last block, such as the final norm,
    are omitted: they have the learning rate of the head, as in the code of BEiT, MAE and DINOv2. In
    timm they have the learning rate of the last block.

    Args:
        backbone: Images -> features.
        blocks: Its blocks in order.

    Raises:
        UserError: If the backbone has neither blocks nor a ``group_matcher``.
    """
    inside = {
        id(parameter): layer
        for layer, block in enumerate(_without_downsampling(backbone, blocks), 1)
        for parameter in block.parameters()
    }
    matcher: Any = getattr(backbone, "group_matcher", None)
    if matcher is None and not inside:
        raise UserError(
            f"optimizer.layer_decay: the layers of {type(backbone).__name__} are unknown: it has "
            "no blocks, such as children of a Sequential or ModuleList; take optimizer.groups, or "
            "give it a method group_matcher as timm's models have"
        )
    named = list(backbone.named_parameters())
    numbers = [index for index, (_, parameter) in enumerate(named) if id(parameter) in inside]
    first, last = (numbers[0], numbers[-1]) if numbers else (0, len(named) - 1)
    if matcher is not None:
        layers = _by_matcher([name for name, _ in named], matcher(coarse=False))
        top = max(layers.values())
        after = {name for name, _ in named[last + 1 :] if layers.get(name) == top}
        return {name: layer for name, layer in layers.items() if name not in after}
    depths, layer = {}, 0
    for index, (name, parameter) in reversed([*enumerate(named[: last + 1])]):
        layer = inside.get(id(parameter), layer)
        depths[name] = layer if index >= first else 0
    return depths


def _by_matcher(names: Sequence[str], matcher: Any) -> dict[str, int]:
    """Return timm's layer indices without parameters that its patterns assign to the head."""
    from timm.models._manipulate import group_with_matcher

    head = "head_of_selftask"  # like a head's parameters, it matches no pattern
    pairs = iter([(name, None) for name in (*names, head)])
    layers = group_with_matcher(pairs, matcher, reverse=True)
    return {name: layer for name, layer in layers.items() if layer < layers[head]}


def _without_downsampling(backbone: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Remove downsampling modules: siblings of stages that are not of the most common type."""
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
