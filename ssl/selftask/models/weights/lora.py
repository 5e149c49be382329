"""LoRA (arXiv:2106.09685): train low-rank adapters of a frozen backbone, and merge them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from selftask.config.schema.component import LoRAConfig
from selftask.errors import UserError, nearest
from selftask.models.precision import in_full_precision

_WEIGHTS: dict[type[nn.Module], str] = {
    nn.Linear: "weight",
    nn.MultiheadAttention: "in_proj_weight",
    nn.Conv2d: "weight",
}
"""Adapted weight by type of layer."""


class LowRank(nn.Module):
    """LoRA's parametrization of a weight: W -> W + alpha / rank * B A.

    It is registered with torch's ``parametrize``, since some networks use the weight of a layer
    without calling the layer. B is 0 at first, so that the network does not change.

    Args:
        weight: The weight W; all dimensions but the first count as inputs.
        rank: Rows of A and columns of B.
        alpha: Scale, divided by the rank.

    Shape:
        ``lora_a`` (rank, in), ``lora_b`` (out, rank).
    """

    scale: Tensor

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        outputs, inputs = weight.flatten(1).shape
        self.lora_a = nn.Parameter(weight.new_empty(rank, inputs))
        self.lora_b = nn.Parameter(weight.new_zeros(outputs, rank))
        self.register_buffer("scale", weight.new_full((), alpha / rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return _sum(weight, self.lora_a, self.lora_b, self.scale).to(weight.dtype)


@in_full_precision
def _sum(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> Tensor:
    return weight + scale * (lora_b @ lora_a).view_as(weight)


def adapt(backbone: nn.Module, config: LoRAConfig | None) -> None:
    """Freeze a backbone except ``config.train``, and add adapters in place.

    Call it after loading weights, whose names it changes.

    Args:
        backbone: The backbone.
        config: The section ``backbone.lora``; None: do nothing.

    Raises:
        UserError: If a pattern matches nothing, or if nothing can be adapted or trained.
    """
    if config is None:
        return
    if not (config.rank or config.train):
        raise UserError(
            "backbone.lora: with rank 0 and no names in train, nothing of the backbone would be "
            'trained; give a rank, or train: ["*.bias"]'
        )
    names = [name for name, _ in backbone.named_parameters()]
    trained = _matched(names, config.train, "backbone.lora.train")
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(name in trained)
    if not config.rank:
        return
    layers = dict(backbone.named_modules())
    for name in _adapted(layers, config.layers):
        layer = layers[name]
        kind = next(kind for kind in _WEIGHTS if isinstance(layer, kind))
        weight = getattr(layer, _WEIGHTS[kind])
        adapter = LowRank(weight, config.rank, config.alpha)
        parametrize.register_parametrization(layer, _WEIGHTS[kind], adapter, unsafe=True)


def base_weight(layer: Any) -> Tensor:
    """Return the weight of a linear layer or convolution without its adapter, to be set in place.

    The weight of an adapted layer is computed at each access.
    """
    for weights in _lists(layer):
        if isinstance(weights[0], LowRank):
            return weights.original
    return layer.weight


def _adapted(layers: Mapping[str, nn.Module], patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the layers to adapt; raise UserError if there are none."""
    able = {name: layer for name, layer in layers.items() if _has_weight(layer)}
    if patterns is not None:
        matched = _matched(list(able), patterns, "backbone.lora.layers")
        return [name for name in able if name in matched]
    linear = [name for name, layer in able.items() if not isinstance(layer, nn.Conv2d)]
    if not able:
        raise UserError("backbone.lora: the backbone has no linear layers and no convolutions")
    return linear or list(able)


def _has_weight(layer: nn.Module) -> bool:
    if parametrize.is_parametrized(layer):
        return False  # such as by spectral_norm; the two could not be distinguished when merging
    if isinstance(layer, nn.MultiheadAttention):
        return layer.in_proj_weight is not None  # else queries, keys and values differ in width
    return isinstance(layer, tuple(_WEIGHTS))


def _matched(names: Sequence[str], patterns: Iterable[str], key: str) -> set[str]:
    """Return the names that a pattern matches, or that are inside a module that it matches."""
    matched: set[str] = set()
    for pattern in patterns:
        fits = {n for n in names for glob in (pattern, f"{pattern}.*") if fnmatchcase(n, glob)}
        if not fits:
            hint = nearest(pattern.replace("*", ""), names)
            raise UserError(f"{key}: {pattern!r} matches nothing in the backbone; {hint}")
        matched |= fits
    return matched


@torch.no_grad()
def merged(backbone: nn.Module) -> nn.Module:
    """Return a copy with adapters merged into the weights, or the backbone if it has none.

    Other parametrizations, such as ``weight_norm``, are kept.
    """
    if not any(isinstance(part, LowRank) for part in backbone.modules()):
        return backbone
    backbone = deepcopy(backbone)
    for part in backbone.modules():
        if any(isinstance(inner, LowRank) for weights in _lists(part) for inner in weights):
            _merge(part)
    return backbone


def _lists(layer: Any) -> Iterable[Any]:
    """Return torch's lists of the parametrizations of a layer, one for each of its tensors."""
    return layer.parametrizations.values() if parametrize.is_parametrized(layer) else ()


def _merge(layer: Any) -> None:
    """Merge the adapter of a layer.

    torch's ``remove_parametrizations`` would edit the class, which deep copies of the layer share.
    """
    merged_weights = {
        name: nn.Parameter(getattr(layer, name), weights.original.requires_grad)
        for name, weights in layer.parametrizations.items()
    }
    del layer.parametrizations
    layer.__class__ = type(layer).__bases__[0]
    layer._parameters = {**merged_weights, **layer._parameters}


def merged_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with adapters merged, under the names of the backbone without them."""
    mark, plain = ".parametrizations.", dict(state)
    for key in [key for key in state if mark in key and key.endswith(".0.lora_a")]:
        base = key.removesuffix(".0.lora_a")
        adapter = [plain.pop(f"{base}.0.{part}") for part in ("lora_a", "lora_b", "scale")]
        plain[base.replace(mark, ".")] = _sum(plain.pop(f"{base}.original"), *adapter)
    return plain


def adapted_state(backbone: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of a backbone without adapters for loading into one with them.

    Args:
        backbone: Backbone with adapters, whose values are part of the result.
        state: State dict of the same backbone without adapters.
    """
    ours = backbone.state_dict()
    base = {key.replace(".parametrizations.", ".").removesuffix(".original"): key for key in ours}
    adapters = {key: value for key, value in ours.items() if ".parametrizations." in key}
    return {**adapters, **{base.get(key, key): value for key, value in state.items()}}
