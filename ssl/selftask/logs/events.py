"""Events of a run in ``events.jsonl``: one JSON object per line, appended by every attempt.

An object has ``time`` (ISO 8601), ``step``, ``event``, ``text`` and ``data``. ``EVENTS`` lists the
events of selftask; hooks may add others. Unlike rows of ``metrics.jsonl``, events stay when a run
resumes, so steps repeat. ``resume=never`` removes the events of the earlier run. Does not import
torch.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from selftask.distributed.heartbeat import HEARTBEAT
from selftask.logs.rows import append_row

NAME = "events.jsonl"

EVENTS = {
    "start": "A process began to train, for the first time or again; with the number of ranks.",
    "resume": "Training continues from the named checkpoint.",
    "checkpoint": "A checkpoint was taken.",
    "evaluation": "Evaluations ran; with their metrics.",
    "warning": "A line of the log at level WARNING.",
    "stop": "The run was interrupted and will not continue by itself.",
    "requeue": "The run was interrupted and its job is back in SLURM's queue.",
    "failure": "The run failed; with the rank and the error.",
    "finish": "The run is complete.",
}
"""Events of every run, with their meaning."""


def add_event(folder: Path, kind: str, text: str, *, step: int = 0, **data: Any) -> None:
    """Append an event; a failing disk is reported on stderr and does not stop the run.

    Args:
        folder: The run folder.
        kind: Name of the event, one word.
        text: Description in one line.
        step: Number of finished steps.
        **data: Entries of ``data``: numbers, strings, and dicts of them.
    """
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    event = {"time": now, "step": step, "event": kind, "text": text, "data": data}
    try:
        append_row(folder / NAME, event)
    except OSError as error:
        print(f"{folder / NAME}: {error.strerror or error}", file=sys.stderr, flush=True)


class WarningEvents(logging.Handler):
    """Logging handler that adds the warnings of a run to its events."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:  # errors are part of the event `failure`
            about = getattr(record, "about", None)  # machine-readable topic, given as `extra`
            data = {} if about is None else {"about": about}
            add_event(self.folder, "warning", record.getMessage(), step=HEARTBEAT.step, **data)
