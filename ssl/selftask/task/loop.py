"""The training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

from torch import Tensor

from selftask.batch import Batch
from selftask.data.loading.collate import Draw
from selftask.distributed.heartbeat import HEARTBEAT
from selftask.hooks.base import Hook, Task
from selftask.hooks.failures.non_finite import NonFiniteLoss
from selftask.methods.base import Method
from selftask.random.keyed import LAYER_DRAWS
from selftask.task.numerics import numerics
from selftask.task.repeat import recover


class Interrupted(Exception):
    """Raised after a requested stop; a checkpoint to resume from has been saved."""


def train_loop(task: Task) -> None:
    """Prepare a task and train it to the end; see ``iterate_steps``."""
    for _ in iterate_steps(task):
        pass


def iterate_steps(task: Task) -> Iterator[int]:
    """Prepare a task, then train it phase by phase; yield ``task.steps_done`` after each step.

    Every hook's ``on_exception`` runs before an exception leaves this function. The task is closed
    at the end, also if the iteration is abandoned.

    Raises:
        Interrupted: If a stop was requested before the end; a checkpoint has been saved.
        NonFiniteLoss: If the loss or a gradient is not finite, and ``recover`` raises the error.
    """
    with numerics(task.config.train, task.device):
        yield from _iterate(task)


def _iterate(task: Task) -> Iterator[int]:
    try:
        task.prepare()
        task.on_start()
        while not task.done_training():
            try:
                task.on_phase_start()
                yield from _run_phase(task)
                task.on_phase_end()
            except NonFiniteLoss as error:
                recover(task, error)
                continue
            _stop_if_asked(task)
        task.on_end()
    except GeneratorExit:
        raise
    except BaseException:
        task.on_exception()
        raise
    finally:
        task.close()


def close(task: Task) -> None:
    """Release the resources of a task, fully or partly prepared; see ``Task.close``."""
    with ExitStack() as ends:  # the last one first; each is called even if another one fails
        for hook in {**task.added_hooks, **getattr(task, "named_hooks", {})}.values():
            if isinstance(hook, Hook):
                ends.callback(hook.release)
        for opened in (getattr(task, "rows", None), getattr(task, "data_module", None)):
            if opened is not None:
                ends.callback(opened.close)
        task.batches = iter(())  # ends suspended generators, and with them a user's DataLoader
        LAYER_DRAWS.stop()
        HEARTBEAT.step = 0
        task.checkpoints.wait()


def _run_phase(task: Task) -> Iterator[int]:
    """Run the steps of a phase; in training, yield ``task.steps_done`` after each step."""
    while True:
        try:
            task.step()
        except StopIteration:
            return
        if task.interrupted_by is not None and not task.phase_finished:
            _stop_if_asked(task)
        if task.train:
            yield task.steps_done


def read_batches(task: Task, stop: int) -> Iterator[Batch]:
    """Yield the prepared batches of a phase; in training, from ``task.clock.batch`` up to ``stop``.

    ``stop`` itself is not included.
    """
    first, data = task.clock.batch, task.data_module
    data.draw = draws_of(task)
    batches: Iterator[Batch] = (
        islice(data.train_batches(first), stop - first) if task.train else data.test_batches()
    )
    prepare = task.loss.prepare_batch
    draws = task.train and LAYER_DRAWS.num_layers > 0
    for batch in batches:
        prepare(batch, task)
        if draws:
            LAYER_DRAWS.start(batch.key, task.device, batch.drawn.get("layers"))
        yield batch
    LAYER_DRAWS.stop()


def draws_of(task: Task) -> Draw | None:
    """Return the function that makes random draws for method and dropout layers, or None.

    The loader calls it in its worker processes, if there are any. They are forked when the first
    batch is read.
    """
    draw = task.loss.draw if type(task.loss).draw is not Method.draw else None
    if draw is None and not LAYER_DRAWS.num_layers:
        return None
    seed = task.config.train.seed

    def drawn(key: Tensor, sizes: list[tuple[int, int]]) -> dict[str, Any]:
        draws: dict[str, Any] = {}
        if LAYER_DRAWS.num_layers:
            draws["layers"] = LAYER_DRAWS.draw(key, len(sizes))
        if draw is not None:
            draws["method"] = draw(seed, key, sizes)
        return draws

    return drawn


def _stop_if_asked(task: Task) -> None:
    """Save and raise Interrupted if a stop was requested and training is not done."""
    if task.interrupted_by is not None and not task.done_training():
        task.save_checkpoint()
        raise Interrupted(task.interrupted_by)
