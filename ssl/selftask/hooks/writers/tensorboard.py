"""Writer of TensorBoard files in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from selftask.hooks.base import Task
from selftask.hooks.writers.base import Writer
from selftask.registry import register_hook


@register_hook("tensorboard")
@dataclass(eq=False, kw_only=True)
class TensorBoard(Writer):
    """Writes rows, images and histograms to ``OUT/tensorboard`` for ``tensorboard --logdir``.

    After a resume, TensorBoard ignores older points of the steps after the checkpoint.
    """

    package: ClassVar[str] = "tensorboard"
    takes_media: ClassVar[bool] = True
    in_background: ClassVar[bool] = True

    def open(self, task: Task) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = task.steps_done + 1 if task.resumed else 0
        self.file = SummaryWriter(str(task.out / "tensorboard"), purge_step=first)

    def write(self, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.file.add_scalar(name, value, step)

    def write_image(self, step: int, name: str, image: Tensor) -> None:
        self.file.add_image(name, image, step)

    def write_histogram(self, step: int, name: str, values: Tensor) -> None:
        self.file.add_histogram(name, values, step)

    def close(self, *, failed: bool) -> None:
        self.file.close()
