"""Find run folders and submissions below a folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

DEPTH = 5  # levels of folders that are searched
_SIGNS = frozenset({"status.json", "metrics.jsonl", "environment.json"})  # files of a run folder
_JOBS = Path("slurm", "jobs.json")
_INSIDE = (
    *("checkpoints", "evaluations", "export", "errors", "failures", "slurm"),
    *("tensorboard", "wandb", "profile"),
)  # subfolders of a run, which contain no other runs


@dataclass
class Found:
    """Run folders and submissions below a folder, sorted by name."""

    runs: list[Path] = field(default_factory=list)
    submissions: list[Path] = field(default_factory=list)  # folders with a slurm/jobs.json


def find_runs(folder: Path, depth: int = DEPTH) -> Found:
    """Return the run folders and submissions in ``folder`` and below it.

    Folders that cannot be listed, hidden folders and links to folders are skipped.

    Raises:
        OSError: If ``folder`` itself cannot be listed.
    """
    result = Found()
    _search(folder, depth, result)
    return result


def _search(folder: Path, depth: int, result: Found) -> None:
    with os.scandir(folder) as listed:
        entries = sorted(listed, key=lambda entry: natural(entry.name))
    names = {entry.name for entry in entries}
    if names & _SIGNS:
        result.runs.append(folder)
    if "slurm" in names and (folder / _JOBS).is_file():
        result.submissions.append(folder)
    for entry in entries:
        if entry.name in _INSIDE or entry.name.startswith(".") or depth <= 0:
            continue
        if entry.is_dir(follow_symlinks=False):
            try:
                _search(Path(entry.path), depth - 1, result)
            except OSError:  # closed, or removed in the meantime
                continue


def natural(name: str) -> list[tuple[int, float, str]]:
    """Return a sort key that puts ``lr_2`` before ``lr_10``."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(0, float(part), "") if i % 2 else (1, 0.0, part) for i, part in enumerate(parts)]
