"""Summary of a model: the opening lines of a log, and the cost of a forward pass.

The cost is counted by torch's dispatcher on the meta device. fvcore's counters give the same
numbers (tests/models/test_summary.py), but need a jit trace, which fails for timm's models under
torch 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from selftask.config.checks.grid import output_side
from selftask.config.schema import num_views
from selftask.models.eval_mode import in_eval_mode

if TYPE_CHECKING:
    from selftask.config.schema import Component, Config, ViewConfig


def opening_lines(
    config: Config, network: nn.Module, method: nn.Module, channels: int
) -> Iterator[str]:
    """Yield one line for the run (recipe, out, seed) and one for its model and views.

    Args:
        config: Config of the run.
        network: The trained network; its ``backbone`` is also counted separately.
        method: The method, whose own parameters (a predictor, prototypes) are also trained.
        channels: Channels of the images.
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
        f"parameters{_show_cost(backbone, config, channels)}; {_show(trained)} are trained, the "
        f"head's included; views: {views}"
    )


def _name(backbone: Component) -> str:
    """Return ``small_resnet``, or ``timm:vit_small_patch16_224`` for a library's model."""
    model = backbone.args.get("model")
    return backbone.name if model is None else f"{backbone.name}:{model}"


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def _show(count: int) -> str:
    """Format a count: ``697 k``, ``23.5 M``, ``4.1 G``."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if count >= 0.9995 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.0f} k"


def _show_cost(backbone: nn.Module, config: Config, channels: int) -> str:
    """Format the multiply-adds for an image of the first view's size, if they can be counted."""
    side = output_side(next(iter(config.views.values())).transforms)
    is_sharded = any(hasattr(parameter, "to_local") for parameter in backbone.parameters())
    if side is None or is_sharded:  # a forward pass of a sharded model is a collective
        return ""
    try:
        cost = forward_cost(backbone, side, channels)
    except Exception:  # noqa: BLE001 - a user's module may raise anything on the meta device
        return ""
    return f", {_show(cost.macs)} multiply-adds per image of {side} x {side} pixels"


def _views(number: int, name: str, group: ViewConfig) -> str:
    """Format ``2 main of 224 x 224 pixels``; without the size if views keep the images' size."""
    side = output_side(group.transforms)
    size = "" if side is None else f" of {side} x {side} pixels"
    return f"{number} {name}{size}"


@dataclass(frozen=True)
class Cost:
    """Cost of one image.

    Args:
        macs: Multiply-adds of convolutions, matrix products and attention; papers often call them
            FLOPs (ResNet-50 has 4.1 G of them).
        activations: Elements in the outputs of these operations (arXiv:2003.13678, section 3.1).
    """

    macs: int
    activations: int


@torch.no_grad()
def forward_cost(module: nn.Module, side: int, channels: int = 3) -> Cost:
    """Count the cost of a forward pass of one image of ``side`` x ``side`` pixels.

    Weights and random states are unchanged. If the forward pass depends on values, which do not
    exist on the meta device, the module's error is raised.

    Args:
        module: Images (B, C, H, W) -> features.
        side: Height and width in pixels.
        channels: Channels of the image.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    on_meta = {name: tensor.detach().to("meta") for name, tensor in state.items()}
    image = torch.empty(1, channels, side, side, device="meta")
    activations = _CountActivations()
    with in_eval_mode(module), FlopCounterMode(display=False) as flops, activations:
        functional_call(module, on_meta, (image,))
    return Cost(flops.get_total_flops() // 2, activations.count)


class _CountActivations(TorchDispatchMode):
    """Sums the elements in the outputs of operations that have FLOPs."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func._overloadpacket in flop_registry:
            first = result[0] if isinstance(result, tuple) else result
            self.count += first.numel()
        return result
