"""Convolutional networks that see some patches of an image only: submanifold sparse convolutions.

Layers are computed densely, which saves no arithmetic. Layers that mix positions (convolutions,
pooling) get zeros at hidden positions. Layers with statistics over positions (BatchNorm, GroupNorm,
global response normalization, global pooling) get only the visible positions. Visible positions
therefore do not depend on the pixels of hidden patches; values at hidden positions are undefined.

B images, K visible patches of a grid of h x w, H x W positions of a map, S visible ones of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selftask.errors import UserError
from selftask.models.features.tokens import Grid

_POSITIONWISE = {
    *("ResNet", "BasicBlock", "Bottleneck", "Sequential"),
    *("ConvNeXt", "ConvNeXtStage", "ConvNeXtBlock", "Mlp", "GlobalResponseNormMlp"),
    *("NormMlpClassifierHead", "SelectAdaptivePool2d", "Flatten", "Identity", "FrozenBatchNorm2d"),
    *("LayerNorm", "LayerNorm2d", "SimpleNorm", "SimpleNorm2d", "RmsNorm", "RmsNorm2d"),
    *("Dropout", "DropPath", "ReLU", "ReLU6", "LeakyReLU", "GELU", "GELUTanh", "SiLU", "Tanh"),
}
"""Modules whose own forward passes mix no positions, by the names of their classes."""


class VisiblePatches:
    """Patches that the current pass sees. There is one object per process; modules read it."""

    def __init__(self) -> None:
        self._use(None, (0, 0))

    def _use(self, indices: Tensor | None, grid: Grid) -> None:
        self.indices = indices  # (B, K)
        self.grid = grid
        self._hidden: dict[Grid, Tensor] = {}
        self._positions: dict[Grid, Tensor] = {}
        self.sizes: list[Grid] = []  # maps whose visible positions a module computes with

    @contextmanager
    def only(self, indices: Tensor, grid: Grid) -> Iterator[None]:
        """Context of a pass that sees the patches ``indices`` (B, K) of ``grid``, K >= 1."""
        self._use(indices, grid)
        try:
            yield
        finally:
            self._use(None, (0, 0))

    def again(self) -> AbstractContextManager[None]:
        """Return a context in which the patches that are visible now are visible again.

        Activation checkpointing recomputes a part of a pass in it, after the pass has ended. The
        context does nothing if all patches are visible now.
        """
        return nullcontext() if self.indices is None else self.only(self.indices, self.grid)

    def hidden(self, size: Grid) -> Tensor:
        """Return bool (B, 1, H, W), True for hidden positions of a map of H x W."""
        if size not in self._hidden:
            assert self.indices is not None
            rows, columns = self._patch(size)
            hidden = self.indices.new_ones(len(self.indices), self.grid[0] * self.grid[1])
            patches = hidden.scatter(1, self.indices, 0).bool().unflatten(1, self.grid)[:, None]
            every = patches.repeat_interleave(rows, dim=2).repeat_interleave(columns, dim=3)
            self._hidden[size] = every
        return self._hidden[size]

    def gather(self, x: Tensor) -> Tensor:
        """Return the visible positions of a map (B, C, H, W): (B, C, S, 1)."""
        index = self._position(_size(x))[:, None].expand(-1, x.shape[1], -1)
        return x.flatten(2).gather(2, index)[..., None]

    def scatter(self, x: Tensor, size: Grid) -> Tensor:
        """Return a map (B, C, H, W) with ``x`` (B, C, S, 1) at visible positions, 0 elsewhere."""
        index = self._position(size)[:, None].expand(-1, x.shape[1], -1)
        flat = x.new_zeros(*x.shape[:2], size[0] * size[1]).scatter(2, index, x[..., 0])
        return flat.unflatten(2, size)

    def _position(self, size: Grid) -> Tensor:
        """Return the flat indices of the visible positions of a map of H x W, (B, S)."""
        if size not in self._positions:
            assert self.indices is not None
            rows, columns = self._patch(size)
            device = self.indices.device
            down, right = self.indices // self.grid[1] * rows, self.indices % self.grid[1] * columns
            y = down[..., None, None] + torch.arange(rows, device=device)[:, None]
            x = right[..., None, None] + torch.arange(columns, device=device)
            self._positions[size] = (y * size[1] + x).flatten(1)
        return self._positions[size]

    def _patch(self, size: Grid) -> Grid:
        """Return rows and columns of positions in a patch, for a map of H x W."""
        rows, columns = size[0] // self.grid[0], size[1] // self.grid[1]
        if (rows * self.grid[0], columns * self.grid[1]) != size or not rows * columns:
            raise UserError(
                f"backbone: a feature map of {size[0]}x{size[1]} cannot be divided into the "
                f"{self.grid[0]}x{self.grid[1]} patches of an image, of which some are hidden"
            )
        return rows, columns


VISIBLE = VisiblePatches()


def check_layers(network: nn.Module) -> None:
    """Raise UserError if a layer of a network may mix visible and hidden positions.

    A network with its own ``offers`` is not checked.
    """
    if hasattr(network, "offers"):
        return
    for name, part in network.named_modules():
        kind = type(part).__name__
        is_inner = ".parametrizations" in name  # of a layer with adapters
        if not (is_inner or kind in _POSITIONWISE or _is_layer(part)):
            subject = f"its {name}" if name else "it"
            raise UserError(
                f"backbone: {subject} is a {kind}, which cannot leave out hidden patches; take a "
                "ResNet or ConvNeXt without attention and without smoothed strides"
            )


def see_visible_patches(network: nn.Module) -> None:
    """Make the layers of ``network`` ignore hidden patches in passes within ``VISIBLE.only``.

    Other passes do not change. Hooks are registered once; later calls have no effect.
    """
    if getattr(network, "_sees_visible_patches", False):
        return
    network._sees_visible_patches = True  # type: ignore[assignment]
    for part in network.modules():
        if _mixes(part):
            part.register_forward_pre_hook(_zero_hidden)
        elif isinstance(part, nn.AdaptiveAvgPool2d):
            part.register_forward_pre_hook(_pool_visible)
        elif _normalizes(part):
            part.register_forward_pre_hook(_gather_visible)
            part.register_forward_hook(_scatter_visible)


def _is_layer(part: nn.Module) -> bool:
    is_supported = isinstance(part, nn.Linear | nn.Conv2d | nn.AdaptiveAvgPool2d)
    return is_supported or _mixes(part) or _normalizes(part)


def _mixes(part: nn.Module) -> bool:
    """Return True if an output of a layer depends on several positions of its input."""
    if isinstance(part, nn.Conv2d):
        return part.kernel_size != (1, 1)
    return isinstance(part, nn.MaxPool2d | nn.AvgPool2d)


def _normalizes(part: nn.Module) -> bool:
    """Return True if a layer has statistics over all positions."""
    is_response_norm = type(part).__name__ == "GlobalResponseNorm"  # timm's
    return is_response_norm or isinstance(part, _BatchNorm | nn.GroupNorm)


def _zero_hidden(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    if VISIBLE.indices is None:
        return None
    x, *others = inputs
    return (x.masked_fill(VISIBLE.hidden(_size(x)), 0.0), *others)


def _pool_visible(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return None if VISIBLE.indices is None else (VISIBLE.gather(inputs[0]),)


def _gather_visible(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    if VISIBLE.indices is None:
        return None
    x, *others = inputs
    x = x.permute(0, 3, 1, 2) if _is_channels_last(module) else x
    VISIBLE.sizes.append(_size(x))
    visible = VISIBLE.gather(x)
    return (visible.permute(0, 2, 3, 1) if _is_channels_last(module) else visible, *others)


def _scatter_visible(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    if VISIBLE.indices is None:
        return None
    x = output.permute(0, 3, 1, 2) if _is_channels_last(module) else output
    x = VISIBLE.scatter(x, VISIBLE.sizes.pop())
    return x.permute(0, 2, 3, 1) if _is_channels_last(module) else x


def _is_channels_last(module: Any) -> bool:
    """Return True for a global response normalization of (B, H, W, C)."""
    return getattr(module, "channel_dim", 1) == -1


def _size(x: Tensor) -> Grid:
    return (x.shape[2], x.shape[3])
