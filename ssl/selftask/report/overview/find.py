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
    """Run folders and submissions below a folder, in natural order of their names."""

    runs: list[Path] = field(default_factory=list)
    submissions: list[Path] = field(default_factory=list)  # folders with a slurm/jobs.json


def find_runs(folder: Path) -> Found:
    """Return the run folders and submissions in ``folder`` and below it.

    Five levels of folders are searched. Folders that cannot be listed, hidden folders, links to
    folders and the subfolders of runs, such as ``checkpoints``, are skipped.

    Raises:
        OSError: If ``folder`` itself cannot be listed.
    """
    os.scandir(folder).close()  # os.walk ignores errors
    result = Found()
    for name, folders, files in os.walk(folder):
        path = Path(name)
        if not _SIGNS.isdisjoint(files):
            result.runs.append(path)
        if "slurm" in folders and (path / _JOBS).is_file():
            result.submissions.append(path)
        inner = [n for n in folders if n not in _INSIDE and not n.startswith(".")]
        is_deep = len(path.parts) - len(folder.parts) >= DEPTH
        folders[:] = [] if is_deep else sorted(inner, key=natural)  # those that are walked next
    return result


def natural(name: str) -> list[tuple[int, float, str]]:
    """Return a sort key that puts ``lr_2`` before ``lr_10``."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(0, float(part), "") if i % 2 else (1, 0.0, part) for i, part in enumerate(parts)]
