"""One training step of one rank on fake tensors: its memory, FLOPs and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

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
    """What a step takes on one rank.

    Args:
        images: Images of one batch on this rank.
        peak: Bytes at the peak.
        at_peak: Bytes at the peak, by kind.
        activations: Largest bytes of activations at any time of the step.
        flops: FLOPs of one image by phase (forward, backward, teacher); a multiply-add is two.
        sent: Bytes that loss and BatchNorm send in a step, by collective.
        passes: Forward passes through the blocks of the network in a step.
        teacher_passes: Forward passes through the blocks of each teacher in a step.
    """

    images: int
    peak: int
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
    """Run a step in the middle of a training, with gradients and optimizer state in place.

    Args:
        task: A task of ``fake_task``.
        images: Images of one batch on this rank.
    """
    tracker = StepTracker()
    with task.mode:
        _begin(task, tracker)
    passes = [_Passes(network) for network in (task.base_model, *task.teachers)]
    batches = task.read(images)
    tracker.own(INPUTS, [x for b in batches for x in tree_leaves((b.views, dict(b.extras)))])
    SIMULATED.bytes_of.clear()
    with task.mode, tracker:
        tracker.reset_peak()
        task.train_step_function(task)
    sent = dict(SIMULATED.bytes_of)
    read = images * len(batches)
    return StepCost(
        images=images,
        peak=tracker.peak,
        at_peak={kind: size for kind, size in tracker.at_peak.items() if size},
        activations=tracker.most_activations,
        flops={phase: count / read for phase, count in tracker.flops.items()},
        sent=sent,
        passes=passes[0].number,
        teacher_passes=max((one.number for one in passes[1:]), default=0),
    )


def _begin(task: FakeTask, tracker: StepTracker) -> None:
    """Make gradients and optimizer state, and tell the tracker what exists before the step."""
    trained = task.trained_parameters
    if task.world.size > 1:
        _flatten_gradients(trained, tracker)
    else:
        kept = [torch.empty_like(parameter) for parameter in trained]
        tracker.own(GRADIENTS, kept)
        for parameter, gradient in zip(trained, kept, strict=True):
            parameter.grad = gradient
            parameter.register_post_accumulate_grad_hook(
                lambda p: tracker.relabel(p.grad, GRADIENTS)
            )
        del kept, gradient  # they are freed as in a run
    task.optimizer.step(where=task.where)
    tracker.own(TEACHER, [tensor for network in task.teachers for tensor in _state(network)])
    tracker.own(WEIGHTS, [*task.base_model.parameters(), *task.loss.parameters()])
    tracker.watch_casts([*task.base_model.parameters(), *task.loss.parameters()])
    tracker.own(MEMORY, [*task.base_model.buffers(), *task.loss.buffers()])
    tracker.own(STATE, task.optimizer_state)


def _flatten_gradients(trained: list[nn.Parameter], tracker: StepTracker) -> None:
    """Make gradients views of one tensor when they arrive, as manual reduction and DDP do."""
    flat = torch.empty(sum(p.numel() for p in trained))
    places = dict(zip(trained, flat.split([p.numel() for p in trained]), strict=True))

    def arrived(parameter: Tensor) -> None:
        place = places[parameter].view(parameter.shape)  # type: ignore[index]
        parameter.grad = place.copy_(parameter.grad) if parameter.grad is not None else place

    for parameter in trained:
        parameter.grad = places[parameter].view(parameter.shape)
        parameter.register_post_accumulate_grad_hook(arrived)
    tracker.own(GRADIENTS, [flat])


class _Passes:
    """Counts the forward passes through the first block of a network; recomputing is none."""

    def __init__(self, network: nn.Module) -> None:
        self.number = 0
        for block in find_blocks(network)[:1] or [network]:
            block.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.number += 1


def _state(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
