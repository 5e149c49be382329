"""Output of a task: rows of numbers, events, images and histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from selftask.config.run_length import Clock, RunLength
from selftask.distributed.collectives import is_primary
from selftask.logs import get_logger
from selftask.logs.events import add_event
from selftask.logs.history import History
from selftask.logs.rows import RESERVED_COLUMNS, MetricsFile, format_row

log = get_logger(__name__)


class Recorder:
    """Logging interface of a task, for methods and hooks."""

    out: Path
    clock: Clock
    length: RunLength
    run_hooks: Callable[[str], None]
    rows: MetricsFile | None = None  # on the first rank, if the task is prepared
    # images and histograms for the next row, by name; None if no writer takes them
    media: dict[str, tuple[str, Tensor]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.scalars: dict[str, Any] = {}  # values for the next row
        self._set_aside: list[dict[str, Any]] = []  # by ``separate_scalars``, the outermost first
        self.scope = ""  # prefix of names
        self.last_row: dict[str, Any] = {}  # the last row of metrics.jsonl
        self.history = History()

    def log(self, name: str, value: Any) -> None:
        """Add ``value``, a number or a tensor of one element, to the next row.

        It replaces an earlier value of the same name. This method does not wait for the device. The
        row has the values of the first rank.

        Raises:
            ValueError: If it is no number, or the name is that of a column of training.
        """
        if self.scope + name in RESERVED_COLUMNS:
            raise ValueError(f"log({name!r}): this is a column of training; take another name")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"log({name!r}): a number is expected, not a tensor {(*value.shape,)}")
        try:
            number = value.detach() if isinstance(value, Tensor) else float(value)
        except (TypeError, ValueError):
            raise ValueError(f"log({name!r}): a number is expected, not {value!r:.40}") from None
        self.scalars[self.scope + name] = number

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Context in which names of logged values, images and histograms begin with ``name/``."""
        before, self.scope = self.scope, f"{self.scope}{name}/"
        try:
            yield
        finally:
            self.scope = before

    @contextmanager
    def separate_scalars(self) -> Iterator[None]:
        """Context that sets aside the values for the next row, and restores them on exit.

        Used for a pass outside training, whose values form a row of their own or are discarded.
        """
        self._set_aside.append(self.scalars)
        self.scalars = {}
        try:
            yield
        finally:
            self.scalars = self._set_aside.pop()

    @property
    def training_scalars(self) -> dict[str, Any]:
        """Values for the next row of training, also while they are set aside."""
        return self._set_aside[0] if self._set_aside else self.scalars

    def log_image(self, name: str, image: Tensor) -> None:
        """Add an image to the next row, for writers such as ``tensorboard``.

        Does nothing if no writer takes images (``takes_media``).

        Args:
            name: Name of the image; replaces an unwritten image of the same name.
            image: (C, H, W), or (B, C, H, W) for a grid, with 1 or 3 channels; uint8, or floating
                point from 0 to 1.

        Raises:
            ValueError: If the shape is not one of these.
        """
        if self.media is None:
            return
        if image.ndim not in (3, 4) or image.shape[-3] not in (1, 3):
            shape = tuple(image.shape)
            raise ValueError(f"log_image({name!r}): (C, H, W) with 1 or 3 channels, not {shape}")
        self.media[self.scope + name] = "image", image.detach()

    def log_histogram(self, name: str, values: Tensor) -> None:
        """Add the distribution of ``values``, of any shape, to the next row; see ``log_image``."""
        if self.media is not None:
            self.media[self.scope + name] = "histogram", values.detach()

    @property
    def takes_media(self) -> bool:
        """True if a writer takes images and histograms."""
        return self.media is not None

    def write_row(self, row: dict[str, Any]) -> None:
        """Write ``row``, with step and epoch, to the log, ``metrics.jsonl`` and all writers.

        The first rank writes. On every rank, ``last_row`` is set and ``on_row`` is called.
        """
        epoch = self.clock.batch / self.length.batches_per_epoch
        self.last_row = {"step": self.clock.steps_done, "epoch": epoch, **row}
        self.history.add(self.last_row)
        if self.rows is not None:
            self.rows.write(self.last_row)
            log.info("%s", format_row(self.last_row))
        self.run_hooks("on_row")
        if self.media:
            self.media.clear()

    def pop_scalars(self) -> dict[str, float]:
        """Return and clear the values passed to ``log``; synchronizes with the device."""
        row = {name: float(value) for name, value in self.scalars.items()}
        self.scalars.clear()
        return row

    def event(self, kind: str, text: str, **data: Any) -> None:
        """Append an event to ``events.jsonl``, on the first rank.

        Args:
            kind: Kind of event: ``checkpoint``, ``evaluation``, or any other word.
            text: One line of text for readers.
            **data: Numbers and strings for programs.
        """
        if is_primary():
            step = self.clock.steps_done if hasattr(self, "clock") else 0
            add_event(self.out, kind, text, step=step, **data)
