"""Streams, events, memory and generators of any accelerator: CUDA, XPU, MPS, or a plugin's.

torch has a module for each type of device (``torch.cuda``, ``torch.xpu``, ``torch.mps``). Their
functions are the same, but some modules lack a few. On the CPU, functions without a result do
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_PINNED = ("cuda", "xpu")  # asynchronous copies from page-locked host memory
_CHANNELS_LAST = ("cuda",)  # the tensor cores' order of a convolution's operands
_WITHOUT_FLOAT64 = ("mps",)
_STATISTICS = {
    f"{kind}{suffix}": f"{kind}_bytes.all.{which}"
    for kind in ("allocated", "reserved")
    for which, suffix in (("current", ""), ("peak", "_peak"))
}
_COUNTERS = {"allocated": "current_allocated_memory", "reserved": "driver_allocated_memory"}


def available() -> torch.device | None:
    """Return the accelerator of this machine, or None.

    Where there is none, ``current_accelerator`` alone returns the type that torch was built for.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def names() -> list[str]:
    """Return the name of each accelerator that torch sees, such as ``NVIDIA H200``."""
    device = available()
    if device is None:
        return []
    name = getattr(_module(device), "get_device_name", lambda index: device.type)
    return [name(index) for index in range(torch.accelerator.device_count())]


def is_accelerator(device: torch.device) -> bool:
    """Return True for all devices but ``cpu`` and ``meta``."""
    return device.type not in ("cpu", "meta")


def pins_memory(device: torch.device) -> bool:
    """Return True if copies to the device are faster from page-locked host memory."""
    return device.type in _PINNED


def copy_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor on the device; the copy is asynchronous if the device allows it."""
    source = tensor.pin_memory() if pins_memory(device) else tensor
    return source.to(device, non_blocking=True)


def prefers_channels_last(device: torch.device) -> bool:
    """Return True if convolutions on the device are faster with ``torch.channels_last``."""
    return device.type in _CHANNELS_LAST


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64, on the CPU if its device has no float64 (MPS)."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def has_float64(device: torch.device) -> bool:
    """Return True if tensors on the device may be float64."""
    return device.type not in _WITHOUT_FLOAT64


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all launched operations."""
    if is_accelerator(device):
        _module(device).synchronize()


def side_stream(device: torch.device) -> Any:
    """Return a new stream of the device, or None if it has no streams."""
    has_streams = is_accelerator(device) and hasattr(_module(device), "Stream")
    return _module(device).Stream(device) if has_streams else None


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device that has streams (see ``side_stream``)."""
    return _module(device).current_stream(device)


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that launches operations on ``stream``; None means the current one."""
    if stream is None:
        return nullcontext()
    return _module(device).stream(stream)


def record_event(device: torch.device, *, timing: bool = False) -> Any:
    """Record an event on the current stream, and return it.

    Args:
        device: An accelerator.
        timing: Whether the event is needed for ``start.elapsed_time(end)``.
    """
    event = _module(device).Event(enable_timing=timing)
    event.record()
    return event


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device in bytes, or None if it is unknown."""
    if not is_accelerator(device) or not hasattr(_module(device), "mem_get_info"):
        return None
    return int(_module(device).mem_get_info(device)[0])


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return the memory of torch's allocator on the device, in bytes; empty on a CPU.

    ``allocated`` is the memory of tensors; ``reserved`` also includes fragments and the cache. Keys
    with ``_peak`` are maxima since ``reset_memory_peaks``. Numbers that the device does not provide
    are missing.
    """
    if not is_accelerator(device):
        return {}
    module = _module(device)
    if hasattr(module, "memory_stats"):
        stats = module.memory_stats(device)
        return {name: int(stats[key]) for name, key in _STATISTICS.items() if key in stats}
    counted = {n: getattr(module, count, None) for n, count in _COUNTERS.items()}  # for torch.mps
    return {name: int(count()) for name, count in counted.items() if count is not None}


def reset_memory_peaks(device: torch.device) -> None:
    """Reset the peaks of ``memory_bytes`` to the current values."""
    if is_accelerator(device) and hasattr(_module(device), "reset_peak_memory_stats"):
        _module(device).reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Release cached memory to the driver. The next allocations are slow."""
    if is_accelerator(device):
        _module(device).empty_cache()


def rng_state() -> dict[str, torch.Tensor]:
    """Return device type -> state of the current accelerator's generator; empty without one."""
    device = available()
    if device is None:
        return {}
    return {device.type: _module(device).get_rng_state()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a result of ``rng_state``; states of other device types are ignored."""
    device = available()
    if device is not None and device.type in state:
        _module(device).set_rng_state(state[device.type])


@contextmanager
def forked_rng() -> Iterator[None]:
    """Context that restores torch's generators, on the CPU and the device, on exit."""
    before = rng_state()
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            set_rng_state(before)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
