"""Metrics of a run, as rows of ``metrics.jsonl`` and lines of the log."""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selftask.data.loading.data_stall import WaitWatch, wait_advice
from selftask.distributed.collectives import rank
from selftask.hooks.base import Hook, Task
from selftask.hooks.failures.non_finite import REMEDY, NonFiniteLoss, check_weights
from selftask.hooks.watching.loader_check import advice
from selftask.logs import get_logger
from selftask.logs.pace import Pace, over_ranks, settings_of_groups, take_memory_mb
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("metrics")
@dataclass(eq=False, kw_only=True)
class Metrics(Hook):
    """Writes a row every ``train.log_every`` steps and after the last; detects a non-finite loss.

    ``loss`` is the mean over the steps since the previous row, ``loss_median`` their median. Times,
    ``data_wait`` and ``memory_mb`` are maxima over ranks. ``step_s`` is the mean time of a step in
    seconds, including evaluations and checkpoints, which hardly affect the median,
    ``step_s_median``. ``data_wait`` is the share of this time spent waiting for data; the hook
    warns once, with advice, if it stays large.

    Losses stay on the device between rows, so that the host waits for the device only when a row is
    written. A loss that is not finite is therefore detected at the next row or before the next
    save. The error, which ``train.on_nan`` may handle, names the first such step.
    """

    priority: ClassVar[int] = 70

    def on_start(self, task: Task) -> None:
        self.window = [loss.to(task.device) for loss in getattr(self, "restored", ())]
        self.steps = list(getattr(self, "restored_steps", ()))  # step of each loss in the window
        self.terms: dict[str, Tensor] = {}  # of the newest loss in the window
        self.samples = 0  # since the last row, for images_per_s
        self.pace = Pace()
        self.wait_watch = WaitWatch()
        self.test_phase = ExitStack()  # the values for the next row of training are set aside

    def on_loss_and_meter(self, task: Task) -> None:
        loss = task.last_batch.loss.clone()  # F.mse_loss's scalar keeps the memory of all squares
        task.losses.append(loss)
        if task.train:
            self.window.append(loss)
            self.terms = task.last_batch.terms
            self.steps.append(task.steps_done + 1)
            self.samples += task.length.batch_size

    def on_step(self, task: Task) -> None:
        if not task.train:
            return
        self.pace.step_ends()
        due = task.steps_done % task.config.train.log_every == 0
        if (due or task.clock.done) and self.window:  # empty if all steps were skipped
            self._write(task)

    def on_phase_start(self, task: Task) -> None:
        if not task.train:
            self.test_phase.enter_context(task.separate_scalars())

    def on_phase_end(self, task: Task) -> None:
        if task.train:
            return
        if task.scalars:
            task.write_row(task.pop_scalars())
        self.test_phase.close()

    def on_exception(self, task: Task) -> None:
        if hasattr(self, "test_phase"):
            self.test_phase.close()

    def before_save(self, task: Task) -> None:
        """Raise NonFiniteLoss if a loss or a weight is not finite, so that it is not saved."""
        self._losses(task)
        check_weights(task)

    def _write(self, task: Task) -> None:
        losses = self._losses(task)
        timed = len(self.pace.ends)
        measured = {**self.pace.take(task.data_module.data_wait_s), **take_memory_mb(task.device)}
        terms, slowest = over_ranks(self.terms, measured, task.device)
        remaining = task.length.total_steps - task.steps_done
        row = {
            "loss": math.fsum(losses) / len(losses),
            "lr": task.optimizer.param_groups[0]["lr"],
            "images_per_s": self.samples / (timed * slowest["step_s"]),
            "data_wait": slowest.pop("data_wait"),
            "loss_median": statistics.median(losses),
            **slowest,
            "eta_s": self.pace.mean_s * remaining,
            "eta_recent_s": slowest["step_s"] * remaining,
            **settings_of_groups(task.optimizer.param_groups),
            **{f"lr/{name}": one.param_groups[0]["lr"] for name, one in task.optimizers.items()},
            **terms,
            **task.pop_scalars(),
        }
        self.window.clear()
        self.steps.clear()
        self.samples = 0
        task.write_row(row)
        waiting = self.wait_watch.add_row(timed, row["data_wait"])
        if waiting is not None:
            log.warning("step %d: %s", task.steps_done, wait_advice(waiting, advice(task)))

    def _losses(self, task: Task) -> list[float]:
        """Return the losses since the last row; raise NonFiniteLoss if one is not finite."""
        losses: list[float] = torch.stack(self.window).tolist() if self.window else []
        for step, loss in zip(self.steps, losses, strict=True):
            if not math.isfinite(loss):
                raise NonFiniteLoss(_explain(task, loss, step), step=step)
        return losses

    def state_dict(self) -> dict[str, Any]:
        window: list[Tensor] = getattr(self, "window", [])
        losses = torch.stack(window).cpu() if window else torch.empty(0)
        return {"window": losses, "steps": list(getattr(self, "steps", ()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored, self.restored_steps = list(state["window"].unbind()), state["steps"]


def _explain(task: Task, loss: float, step: int) -> str:
    terms = {name: float(value) for name, value in task.last_batch.terms.items()}
    bad = [name for name, value in terms.items() if not math.isfinite(value)]
    which = f"; terms: {', '.join(bad)}" if bad else ""
    lr = task.optimizer.param_groups[0]["lr"]
    return f"the loss is {loss} at step {step} on rank {rank()}{which}; lr was {lr:.3g}. {REMEDY}"
