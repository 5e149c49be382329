"""Expected types of the values in a run's files; other values are removed.

A run may come from somebody else, so the type of each value is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from selftask.errors import with_noun
from selftask.files.received import (
    COUNT,
    NUMBER,
    TABLE,
    TABLE_OF_TEXTS,
    TEXT,
    TEXTS,
    TIME,
    Kind,
    drop_misfits,
    is_number,
)

STATUS: Mapping[str, Kind] = {
    **dict.fromkeys(("state", "host", "error", "by"), TEXT),
    **dict.fromkeys(("step", "pid", "rank"), COUNT),
    **dict.fromkeys(("started", "updated"), TIME),
    "length": Kind("epochs and steps", lambda v: isinstance(v, list) and len(v) == 2),
}
ENVIRONMENT: Mapping[str, Kind] = {
    **dict.fromkeys(("host", "cpu", "python", "folder"), TEXT),
    **dict.fromkeys(("gpus", "command"), TEXTS),
    **dict.fromkeys(("packages", "origins"), TABLE_OF_TEXTS),
    **dict.fromkeys(("selftask", "git"), TABLE),
    **dict.fromkeys(("selftask.commit", "git.commit", "git.folder", "git.diff"), TEXT),
    "cpus": COUNT,
    "memory_gib": NUMBER,
}
CONFIG: Mapping[str, Kind] = dict.fromkeys(
    (
        *("train.epochs", "train.max_steps", "train.batch_size"),
        *("hooks.health.collapsed", "hooks.health.min_rank"),
    ),
    NUMBER,
)
_EVENT = {"step": COUNT, "event": TEXT, "text": TEXT, "time": TEXT, "data": TABLE}
_NUMBERS = frozenset(
    (
        *("epoch", "loss", "lr", "step_s", "images_per_s", "data_wait", "eta_s", "eval_s"),
        *("chance_loss", "chance_ratio", "emb_std", "effective_rank", "memory_mb"),
    )
)  # columns that always hold numbers


def numeric_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of ``metrics.jsonl`` with numeric values only, and an error message or "".

    Rows without a valid step are dropped. Texts in columns of hooks are dropped without a message.
    """
    kept, wrong = [], 0
    for row in rows:
        numbers = {name: value for name, value in row.items() if is_number(value)}
        others = row.keys() - numbers.keys()
        if not COUNT.accepts(row.get("step")):
            wrong += row.get("step") is not None
            continue
        wrong += any(name in _NUMBERS and row[name] is not None for name in others)
        kept.append(numbers)
    return kept, f"{with_noun(wrong, 'row')} with a text for a number" if wrong else ""


def total_steps(steps: Any, epochs: Any, row: Mapping[str, Any]) -> int | None:
    """Return the length of a run in steps; None if it is unlimited or not known yet.

    Args:
        steps: Largest number of steps, as in the config or the status, or None.
        epochs: Largest number of epochs, or None.
        row: A row; its ``step`` and ``epoch`` give the number of steps of an epoch.
    """
    limits = [int(steps)] if is_number(steps) else []
    if is_number(epochs) and row.get("epoch") and "step" in row:
        total = row["step"] / row["epoch"] * epochs
        limits += [max(1, round(total))] if is_number(total) else []
    return min(limits, default=None)


def valid_events(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Drop values of unexpected types in place; return the events and the first message or ""."""
    problems = [problem for event in events for problem in drop_misfits(event, _EVENT)]
    return events, next(iter(problems), "")
