"""Memory, FLOPs and traffic of one training step of one rank, simulated on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from selftask.config.schema import Config
from selftask.distributed.simulated import SIMULATED
from selftask.parallel.blocks import find_blocks
from selftask.plan.fake_data import FakeData
from selftask.plan.fake_task import FakeTask
from selftask.plan.step_tracker import StepTracker

WEIGHTS, TEACHER, STATE = "weights", "teacher", "optimizer"
GRADIENTS, MEMORY, INPUTS = "gradients", "buffers", "inputs"


@dataclass(frozen=True)
class StepCost:
    """Cost of the simulated step on one rank, which accumulates at most two batches.

    Args:
        at_peak: Bytes at the peak of memory, by kind.
        activations: Largest size of activations during the step, in bytes.
        flops: FLOPs of one sample with all its views, by phase: ``forward``, ``backward``, and
            ``teacher`` for passes without gradients. A multiply-add counts as two.
        sent: Bytes that loss and BatchNorm send in a step, by collective.
        passes: Number of forward passes through the blocks of the network in a step.
        teacher_passes: Number of forward passes through the blocks of a teacher in a step; the
            largest of all teachers.
    """

    at_peak: dict[str, int]
    activations: int
    flops: dict[str, float]
    sent: dict[str, int]
    passes: int
    teacher_passes: int


@contextmanager
def fake_task(config: Config, data: FakeData) -> Iterator[FakeTask]:
    """Context with a task on fake tensors, among the simulated ranks of ``config.launch``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with SIMULATED.of(config.launch.world_size):
        yield FakeTask(config, data, mode)


def simulate(task: FakeTask, images: int) -> StepCost:
    """Simulate a step in the middle of training, when gradients and optimizer state exist.

    Args:
        task: A task created by ``fake_task``.
        images: Number of samples in one batch of this rank.
    """
    _begin(task)
    tracker = StepTracker()
    handles = _watch(task, tracker)
    passes = [_Passes(network) for network in (task.base_model, *task.teachers)]
    first, *others = task.read(images)
    tracker.register(INPUTS, tree_leaves((first.views, dict(first.extras))))
    seen = images * (1 + len(others))
    del first, others
    SIMULATED.bytes_of.clear()
    with task.mode, tracker:
        tracker.reset_peak()
        task.train_step_function(task)
    for handle in (*handles, *(counter.handle for counter in passes)):
        handle.remove()
    return StepCost(
        at_peak=tracker.at_peak,
        activations=tracker.most_activations,
        flops={phase: count / seen for phase, count in tracker.flops.items()},
        sent=dict(SIMULATED.bytes_of),
        passes=passes[0].number,
        teacher_passes=max((counter.number for counter in passes[1:]), default=0),
    )


def _begin(task: FakeTask) -> None:
    """Create gradients and optimizer state, as a previous step would leave them."""
    with task.mode:
        for parameter in task.trained_parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if not task.optimizer_state:
            for optimizer in task.all_optimizers:
                optimizer.step(where=task.where)


def _watch(task: FakeTask, tracker: StepTracker) -> list[RemovableHandle]:
    """Register existing tensors with the tracker, and hooks that mark new gradients.

    With several ranks, gradients are views of buckets, both for manual reduction and DDP. They are
    kept, and the gradients that the backward pass creates are freed immediately. A single rank
    frees its gradients in each step.

    Returns:
        Handles of the hooks.
    """
    several = task.world.size > 1
    trained = task.trained_parameters
    kept = {p: p.grad for p in trained}

    def arrived(parameter: Tensor) -> None:
        if several:
            parameter.grad = kept[parameter]  # type: ignore[index]
        elif parameter.grad is not None:
            tracker.relabel(parameter.grad, GRADIENTS)

    weights = [*task.base_model.parameters(), *task.loss.parameters()]
    tracker.register(GRADIENTS, [gradient for gradient in kept.values() if gradient is not None])
    for teacher in task.teachers:
        tracker.register(TEACHER, [*teacher.parameters(), *teacher.buffers()])
    tracker.register(WEIGHTS, weights)
    tracker.watch_casts(weights)
    tracker.register(MEMORY, [*task.base_model.buffers(), *task.loss.buffers()])
    tracker.register(STATE, task.optimizer_state)
    if not several:
        kept.clear()
    return [parameter.register_post_accumulate_grad_hook(arrived) for parameter in trained]


class _Passes:
    """Counter of forward passes through a network's first block; recomputation does not count."""

    def __init__(self, network: nn.Module) -> None:
        self.number = 0
        first = (find_blocks(network) or [network])[0]
        self.handle = first.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.number += 1
