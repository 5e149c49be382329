"""Summary of a model: the first lines of a log, and the cost of a forward pass.

The cost is counted by torch's dispatcher on the meta device. fvcore's counters give the same
numbers (tests/models/test_summary.py), but need a jit trace, which fails for timm's models under
torch 2.15.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

from selftask.config.checks.grid import output_side
from selftask.config.schema import Component, Config, ViewConfig, num_views
from selftask.config.values.budget import show_count
from selftask.models.eval_mode import in_eval_mode


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
    num_trained = _count(network, trained=True) + _count(method, trained=True)
    views = ", ".join(
        _views(number, name, config.views[name])
        for name, number in num_views(config.views).items()
        if number
    )
    size, trained = show_count(_count(backbone), 3), show_count(num_trained, 3)
    yield (
        f"model: {config.method.name} on {_name(config.backbone)} of {size} parameters"
        f"{_show_cost(backbone, config, channels)}; {trained} are trained, the head's included; "
        f"views: {views}"
    )


def _name(backbone: Component) -> str:
    """Return a backbone's name, such as ``small_resnet`` or ``timm:vit_small_patch16_224``."""
    model = backbone.args.get("model")
    return backbone.name if model is None else f"{backbone.name}:{model}"


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def _show_cost(backbone: nn.Module, config: Config, channels: int) -> str:
    """Format the multiply-adds for an image of the first view's size; empty if they are unknown."""
    side = output_side(next(iter(config.views.values())).transforms)
    is_sharded = any(hasattr(parameter, "to_local") for parameter in backbone.parameters())
    if side is None or is_sharded:  # the forward pass of a sharded model would be a collective
        return ""
    try:
        flops, _ = _count_forward(backbone, side, channels)
    except Exception:  # noqa: BLE001 - a user's module may raise anything on the meta device
        return ""
    cost = show_count(flops.get_total_flops() // 2, 3)
    return f", {cost} multiply-adds per image of {side} x {side} pixels"


def _views(number: int, name: str, group: ViewConfig) -> str:
    """Format views as ``2 main of 224 x 224 pixels``, without the size if it is not fixed."""
    side = output_side(group.transforms)
    size = "" if side is None else f" of {side} x {side} pixels"
    return f"{number} {name}{size}"


@torch.no_grad()
def _count_forward(
    module: nn.Module, side: int, channels: int
) -> tuple[FlopCounterMode, Counter[str]]:
    """Return FLOPs and activations (elements) of a forward pass of one image, by module."""
    image = torch.empty(1, channels, side, side, device="meta")
    activations = _CountActivations()
    with in_eval_mode(module), FlopCounterMode(display=False) as flops, activations:
        functional_call(module, _meta_state(module), (image,))
    return flops, activations.by_module


@dataclass(frozen=True)
class ModuleCost:
    """Cost of a module for one image.

    Args:
        name: Dotted name; empty for the whole model.
        kind: Name of its class.
        parameters: Number of parameters; shared ones count once per module.
        macs: Multiply-adds of convolutions, matrix products and attention. Papers often call them
            FLOPs (4.1 G for ResNet-50).
        activations: Elements in the outputs of these operations (arXiv:2003.13678, section 3.1).
        saved_bytes: Bytes kept for the backward pass in float32.
    """

    name: str
    kind: str
    parameters: int
    macs: int
    activations: int
    saved_bytes: int


def module_costs(
    module: nn.Module, side: int, channels: int = 3, *, depth: int = 2
) -> list[ModuleCost]:
    """Return the cost of a module and its sub-modules, for images of ``side`` x ``side`` pixels.

    Weights and random states are unchanged. ``saved_bytes`` is that of the module's current mode,
    train or eval; other costs are those in eval mode. If the forward pass depends on the values of
    tensors, which do not exist on the meta device, the module's error is raised.

    Args:
        module: Images (B, C, H, W) -> anything.
        side: Height and width in pixels.
        channels: Channels of the image.
        depth: Number of levels of sub-modules; 0 for the module alone.
    """
    flops, activations = _count_forward(module, side, channels)
    macs = {name: sum(of.values()) // 2 for name, of in flops.get_flop_counts().items()}
    saved = saved_bytes(module, (torch.empty(2, channels, side, side, device="meta"),))
    return [
        ModuleCost(
            name=name,
            kind=type(inner).__name__,
            parameters=sum(p.numel() for p in inner.parameters()),
            macs=macs.get(_tracked(module, name), 0),
            activations=activations[_tracked(module, name)],
            saved_bytes=saved[name] // 2,
        )
        for name, inner in module.named_modules()
        if not name or name.count(".") < depth
    ]


def saved_bytes(module: nn.Module, args: tuple[Any, ...]) -> Counter[str]:
    """Return the bytes that a forward pass keeps for its backward pass, by module name.

    Parameters and buffers do not count. A module's bytes include those of its sub-modules; the
    empty name has the total.

    Args:
        module: Any module, in the mode whose memory is of interest.
        args: Its arguments, with tensors on the meta device.
    """
    tracker = ModuleTracker()
    kept: list[Any] = []
    counts: Counter[str] = Counter()

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(storage)  # kept alive, so that no other storage gets its address
            counts.update(dict.fromkeys(tracker.parents, storage.nbytes()))
        return tensor

    state = _meta_state(module)
    seen = {tensor.untyped_storage()._cdata for tensor in state.values()}
    with tracker, torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        functional_call(module, state, args)
    names = {_tracked(module, name): name for name, _ in module.named_modules()}
    return Counter({names[key]: count for key, count in counts.items() if key in names})


def _meta_state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers as tensors on the meta device."""
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        state[name] = parameter.detach().to("meta").requires_grad_(parameter.requires_grad)
    for name, buffer in module.named_buffers():
        state[name] = buffer.detach().to("meta")
    return state


def _tracked(module: nn.Module, name: str) -> str:
    """Return the name that torch's trackers use for a sub-module of ``module``."""
    return f"{type(module).__name__}.{name}" if name else type(module).__name__


class _CountActivations(TorchDispatchMode):
    """Dispatch mode that counts elements in the outputs of operations with FLOPs, by module."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = ModuleTracker()
        self.by_module: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self.tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.tracker.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func._overloadpacket in flop_registry:
            first = result[0] if isinstance(result, tuple) else result
            self.by_module.update(dict.fromkeys(self.tracker.parents, first.numel()))
        return result
