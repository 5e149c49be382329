"""Network, loss and backward pass as one compiled graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from selftask.batch import Batch, Loss
from selftask.config.schema import CompileConfig
from selftask.parallel.compiled import compile_function
from selftask.registry import register_train_step
from selftask.task import Task
from selftask.task.update import record_loss, update_weights


@register_train_step("compiled")
@dataclass(frozen=True)
class Compiled:
    """Standard step with forward, loss and backward compiled together by torch.compile.

    It uses ``train.compile_options``. If the method or a hook computes something between network
    and loss (``on_forward``, such as a teacher's output), network and loss are separate graphs, and
    so is the teacher. The optimizer is not compiled, since its fused kernel is as fast. It is meant
    for accelerators; on a CPU it is not faster than ``standard``. With several ranks, all gradients
    become available at the end of the backward pass, so their reduction cannot overlap with it.
    Compiled code sums in a different order than eager code, so results equal those of ``standard``
    only up to rounding.
    """

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        train, parallel = config["train"], config["parallel"]
        if train["compile"]:
            yield "train.compile: train.step=compiled compiles the network already; set it to false"
        if parallel["reduce"] != "manual":
            yield "parallel.reduce: train.step=compiled needs manual, whose buckets are outside"
        if parallel["activation_checkpointing"] != "none":
            yield "parallel.activation_checkpointing: train.step=compiled needs none"

    def __call__(self, task: Task) -> None:
        """Run one step; a test phase stops after the loss."""
        batch = task.last_batch = next(task.batches)
        options = task.config.train.compile_options

        with task.autocast():
            if task.calls["on_forward"]:
                batch.output = _compiled(_network, options)(task.model, batch)
                task.run_hooks("on_forward")
                batch.local_loss = _compiled(_loss, options)(task.loss, batch.output, batch)
            else:
                together = _compiled(_network_and_loss, options)
                batch.output, batch.local_loss = together(task, batch)

        record_loss(task, batch)
        update_weights(task, batch.local_loss)  # its backward pass is compiled, too


@functools.cache
def _compiled(function: Callable[..., Any], options: CompileConfig) -> Any:
    return compile_function(function, options)


def _network(network: Any, batch: Batch) -> Any:
    return network(batch.input)


def _loss(loss: Any, output: Any, batch: Batch) -> Loss:
    return loss(output, batch)


def _network_and_loss(task: Task, batch: Batch) -> tuple[Any, Loss]:
    output = task.model(batch.input)
    return output, task.loss(output, batch)
