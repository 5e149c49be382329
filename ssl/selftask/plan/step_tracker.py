"""Track memory and FLOPs of a step, operation by operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

ACTIVATIONS, GRADIENTS, CASTS = "activations", "gradients", "low-precision weights"
FORWARD, BACKWARD, TEACHER = "forward", "backward", "teacher"
_CAST = torch.ops.aten._to_copy.default


class StepTracker(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live storages by kind, and FLOPs by phase.

    ``register`` counts storages that already exist. A new storage counts as activations, unless it
    is a low-precision copy of a weight. ``relabel`` changes its kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.most_activations = 0  # largest size so far, in bytes
        self.flops: Counter[str] = Counter()
        self._storages: dict[int, list[Any]] = {}  # storage -> kind, bytes, weak reference
        self._weights: set[int] = set()

    def register(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of existing tensors as ``kind``."""
        for tensor in tensors:
            self._add(tensor, kind)

    def watch_casts(self, weights: Iterable[Tensor]) -> None:
        """Count copies of these weights in a different precision as ``CASTS``."""
        self._weights = {_key(weight) for weight in weights}

    def relabel(self, tensor: Tensor, kind: str) -> None:
        """Count the storage of a tensor as another kind from now on."""
        entry = self._storages.get(_key(tensor))
        if entry is not None and entry[0] != kind:
            self.live[entry[0]] -= entry[1]
            self.live[kind] += entry[1]
            entry[0] = kind

    def reset_peak(self) -> None:
        """Set the peak to the current memory; set the largest activations and the FLOPs to 0."""
        self.peak, self.at_peak, self.most_activations = self.total, dict(self.live), 0
        self.flops.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = _phase()
        result = func(*args, **kwargs or {})
        packet = func._overloadpacket
        if packet in _FLOPS:
            self.flops[phase] += _FLOPS[packet](*args, **kwargs or {}, out_val=result)
        kind = ACTIVATIONS
        if func is _CAST and _key(args[0]) in self._weights:
            kind = CASTS
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, kind)
        return result

    def _add(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        entry = [kind, size, weakref.ref(storage, partial(self._freed, key))]
        self._storages[key] = entry
        self.live[kind] += size
        self.total += size
        self.most_activations = max(self.most_activations, self.live[ACTIVATIONS])
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.live)

    def _freed(self, key: int, _: object) -> None:
        kind, size, _ = self._storages.pop(key)
        self.live[kind] -= size
        self.total -= size


def _convolution_backward(
    gradient: Tensor, images: Tensor, weight: Tensor, *options: Any, out_val: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass.

    Each requested gradient, of the input or of the weight, costs as much as the forward pass.
    torch's own formula counts the weight gradient of a grouped convolution as if it had one group.
    """
    transposed, asked = options[4], options[-1]
    x, w, out = list(images.shape), list(weight.shape), list(gradient.shape)
    return conv_flop_count(x, w, out, transposed) * (asked[0] + asked[1])


_ATEN = torch.ops.aten
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _ATEN.convolution_backward: _convolution_backward,
    # A CPU's fused attention, which torch counts since 2.15; its arguments begin as the GPU's do.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _phase() -> str:
    if torch._C._current_graph_task_id() != -1:
        return BACKWARD
    return FORWARD if torch.is_grad_enabled() else TEACHER
