"""Activation checkpointing: recompute the activations of a block in the backward pass.

The non-reentrant variant is used, which works with DDP, FSDP and several passes through one block
(multi-crop). A block keeps about one tensor of activations, at the cost of a second forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from selftask.models.features.sparse import VISIBLE
from selftask.random.keyed import LAYER_DRAWS


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make blocks recompute their activations. Only their class changes, not names or state."""
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _checkpointed(kind)


@functools.cache
def _checkpointed(kind: Any) -> Any:
    """Return a subclass of ``kind`` whose forward pass is checkpointed if gradients are enabled."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._is_recomputed:
            return kind.forward(self, *args, **kwargs)
        more: dict[str, Any] = {}
        inner, meter = partial(kind.forward, self), cast(Any, self._meter)
        # A compiled graph contains the draws and visible patches of its pass.
        has_state = not torch.compiler.is_compiling() and (
            LAYER_DRAWS.words is not None or VISIBLE.indices is not None
        )
        if _statistics(self) or meter is not None or has_state:
            more["context_fn"] = partial(_contexts, self)
        if meter is not None:
            meter.measure(self, partial(inner, *args, **kwargs), (*args, *kwargs.values()))
        return checkpoint(inner, *args, use_reentrant=False, **more, **kwargs)

    return type(
        kind.__name__, (kind,), {"forward": forward, "_is_recomputed": True, "_meter": None}
    )


def meter_with(block: nn.Module, meter: Any) -> None:
    """Set the meter that measures each forward pass of a checkpointed block; None removes it."""
    block._meter = meter


def recompute(block: nn.Module, wanted: bool) -> None:
    """Enable or disable recomputation of a block that ``checkpoint_blocks`` has prepared."""
    cast(Any, block)._is_recomputed = wanted


def _contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of the first forward pass and of the recomputation."""
    return nullcontext(), _recomputing(block, LAYER_DRAWS.words, VISIBLE.again())


@contextmanager
def _recomputing(
    block: nn.Module, words: Tensor | None, visible: AbstractContextManager
) -> Iterator[None]:
    meter: Any = block._meter
    if meter is not None:
        meter.close()
    with keeping_statistics(block), LAYER_DRAWS.again(words), visible:
        yield


def _statistics(block: nn.Module) -> list[nn.Module]:
    """Return the modules whose running statistics a forward pass updates."""
    return [
        module
        for module in block.modules()
        if module.training and getattr(module, "running_mean", None) is not None
    ]


@contextmanager
def keeping_statistics(block: nn.Module) -> Iterator[None]:
    """Context that restores running statistics on exit; a recomputation must not update them."""
    moved = _statistics(block)
    kept = [dict(module._buffers) for module in moved]
    for module, buffers in zip(moved, kept, strict=True):
        module._buffers.update({key: b if b is None else b.clone() for key, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in zip(moved, kept, strict=True):
            module._buffers.update(buffers)
