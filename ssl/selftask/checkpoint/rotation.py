"""Names, order and rotation of the checkpoints in a folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from itertools import count
from pathlib import Path

from selftask.logs import get_logger
from selftask.logs.checkpoint_results import result_files

log = get_logger(__name__)

NAME = re.compile(r"step_(\d+)(\.pt)?")
MANIFEST = "manifest.json"  # in the folder of a sharded checkpoint


def clear(folder: Path) -> None:
    """Create the folder and remove temporary files of a run that was killed during a save."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".step_*.tmp"):
        discard(left_over)


def rotate(newest: Path, keep: int, spared: Collection[int] = ()) -> None:
    """Remove old checkpoints after a new one has been saved.

    A checkpoint of the same step in the other format (file or folder) is removed as well.

    Args:
        newest: The new checkpoint.
        keep: Number of newest checkpoints to keep.
        spared: Steps whose checkpoints are kept in any case.
    """
    for path in checkpoints(newest.parent):
        if path != newest and step_of(path) == step_of(newest):
            discard(path)
    for path in checkpoints(newest.parent)[keep:]:
        if step_of(path) not in spared:
            discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint, its manifest first, since a folder without one is not a checkpoint."""
    if path.is_dir():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first: files, and folders of sharded ones."""
    paths = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved, from its name."""
    return int(path.stem.removeprefix("step_"))


def archive(folder: Path, step: int) -> None:
    """Move checkpoints after ``step``, where the run restarts, to ``folder/replaced_N``.

    Otherwise rotation and the next resume would treat them as the newest ones. Results of
    ``selftask eval suite`` after ``step`` are moved, too, since these steps will have different
    weights.
    """
    listed = [*checkpoints(folder), *result_files(folder.parent)]
    newer = [path for path in listed if step_of(path) > step]
    if not newer:
        return
    folders = (folder / f"replaced_{number}" for number in count(1))
    aside = next(path for path in folders if not path.exists())
    aside.mkdir(parents=True)
    for path in newer:
        for file in (path, path.with_suffix(".json")):
            if file.exists():
                os.replace(file, aside / file.name)
    log.info("moved %d checkpoints or results after step %d to %s", len(newer), max(step, 0), aside)
