"""Lower the learning rate when a metric stops improving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from selftask.config.fields import setting
from selftask.hooks.base import Hook, Task
from selftask.hooks.watching.watched_metric import WatchedMetric
from selftask.logs import get_logger
from selftask.logs.direction import Mode, direction
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("plateau")
@dataclass(eq=False, kw_only=True)
class Plateau(Hook):
    """Multiplies the lr by ``factor`` when a metric has stopped improving (ReduceLROnPlateau).

    Unlike schedules, it depends on results and has state, which is saved in checkpoints. Its factor
    multiplies the learning rate of ``optimizer.schedule``; with ``constant``, only this hook lowers
    the learning rate. Every row after step 0 that has the metric counts.
    """

    priority: ClassVar[int] = 75
    metric: str
    """Any column of metrics.jsonl, such as ``knn_top1``."""
    mode: Mode = "auto"
    """Which values are good. max: large ones; min: small ones; auto: by the name of the metric,
    small ones for losses, errors and distances.
    """
    factor: float = setting(0.1, above=0, below=1)
    """Factor of the learning rate at each reduction."""
    patience: int = setting(3, min=0)
    """Number of consecutive rows without improvement that are tolerated; the next one reduces the
    learning rate.
    """
    threshold: float = setting(1e-4, min=0)
    """Smallest relative improvement that counts."""
    cooldown: int = setting(0, min=0)
    """Number of rows after each reduction in which missing improvement does not count."""
    min_factor: float = setting(0.0, min=0, max=1)
    """Lower limit of the product of all reductions."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        optimizer = config["optimizer"]
        sections = {key: optimizer[key] for key in ("lr", "schedule")}
        for index, rule in enumerate(optimizer["groups"]):
            sections[f"groups.{index}.schedule"] = rule["schedule"]
        for key, section in sections.items():
            moves = section.get("update", "step") if isinstance(section, dict) else "step"
            if moves == "epoch":
                yield f"plateau: needs steps, and optimizer.{key}.update is 'epoch'"
        if optimizer["name"].startswith("classy:"):
            yield f"plateau: does not go with {optimizer['name']}; take one of ours"

    def on_start(self, task: Task) -> None:
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.scheduler = ReduceLROnPlateau(
            self.optimizer,
            mode=direction("hooks.plateau.mode", self.mode, self.metric),
            factor=self.factor,
            patience=self.patience,
            threshold=self.threshold,
            cooldown=self.cooldown,
            min_lr=self.min_factor,
            eps=0.0,
        )
        self.watched = WatchedMetric("hooks.plateau.metric", self.metric)
        if self.loaded:
            self.optimizer.param_groups[0]["lr"] = self.loaded["scale"]
            self.scheduler.load_state_dict(self.loaded["scheduler"])
        task.optimizer.multiply_lr(lambda: self.scale)

    @property
    def scale(self) -> float:
        """Product of all reductions so far."""
        return float(self.optimizer.param_groups[0]["lr"])

    def on_row(self, task: Task) -> None:
        if not task.steps_done:  # an evaluation before training, and before on_start
            return
        value, before = self.watched.value(task), self.scale
        if value is None:
            return
        self.scheduler.step(value)
        if self.scale < before:
            log.info(
                "step %d: %s %.4g has not improved on %.4g: learning rate times %.3g from here",
                task.steps_done,
                self.metric,
                value,
                self.scheduler.best,
                self.scale,
            )

    def on_phase_end(self, task: Task) -> None:
        self.watched.warn_if_missing("no row has it so far, the learning rate stays")

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "scheduler"):
            return self.loaded
        state = self.scheduler.state_dict()
        kept = {key: state[key] for key in ("best", "num_bad_epochs", "cooldown_counter")}
        return {"scale": self.scale, "scheduler": kept}
