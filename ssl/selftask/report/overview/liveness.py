"""Decide whether a run whose status is ``running`` really runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selftask.distributed.local_process import is_gone
from selftask.report.overview.durations import show_seconds

LOCK = ".lock"  # rank 0 touches it every 5 s while it runs
SILENT_S = 180.0  # age of the lock file after which the process is assumed not to run
LEAST_QUIET_S = 120.0  # minimum time without a row or event that is allowed
QUIET_ROWS = 10  # allowed time in usual intervals between rows, if that is longer
QUIET_EVALUATIONS = 2  # allowed time in durations of the last evaluation, if that is longer
FIRST_ROW_S = 600.0  # allowed time at the start of an attempt, for scanning data and compilation
_GROWING = ("metrics.jsonl", "events.jsonl", "log.txt")


def judge(
    folder: Path,
    status: dict[str, Any],
    interval_s: float | None,
    now: float,
    *,
    eval_s: float | None = None,
) -> tuple[str, str]:
    """Return ``running``, ``hung`` or ``lost``, and the reason for the last two.

    Args:
        folder: The run folder.
        status: Its ``status.json``.
        interval_s: Usual time between two rows in seconds, or None before there are two.
        now: Current time in seconds since 1970.
        eval_s: Duration of the last evaluation during training in seconds, if there was one.
    """
    process = f"process {status.get('pid')} on {status.get('host')}"
    if is_gone(status):
        return "lost", f"{process} ended without a word; the same command resumes"
    heartbeat_s = age(folder / LOCK, now)
    if heartbeat_s is not None and heartbeat_s > SILENT_S:
        return "hung", f"no heartbeat of {process} for {show_seconds(heartbeat_s)}"
    ages = [seconds for name in _GROWING if (seconds := age(folder / name, now)) is not None]
    quiet_s = min(ages, default=0.0)
    usual = "" if interval_s is None else f", usually one every {show_seconds(interval_s)}"
    limits = [LEAST_QUIET_S, QUIET_ROWS * (interval_s or 0.0), QUIET_EVALUATIONS * (eval_s or 0.0)]
    begun_s = now - (status.get("started") or 0.0)  # rows may be of earlier attempts
    if interval_s is None or begun_s < FIRST_ROW_S:
        limits.append(FIRST_ROW_S)
    if quiet_s > max(limits):
        return "hung", f"no row or event for {show_seconds(quiet_s)}{usual}; {process} is alive"
    return "running", ""


def age(path: Path, now: float) -> float | None:
    """Return the seconds since a file was written, or None if there is no such file."""
    try:
        return max(0.0, now - path.stat().st_mtime)
    except FileNotFoundError:
        return None
