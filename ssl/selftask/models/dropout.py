"""Dropout and stochastic depth drawn per sample, so that W ranks draw the same values as one.

Layers of libraries draw from torch's generator, so their draws depend on the size of the rank's
batch. ``draw_per_sample`` makes the layers of a network use ``LAYER_DRAWS`` instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selftask.distributed.collectives import world_size
from selftask.logs import get_logger
from selftask.random.keyed import LAYER_DRAWS, Keep, keep_mask

log = get_logger(__name__)


class _Kind(NamedTuple):
    """A library's layer class: the attribute with its rate, and the number of axes it draws for."""

    rate: str
    axes: int  # number of axes after the first; other axes are dropped together


_ALL_AXES = 99
_KINDS = {
    "torch.nn.modules.dropout.Dropout": _Kind("p", _ALL_AXES),
    "torch.nn.modules.dropout.Dropout1d": _Kind("p", 1),
    "torch.nn.modules.dropout.Dropout2d": _Kind("p", 1),
    "torch.nn.modules.dropout.Dropout3d": _Kind("p", 1),
    "timm.layers.drop.DropPath": _Kind("drop_prob", 0),
    "torchvision.ops.stochastic_depth.StochasticDepth": _Kind("p", 0),
}
_RATE_IS_P = {name.rpartition(".")[2] for name, kind in _KINDS.items() if kind.rate == "p"}
_OTHER_RATES = ("drop_prob", "dropout", "p", "prob")
_OTHERS = ("drop", "attention", "stochasticdepth", "rnn", "lstm", "gru")  # parts of class names


def draw_per_sample(modules: Iterable[nn.Module], seed: int) -> list[str]:
    """Make the dropout layers of ``modules`` draw per sample, and reset ``LAYER_DRAWS`` for them.

    Only the class of a layer changes, not its name or state. Layers with a rate of 0 are unchanged,
    and so are layers of stochastic depth that drop a whole batch. timm's attention layers with
    dropout stop using the fused kernel.

    Args:
        modules: Modules whose layers are changed in place.
        seed: Seed of the run.

    Returns:
        Names and classes of other layers that appear to draw from torch's generator, such as
        ``encoder (LSTM)``. On several ranks a warning lists them.
    """
    layers: list[Keep] = []
    others, seen = [], set()
    for module in modules:
        for name, layer in module.named_modules():
            if layer in seen:
                continue
            seen.add(layer)
            library: Any = type(layer)
            kind = _KINDS.get(f"{library.__module__}.{library.__qualname__}")
            if kind is not None and getattr(layer, kind.rate) and _in_rows(layer):
                layer.__class__ = _per_sample(library, kind)
                layer._draw_number = -1  # type: ignore[assignment]
            if hasattr(layer, "_draw_number"):
                layer._draw_number = len(layers)
                layer._drawn = _keep(layer)  # type: ignore[assignment]
                layers.append(layer._drawn)  # type: ignore[arg-type]
            elif _may_draw(layer):
                others.append(f"{name} ({type(layer).__name__})")
            _unfuse(layer)
    LAYER_DRAWS.reset(seed, layers)
    if others and world_size() > 1:
        log.warning(
            "%s: draws from each rank's own generator; results depend on the number of ranks",
            ", ".join(others),
        )
    return others


def disable_stochastic_depth(network: nn.Module) -> None:
    """Set the rates of torch's dropout, and of timm's and torchvision's stochastic depth, to 0.

    Any other layer with an attribute ``drop_prob`` is also changed. Random coordinates of RoPE are
    disabled, too.
    """
    for layer in network.modules():
        if hasattr(layer, "aug_active"):
            layer.aug_active = False  # type: ignore[assignment]
        if hasattr(layer, "drop_prob"):
            layer.drop_prob = 0.0  # type: ignore[assignment]
        elif type(layer).__name__ in _RATE_IS_P:
            layer.p = 0.0  # type: ignore[assignment]


