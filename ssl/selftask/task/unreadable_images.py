"""Report unreadable images at the end of a train phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from selftask.hooks.base import Hook, Task
from selftask.logs import get_logger
from selftask.logs.unreadable import UNREADABLE

log = get_logger(__name__)


class UnreadableImages(Hook):
    """Logs unreadable images, and writes the number of those for training to ``metrics.jsonl``.

    The number is the total of all ranks and epochs. It changes at the end of a train phase only, so
    that rows do not depend on where a run was stopped.

    Args:
        note: Called at the end of a train phase with a list of sentences, one for each data set
            that has unreadable images, unless the list is empty; None: they are only logged.
    """

    priority: ClassVar[int] = 66  # after `evaluation`, which reads images; before `metrics`

    def __init__(self, note: Callable[[list[str]], None] | None = None) -> None:
        self.note = note

    def on_step(self, task: Task) -> None:
        if not task.phase_finished:
            return
        task.data_module.share_unreadable()
        if number := task.data_module.num_unreadable:
            task.log(UNREADABLE, number)  # in the row of this step, or in the next one

    def on_phase_end(self, task: Task) -> None:
        sentences = task.data_module.unreadable() if task.train else []
        for sentence in sentences:
            log.info("%s", sentence)
        if sentences and self.note is not None:
            self.note(sentences)

    def on_end(self, task: Task) -> None:
        task.data_module.share_unreadable()  # after the last evaluation
