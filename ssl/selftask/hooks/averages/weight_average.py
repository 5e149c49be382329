"""Averages of the trained weights, for any method: base class of the hooks ``ema`` and ``swa``.

An average is stored as separate tensors. Evaluations, test phases and exports swap them into the
network, and restore the network's weights afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from selftask.config.values.duration import steps_in
from selftask.distributed.collectives import broadcast_tensors
from selftask.errors import UserError
from selftask.hooks.base import Hook, Task


@dataclass(eq=False, kw_only=True)
class WeightAverage(Hook):
    """Base class of hooks that average the weights of the network and evaluate the average.

    Metrics of the average have the hook's key in the config as prefix, such as ``ema_knn_top1``. If
    the method exports a teacher, the average of the student is evaluated instead of the teacher.
    """

    priority: ClassVar[int] = 40  # before evaluation
    name: ClassVar[str]  # name under which the hook is registered

    buffers: Literal["copy", "average"] = "copy"
    """BatchNorm's statistics in the average. copy: the current ones of the network
    (``hooks.precise_bn`` recomputes them). average: averaged as weights are.
    """
    device: Literal["same", "cpu"] = "same"
    """Where the average is stored. same: on the device of the network; cpu: in the machine's
    memory, which saves device memory, but updates take longer.
    """
    export: bool = False
    """Whether the run exports the average instead of the weights."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.device == "cpu" and config["parallel"]["reduce"] == "fsdp":
            yield "device: 'cpu' does not go with parallel.reduce=fsdp, which shards averages"
        if config["optimizer"]["name"].startswith("schedule_free"):
            yield f"hooks.{self.name}: optimizer.name averages the weights itself; take one out"
        exported = [
            key
            for key, other in config["hooks"].items()
            if other and other.get("name", key) in ("ema", "swa") and other.get("export")
        ]
        if self.export and len(exported) > 1 and exported[0] == self.name:
            yield f"export: only one average can be exported, and {' and '.join(exported)} both ask"

    def on_start(self, task: Task) -> None:
        (self.key,) = (key for key, hook in task.named_hooks.items() if hook is self)
        self.updates: int = self.loaded.get("updates", 0)
        self.weights: dict[str, Tensor] = {}
        if weights := self.loaded.get("weights"):
            self._begin(task, task.reduction.shard_state(task.base_model, weights))

    def step_of(self, start: int | str, task: Task) -> int:
        """Return the step of ``start``; raise UserError if the run ends before it."""
        step, last = steps_in(start, task.length), task.length.total_steps
        if step > last:
            raise UserError(
                f"hooks.{self.key}.start={start}: is step {step}, after the last one, {last}"
            )
        return step

    def _begin(self, task: Task, values: dict[str, Tensor] | None = None) -> None:
        """Start the average from ``values``, and from the network for what they lack."""
        network = task.base_model
        parameters: dict[str, Tensor] = dict(network.named_parameters())
        saved = network.state_dict().keys()  # some buffers are not saved
        buffers = network.named_buffers() if self.buffers == "average" else ()
        averaged = {name: b for name, b in buffers if name in saved and b.is_floating_point()}
        current = {**parameters, **averaged}
        start = {**current, **(values or {})}  # it may have been saved with another ``buffers``
        self.weights = {
            name: start[name].detach().to("cpu" if self.device == "cpu" else now.device, copy=True)
            for name, now in current.items()
        }
        self.averaged_buffers = list(averaged)
        self.pairs = [  # (average, network); parameters may be sharded, buffers are not
            ([self.weights[name] for name in part], list(part.values()))
            for part in (parameters, averaged)
            if part
        ]
        task.averages[self.key] = self

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Update once: average <- (1 - ``weight``) * average + ``weight`` * current weights."""
        for average, current in self.pairs:
            pairs = zip(average, current, strict=True)
            torch._foreach_lerp_(average, [value.to(mine.device) for mine, value in pairs], weight)
        self.updates += 1

    @contextmanager
    def in_place(self, task: Task) -> Iterator[None]:
        """Context in which network and exported backbone have the averaged weights.

        Every rank must enter it, since buffers are synchronized first.
        """
        task.sync_buffers()
        self._sync_buffers()
        network = task.base_model.state_dict()
        pairs = [(network[name], value) for name, value in self.weights.items()]
        exported = task.loss.export_backbone(task.base_model)
        if all(module is not exported for module in task.base_model.modules()):
            for name, current in exported.state_dict().items():
                inner = f"backbone.{name}"
                pairs.append((current, self.weights.get(inner, network[inner])))
        saved = [current.clone() for current, _ in pairs]
        with torch.no_grad():
            for current, value in pairs:
                current.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for (current, _), value in zip(pairs, saved, strict=True):
                    current.copy_(value)

    def on_phase_end(self, task: Task) -> None:
        """After a test phase, repeat it with the average, and log ``KEY_test_NAME``."""
        if not task.train and self.weights:
            with self.in_place(task):
                for name, value in task.score().items():
                    task.log(f"{self.key}_test_{name}", value)

    def _sync_buffers(self) -> None:
        """Copy averaged buffers of rank 0 to every rank, as for the network's buffers."""
        broadcast_tensors(self.weights[name] for name in getattr(self, "averaged_buffers", ()))

    def before_save(self, task: Task) -> None:
        self._sync_buffers()

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "weights"):
            return self.loaded
        return {"updates": self.updates, "weights": dict(self.weights)}