def set_uniform_stochastic_depth(network: nn.Module, rate: float) -> None:
    """Set the same rate of stochastic depth, in [0, 1), in all residual branches of a timm model.

    By default the rate increases with depth from 0. Since timm builds no layer for a rate of 0, as
    in the first block, all layers are replaced by new ones.
    """
    from timm.layers import DropPath

    for part in network.modules():
        for name, _ in [*part.named_children()]:
            if name.startswith("drop_path"):
                setattr(part, name, DropPath(rate))


@functools.cache
def _per_sample(library: Any, kind: _Kind) -> Any:
    """Return a subclass of the layer class ``library`` that draws per sample in training steps."""

    def forward(self: Any, x: Tensor) -> Any:
        rate = getattr(self, kind.rate)
        if not self.training or not rate or LAYER_DRAWS.words is None:
            return library.forward(self, x)
        if kind.axes == 0 and len(x) != LAYER_DRAWS.words.shape[1] and not _in_backward():
            LAYER_DRAWS.enter_next(len(x))  # the backbone was called without ``extract``
        words = LAYER_DRAWS.words[self._draw_number]  # (N,)
        if len(x) % len(words):
            _misfit(library.__name__, len(x), len(words))
            return library.forward(self, x)
        shape = x.shape[: 1 + kind.axes]
        count, keep = shape.numel() // len(words), _keep(self)
        if (count, keep) == (1, self._drawn):
            factors = LAYER_DRAWS.factors(self._draw_number, x.dtype)
        else:
            factors = keep_mask(words, count, keep.probability).to(x.dtype) * keep.scale
        return x * factors.view(*shape, *[1] * (x.ndim - len(shape)))

    def reduced(self: Any) -> tuple[Any, ...]:
        return _new_layer, (library,), self.__dict__  # pickle finds no class made in a function

    attributes = {"forward": forward, "_rate_name": kind.rate, "__reduce__": reduced}
    return type(library.__name__, (library,), attributes)


def _new_layer(library: Any) -> Any:
    """Return a layer without attributes, for pickle and copy; see ``_per_sample``."""
    kind = _per_sample(library, _KINDS[f"{library.__module__}.{library.__qualname__}"])
    return kind.__new__(kind)


def _keep(layer: Any) -> Keep:
    """Return a layer's keep probability and scale; both are 1 for layers not in ``_KINDS``."""
    rate = getattr(layer, layer._rate_name) if hasattr(layer, "_rate_name") else 0.0
    scales = rate < 1 and getattr(layer, "scale_by_keep", True)
    return Keep(1 - rate, 1 / (1 - rate) if scales else 1.0)


def _in_rows(layer: nn.Module) -> bool:
    """Return False for torchvision's StochasticDepth that drops a whole batch."""
    return getattr(layer, "mode", "row") == "row"


def _may_draw(layer: nn.Module) -> bool:
    """Return True if an unknown class looks like a dropout layer with a rate above 0."""
    rates = [getattr(layer, name, 0) for name in _OTHER_RATES]
    is_named_so = any(word in type(layer).__name__.lower() for word in _OTHERS)
    return is_named_so and any(isinstance(rate, float) and rate > 0 for rate in rates)


def _unfuse(layer: Any) -> None:
    """Disable timm's fused attention if it has dropout, which torch's kernel would draw itself."""
    if getattr(layer, "fused_attn", False) and getattr(getattr(layer, "attn_drop", None), "p", 0):
        layer.fused_attn = False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _misfit(name: str, rows: int, expected: int) -> None:
    """Warn once that rows do not match samples; raise RuntimeError in a backward pass.

    A call in a backward pass means that the backbone's own checkpointing recomputes a forward pass,
    whose draws are lost.
    """
    if _in_backward():
        raise RuntimeError(
            f"{name} in a block that the backbone itself computes again in the backward pass: use "
            "parallel.activation_checkpointing=blocks instead of the backbone's own"
        )
    log.warning(
        "%s got %d rows for %d images: it draws from each rank's own generator; results depend on "
        "the number of ranks",
        name,
        rows,
        expected,
    )
