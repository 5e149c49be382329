"""Memory use per layer, for the report of a run that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from selftask.config.values.budget import show_bytes
from selftask.distributed.out_of_memory import available_bytes
from selftask.hooks.base import Task
from selftask.hooks.gradients.trained import parameters_of_optimizers, state_of_optimizers
from selftask.models.summary import saved_bytes
from selftask.random.keyed import LAYER_DRAWS

LAYERS = 8  # maximum number of lines
USABLE = 0.95  # usable share of the memory; the rest is lost to fragmentation
_SAMPLES = 2  # in the measured pass; BatchNorm needs at least two
_HALF = 0.5  # of float32, for activations in low precision


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch could not allocate memory, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def memory_report(task: Task) -> list[str]:
    """Return lines on the memory use of a step, by layer, and on the batch size that would fit.

    Activations that the network keeps for its backward pass are counted from shapes on the meta
    device. Memory of the method and temporary memory of single operators are not included. The
    report is empty if the failure came before the first batch, or if the network cannot run on the
    meta device.
    """
    try:
        by_layer = _bytes_of_a_sample(task)
    except Exception:  # noqa: BLE001 - a user's module may raise anything on the meta device
        return []
    sample = by_layer.pop("", 0)
    if not sample:
        return []
    return [_total(task, sample), *_largest_layers(by_layer)]


def _total(task: Task, sample: int) -> str:
    """Describe the memory use of a step, given the bytes of a sample's activations."""
    fixed, size, world = fixed_bytes(task), task.length.batch_size, task.world.size
    text = (
        f"memory of a rank: {show_bytes(fixed)} of weights, gradients and optimizer state; "
        f"activations of about {show_bytes(sample)} a sample, {show_bytes(sample * size // world)} "
        f"with train.batch_size={size}"
    )
    budget = budget_bytes(task, fixed)
    fits = 0 if budget is None else nearest_size(int(USABLE * budget) // sample, world)
    return f"{text}; the nearest batch size that fits is about {fits}" if fits else text


def _largest_layers(by_layer: dict[str, int]) -> list[str]:
    """Return a line for each of the largest modules, without those that contain others."""
    outer = {name for name in by_layer for other in by_layer if other.startswith(f"{name}.")}
    inner = [(name, count) for name, count in by_layer.items() if name not in outer]
    largest = sorted(inner, key=lambda item: -item[1])[:LAYERS]
    return [f"  {name}: {show_bytes(count)} a sample" for name, count in largest]


def _bytes_of_a_sample(task: Task) -> dict[str, int]:
    """Return the bytes that each module keeps for the backward pass of one sample, by name.

    The empty name has the total.
    """
    LAYER_DRAWS.stop()
    per_rank = task.length.batch_size // task.world.size

    def on_meta(tensor: Tensor) -> Tensor:
        rows = _SAMPLES * max(len(tensor) // per_rank, 1)
        return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    inputs = tree_map_only(Tensor, on_meta, task.last_batch.input)
    counts = saved_bytes(task.base_model, (inputs,))
    share = (_HALF if task.low_precision else 1.0) / _SAMPLES
    return {name: int(count * share) for name, count in counts.items()}


def fixed_bytes(task: Task) -> int:
    """Return the bytes of this rank's weights (with teachers), gradients and optimizer state."""
    weights = {p for module in (*task.networks, task.loss) for p in module.parameters()}
    trained, state = parameters_of_optimizers(task), state_of_optimizers(task)
    return sum(map(_bytes, (weights, trained, state)))


def budget_bytes(task: Task, fixed: int) -> int | None:
    """Return the bytes available for this rank's activations, or None if unknown.

    Args:
        task: The task.
        fixed: Result of ``fixed_bytes``. It is subtracted from the memory of a GPU; on a CPU, the
            free memory is counted, which the weights have already reduced.
    """
    if task.device.type == "cuda":
        return int(torch.cuda.mem_get_info(task.device)[1]) - fixed
    available = available_bytes()  # the weights are already allocated
    return None if available is None else available // task.world.local_size


def nearest_size(fits: int, world: int) -> int:
    """Return the global batch size if ``fits`` samples fit on each of ``world`` ranks.

    The number of samples per rank is rounded down to a multiple of 8 if there are at least 8.
    """
    return world * (fits - fits % 8 if fits >= 8 else fits)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
