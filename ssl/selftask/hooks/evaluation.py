"""Evaluations of the frozen backbone during the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from selftask.config.checks.requirements import label_free, takes_backbone
from selftask.config.values.duration import interval_at, intervals_in, steps_in
from selftask.hooks.base import Hook, Task
from selftask.logs import get_logger
from selftask.logs.rows import is_measured
from selftask.logs.stages import stage
from selftask.random.process_state import restored_rng
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("evaluation")
@dataclass(eq=False, kw_only=True)
class EvaluateBackbone(Hook):
    """Runs ``eval.evaluations`` at step 0, every ``eval.every`` and at the end.

    Those before ``eval.start`` are skipped, except at the end. Without labels, only evaluations
    that need none run. Metrics and ``eval_s``, the run time in seconds, are written to
    ``metrics.jsonl``. Metrics of averaged weights have a prefix, as in ``ema_knn_top1``. The
    function ``task.evaluate``, set by the launcher, computes them; without it nothing is evaluated.
    The state of the run does not change.
    """

    priority: ClassVar[int] = 65

    def on_start(self, task: Task) -> None:
        self.intervals = intervals_in(task.config.eval.every, task.length)
        self.ran_at = -1  # step of the last evaluation
        self.warned = False
        self.first = steps_in(task.config.eval.start, task.length)
        self._warn_of_missing_labels(task)
        if task.steps_done == self.first == 0:
            self._run(task)

    def _warn_of_missing_labels(self, task: Task) -> None:
        """Warn of evaluations without labels, and of meters without a test set."""
        feed, components = task.data_module, task.config.eval.evaluations
        names = ", ".join(key for key in components if key not in label_free(components))
        if feed.val_source is not None and names and not feed.labeled_sets:
            which = "data" if feed.has_test else "data.val"
            log.warning("no %s while training: the images of %s have no labels", names, which)
        if task.meters and not feed.has_test:
            meters = ", ".join(task.config.meters)
            why = "data.val has no labeled images" if feed.val_sources else "there is no data.val"
            log.warning("meters (%s) measure nothing: %s", meters, why)

    def on_step(self, task: Task) -> None:
        if not task.train or task.clock.done or task.steps_done < self.first:
            return
        every = interval_at(task.steps_done, self.intervals)
        if every and task.steps_done % every == 0:
            self._run(task)

    def on_end(self, task: Task) -> None:
        if not (task.clock.stopped and self.ran_at == task.steps_done):
            self._run(task)

    def _run(self, task: Task) -> None:
        self.ran_at = task.steps_done
        if task.evaluate is None:
            return
        started = time.perf_counter()
        with task.separate_scalars():
            if _has_evaluations(task):
                task.run_hooks("before_evaluation")
            of_hooks = task.pop_scalars()
        # Evaluations of users draw from these generators, and importing scikit-learn does.
        with stage("evaluate", at_once=True), restored_rng():
            row = {**of_hooks, **self._evaluate(task, task.evaluate)}
        if row:
            row["eval_s"] = time.perf_counter() - started
            task.write_row(row)
            text = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
            task.event("evaluation", text, **row)
            self._compare_to_warning_time(row["eval_s"], task.config.launch.slurm)
            task.run_hooks("after_evaluation")

    def _compare_to_warning_time(self, seconds: float, slurm: dict[str, Any]) -> None:
        """Warn once if an evaluation takes longer than SLURM waits between signal and kill."""
        warning_s = slurm.get("signal_delay_s", 120)
        if seconds > warning_s and "SLURM_JOB_ID" in os.environ and not self.warned:
            self.warned = True
            log.warning(
                "the evaluation took %.0f s, and SLURM ends the job %s s after its signal: a "
                "signal during an evaluation would lose the steps since the last checkpoint; raise "
                "launch.slurm.signal_delay_s, or eval.every",
                *(seconds, warning_s),
            )

    def _evaluate(
        self, task: Task, evaluate: Callable[[Task], dict[str, float]]
    ) -> dict[str, float]:
        """Return the metrics of the weights and of their averages."""
        row = evaluate(task)
        for name, average in task.averages.items() if row else ():
            with average.in_place(task):
                metrics = evaluate(task)
            row |= {
                f"{name}_{key}": value for key, value in metrics.items() if not is_measured(key)
            }
        return row


def _has_evaluations(task: Task) -> bool:
    data, components = task.data_module, task.config.eval.evaluations
    probes = any(getattr(hook, "evaluates", False) for hook in task.hooks)
    with_labels = (components or probes) and data.labeled_sets
    free = label_free(components) and data.val_sources
    return bool(takes_backbone(components) or with_labels or free)
