"""Meters of the training images."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

from selftask.hooks.base import Hook, Task
from selftask.hooks.mixup import unmixed
from selftask.meters.accuracy import Accuracy
from selftask.registry import register_hook


@register_hook("train_meters")
@dataclass(eq=False, kw_only=True)
class TrainMeters(Hook):
    """Logs the meters of the training images since the last row, such as ``train_accuracy_top_1``.

    The images are augmented and the network is in train mode, so that the values are usually below
    those of the same images in a test phase. For labels mixed by ``hooks.mixup``, the label with
    the largest share is used.
    """

    priority: ClassVar[int] = 60  # before the row is written

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not config["meters"]:
            yield "hooks.train_meters: there are no meters; add meters.accuracy={topk: [1, 5]}"

    def on_start(self, task: Task) -> None:
        self.meters = dict(zip(task.config.meters, map(deepcopy, task.meters), strict=True))
        for key, meter in self.meters.items():
            meter.reset()
            if isinstance(meter, Accuracy):
                meter.classes = None  # the classes of data.val do not apply
            if key in self.loaded:
                meter.set_classy_state(self.loaded[key])

    def on_loss_and_meter(self, task: Task) -> None:
        if not task.train:
            return
        for meter in self.meters.values():
            scores, classes = task.loss.for_meter(meter, task.last_batch)
            meter.update(scores, unmixed(task, classes))

    def on_update(self, task: Task) -> None:
        if not task.should_log:
            return
        for key, meter in self.meters.items():
            meter.sync_state()
            for name, value in meter.value.items():
                task.log(f"train_{key}_{name}", value)
            meter.reset()

    def before_save(self, task: Task) -> None:
        for meter in self.meters.values():
            meter.sync_state()  # the checkpoint contains the state of the first rank

    def state_dict(self) -> dict[str, Any]:
        meters = getattr(self, "meters", {})
        return {key: meter.get_classy_state() for key, meter in meters.items()}
