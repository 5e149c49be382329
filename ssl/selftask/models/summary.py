"""The lines at the start of a log that say what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from selftask.config.checks.grid import output_side
from selftask.config.schema import num_views

if TYPE_CHECKING:
    from selftask.config.schema import Component, Config, ViewConfig


def opening_lines(config: Config, network: nn.Module, method: nn.Module) -> Iterator[str]:
    """Yield one line for the run (recipe, out, seed) and one for its model and views.

    Args:
        config: the run's.
        network: the trained network; its ``backbone`` is counted on its own.
        method: the method, whose own parameters (a predictor, prototypes) are trained too.
    """
    yield f"run: {config.recipe}, out={config.out}, seed {config.train.seed}"
    backbone: nn.Module = network.backbone  # type: ignore[assignment]
    trained = _count(network, trained=True) + _count(method, trained=True)
    views = ", ".join(
        _views(number, name, config.views[name])
        for name, number in num_views(config.views).items()
        if number
    )
    yield (
        f"model: {config.method.name} on {_name(config.backbone)} of {_show(_count(backbone))} "
        f"parameters; {_show(trained)} are trained, the head's included; views: {views}"
    )


def _name(backbone: Component) -> str:
    """``small_resnet``, or for a library's model ``timm:vit_small_patch16_224``."""
    model = backbone.args.get("model")
    return backbone.name if model is None else f"{backbone.name}:{model}"


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def _show(count: int) -> str:
    """``697 k``, ``23.5 M``."""
    return f"{count / 1e6:.1f} M" if count >= 999_500 else f"{count / 1e3:.0f} k"


def _views(number: int, name: str, group: ViewConfig) -> str:
    """``2 main of 224 x 224 pixels``; without the size if it is that of the images."""
    side = output_side(group.transforms)
    size = "" if side is None else f" of {side} x {side} pixels"
    return f"{number} {name}{size}"
