"""Weights of a run for its report: the export or the newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selftask.checkpoint.manifest import CHECKSUM, DamagedCheckpoint, checksum, read_file
from selftask.checkpoint.rotation import MANIFEST, checkpoints, step_of
from selftask.logs import read_json
from selftask.models.weights.export import META, WEIGHTS


@dataclass(frozen=True)
class Weights:
    """A file with weights that has not been read yet."""

    path: Path  # path of an export or a checkpoint
    address: str  # for ``open_model``
    digest: str  # step and checksum of the file


def trained_on(run: Path) -> dict[str, Any] | None:
    """Return the fingerprint of the training images in the newest checkpoint of a run.

    See ``data.fingerprint``. Only images are compared, so its entry ``tokenizer`` is None. The
    result is None if there is no checkpoint, or if it is sharded, damaged or has no fingerprint.
    """
    newest = next(iter(checkpoints(run / "checkpoints")), None)
    if newest is None or newest.is_dir():
        return None
    try:
        data = read_file(newest, mmap=True).get("data")
    except DamagedCheckpoint:
        return None
    return None if data is None else {**data, "tokenizer": None}


def find_weights(run: Path) -> Weights | None:
    """Return the export of a run if it has the newest checkpoint's step, else the checkpoint.

    The steps differ while a run trains again after its end or from the start. Without a checkpoint
    it is the export; without both, None.
    """
    newest = next(iter(checkpoints(run / "checkpoints")), None)
    exported = run / "export" / WEIGHTS
    step = _exported_step(run) if exported.is_file() else None
    if step is not None and (newest is None or step_of(newest) == step):
        return Weights(exported, str(exported), f"{step}-{checksum(exported)}")
    if newest is None:
        return None
    manifest = newest / MANIFEST if newest.is_dir() else newest.with_suffix(".json")
    version = read_json(manifest).get(CHECKSUM, newest.stat().st_mtime_ns)
    return Weights(newest, f"{run}@{step_of(newest)}", f"{step_of(newest)}-{version}")


def _exported_step(run: Path) -> int | None:
    try:
        return int(read_json(run / "export" / META)["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # incomplete export; the checkpoint is used instead
