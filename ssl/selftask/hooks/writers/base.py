"""Base classes of hooks that write rows of the log to files and services."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selftask.distributed.collectives import is_primary
from selftask.distributed.heartbeat import activity
from selftask.hooks.base import Hook, Task
from selftask.hooks.writers.background import Background
from selftask.logs import get_logger, read_json, write_json

log = get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class Writer(Hook):
    """Receives every row of the log on rank 0, and images and histograms if ``takes_media``.

    A subclass defines ``open`` and ``write``. If one of its methods raises, a warning is logged and
    training continues without the writer. After a resume, the steps after the checkpoint are
    written again; ``open`` must ensure that there are no duplicates.

    With ``in_background`` a thread writes the rows in order, and steps do not wait for it. Set it
    if a write may block, on a server or a network file system. ``open`` and ``close`` are called by
    the main thread. Checkpoints and the end of the run wait for the thread.
    """

    priority: ClassVar[int] = 95
    package: ClassVar[str] = ""  # required package, also the name of selftask's extra
    takes_media: ClassVar[bool] = False
    in_background: ClassVar[bool] = False

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        """Yield a problem if the package is missing."""
        if self.package and importlib.util.find_spec(self.package) is None:
            yield (
                f"the package {self.package} is not installed: pip install {self.package}, or "
                f"pip install 'selftask[{self.package}]'"
            )

    def open(self, task: Task) -> None:
        """Open the destination before the first row; ``task.resumed`` is True after a resume."""

    def write(self, step: int, row: dict[str, float]) -> None:
        """Write a row.

        Args:
            step: Number of finished steps.
            row: The other columns of the row that are finite numbers.
        """
        raise NotImplementedError

    def write_image(self, step: int, name: str, image: Tensor) -> None:
        """Write an image; called only with ``takes_media``.

        Args:
            step: Number of finished steps.
            name: Name of the image.
            image: uint8 (C, H, W) on the CPU.
        """

    def write_histogram(self, step: int, name: str, values: Tensor) -> None:
        """Write the distribution of a tensor; called only with ``takes_media``.

        Args:
            step: Number of finished steps.
            name: Name of the histogram.
            values: float32 (N,) on the CPU.
        """

    def close(self, *, failed: bool) -> None:
        """Flush and close; ``failed`` is True if an exception ends the run or it is abandoned."""

    def on_start(self, task: Task) -> None:
        if is_primary():
            self._begin(task)

    def on_row(self, task: Task) -> None:
        if not is_primary():
            return
        self._begin(task)  # an evaluation at step 0 precedes on_start
        if self.alive:
            self._guarded(lambda: self._run_or_queue(self._writing(task)))

    def before_save(self, task: Task) -> None:
        """Write all pending rows, since a resume does not repeat those before the checkpoint."""
        if self._is_open and self.background is not None:
            self._wait_for_rows(self.background.wait)

    def on_end(self, task: Task) -> None:
        self._end(failed=False)

    def release(self) -> None:
        self._end(failed=True)
        self.__dict__.pop("alive", None)  # a task that returns to a checkpoint opens it again

    def _begin(self, task: Task) -> None:
        if not hasattr(self, "alive"):
            self.alive = True
            self.has_warned = False
            self.background: Background | None = None
            if self.takes_media and task.media is None:
                task.media = {}
            self._guarded(lambda: self.open(task))
            if self.in_background and self.alive:
                self.background = Background(f"hooks.{self.title}")

    def _end(self, *, failed: bool) -> None:
        if not hasattr(self, "alive"):
            return
        if self.background is not None:
            remaining = self._wait_for_rows(self.background.close)
            self.background = None
            self.alive &= not remaining  # a writer that does not respond is not closed
        if self.alive:
            self._guarded(lambda: self.close(failed=failed))
            self.alive = False

    def _writing(self, task: Task) -> Callable[[], None]:
        """Return a function that writes the row, and the current images and histograms."""
        row = task.last_row
        numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and math.isfinite(v)}
        step = int(numbers.pop("step"))
        images, histograms = {}, {}
        for name, (kind, tensor) in (task.media or {}).items() if self.takes_media else ():
            if kind == "image":
                images[name] = as_image(tensor.clone())
            else:
                histograms[name] = tensor.float().flatten().cpu().clone()

        def write() -> None:
            self.write(step, numbers)
            for name, image in images.items():
                self.write_image(step, name, image)
            for name, values in histograms.items():
                self.write_histogram(step, name, values)

        return write

    def _run_or_queue(self, write: Callable[[], None]) -> None:
        """Write now, or queue the write for the thread, which skips it if the writer has failed."""
        if self.background is None:
            write()
            return
        if self.background.is_full and not self.has_warned:
            self.has_warned = True
            log.warning(
                "hooks.%s is slower than rows come, and training waits for it; a larger "
                "train.log_every makes fewer of them",
                self.title,
            )
        with activity(f"waiting for hooks.{self.title}"):
            self.background.add(lambda: self._guarded(write) if self._is_open else None)

    def _wait_for_rows(self, wait: Callable[[], int]) -> int:
        """Call ``wait`` of the thread; warn of rows that remain, and return their number."""
        with activity(f"waiting for hooks.{self.title} to write its rows"):
            remaining = wait()
        if remaining:
            log.warning(
                "hooks.%s does not answer: %d %s not written yet, training continues",
                self.title,
                remaining,
                "row is" if remaining == 1 else "rows are",
            )
        return remaining

    def _guarded(self, do: Callable[[], None]) -> None:
        """Call ``do``; if it raises, warn and disable the writer."""
        try:
            do()
        except Exception as error:  # noqa: BLE001 - a writer's package may raise any error
            self.alive = False
            log.warning(
                "hooks.%s has failed and writes no more, training continues: %s: %s",
                self.title,
                type(error).__name__,
                error,
            )

    @property
    def _is_open(self) -> bool:
        return getattr(self, "alive", False)

    @property
    def title(self) -> str:
        return self.package or type(self).__name__.lower()


@dataclass(eq=False, kw_only=True)
class TrackingWriter(Writer):
    """Base class of writers to a service that can neither remove nor replace rows.

    The service's id of the run and the last step sent are kept in ``OUT/tracking/PACKAGE.json``. A
    resumed run continues under that id and skips the steps that were already sent.
    """

    takes_media: ClassVar[bool] = True
    in_background: ClassVar[bool] = True

    def connect(self, task: Task, run_id: str | None) -> str:
        """Resume the run ``run_id``, or create a new one if it is None; return its id."""
        raise NotImplementedError

    def send(self, step: int, row: dict[str, float]) -> None:
        """Send a row, as in ``write``, that has not been sent before."""
        raise NotImplementedError

    def open(self, task: Task) -> None:
        self.record = task.out / "tracking" / f"{self.title}.json"
        before = read_json(self.record) if task.resumed else {}
        self.sent = int(before.get("step", -1))  # by earlier attempts
        self.id = self.connect(task, before.get("id"))
        self.record.parent.mkdir(exist_ok=True)
        write_json(self.record, {"id": self.id, "step": self.sent})

    def write(self, step: int, row: dict[str, float]) -> None:
        if step > self.sent:
            self.send(step, row)
            write_json(self.record, {"id": self.id, "step": step})


def as_image(image: Tensor) -> Tensor:
    """Return a uint8 (C, H, W) image on the CPU; arrange a batch as a grid, row by row.

    Args:
        image: (C, H, W) or (B, C, H, W); uint8, or floating point from 0 to 1, which is clipped.
    """
    if image.ndim == 4:
        columns = math.ceil(len(image) ** 0.5)
        empty = image.new_zeros(-len(image) % columns, *image.shape[1:])
        rows = torch.cat([image, empty]).unflatten(0, (-1, columns))
        image = rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    if image.dtype != torch.uint8:
        image = (image.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return image.cpu()
