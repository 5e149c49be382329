"""Saving and loading of states: atomic, verified, with rotation.

A file contains tensors and plain Python objects only, so ``torch.load(path, weights_only=True)``
reads it without selftask. A folder instead of a file is a sharded checkpoint (``sharded``).
"""

from __future__ import annotations

import json
import os
import socket
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from selftask.checkpoint.kept import Kept
from selftask.checkpoint.manifest import (
    DamagedCheckpoint,
    NoCheckpoint,
    read_file,
    read_manifest,
    sync,
    verify,
    verify_zip,
    write_checked,
)
from selftask.checkpoint.mirror import local_run
from selftask.checkpoint.nested import check_plain
from selftask.checkpoint.rotation import MANIFEST, NAME, checkpoints, clear
from selftask.distributed.collectives import gather_objects, world_size
from selftask.errors import UserError, explained
from selftask.files.addresses import fetch, is_remote, list_names
from selftask.files.paths import is_file
from selftask.files.received import UnreadableFile, check_regular, read_bytes
from selftask.files.replace import replacing, write_durably
from selftask.logs import get_logger

log = get_logger(__name__)

FORMAT = 1  # version that is written; older ones can be read
_ENTRIES = {
    **dict.fromkeys(("model", "method", "optimizer", "scaler", "clock", "hooks", "scalars"), dict),
    **dict.fromkeys(("meters", "rng"), list),
    "metrics_bytes": int,
}


def save(
    state: dict[str, Any],
    folder: Path,
    step: int,
    *,
    keep: int,
    durable: Sequence[Path] = (),
    kept: Kept | None = None,
) -> Path:
    """Write ``folder/step_N.pt`` and return its path; a kill leaves it complete or absent.

    The steps are: temporary file, fsync, rename, fsync of the folder. A small JSON file next to it
    has length and checksum.

    Args:
        state: Tensors and plain Python objects in nested containers.
        folder: Folder of the checkpoints.
        step: Step after which the state is saved.
        keep: Number of newest checkpoints to keep; others are removed.
        durable: Files to which the state refers. They are synced to disk before the rename.
        kept: Additional checkpoints to keep.

    Raises:
        TypeError: If the state contains other objects; the message has the key.
        OSError: If the disk is full or not writable. Older checkpoints are then kept.
    """
    check_plain(state)
    clear(folder)
    path = write(state, folder, step, durable=durable)
    (kept or Kept()).rotate(path, keep)
    return path


def write(state: dict[str, Any], folder: Path, step: int, *, durable: Sequence[Path] = ()) -> Path:
    """Write a plain state as ``save`` does, without removing other checkpoints; return the path.

    Args:
        state: As for ``save``, but not checked.
        folder: Folder of the checkpoints.
        step: Step after which the state is saved.
        durable: As for ``save``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:09d}.pt"
    manifest_path = path.with_suffix(".json")
    with replacing(path) as temporary:
        manifest = {"step": step, **write_checked(state, temporary)}
        for file in durable:
            sync(file)
        manifest_path.unlink(missing_ok=True)  # of a damaged file of the same step, if any
    write_durably(manifest_path, json.dumps(manifest))
    sync(folder)
    return path


Read = Callable[[Path], dict[str, Any]]
Wanted = Callable[[Mapping[str, Any], str], bool]


def find(resume: str, folder: Path, read: Read | None = None) -> tuple[dict[str, Any], Path] | None:
    """Return the state selected by ``resume``, and its path; None to start a new run.

    ``auto`` selects the newest intact checkpoint in ``folder``, and ``never`` none. A file in
    ``folder`` selects that file. A file elsewhere only starts a run: once ``folder`` has a
    checkpoint, the newest one there is used, so that the same command resumes the run. Every rank
    must call this function; all ranks use the checkpoints that rank 0 finds.

    Args:
        resume: ``auto``, ``never``, or the path or address of a checkpoint.
        folder: Folder of the run's checkpoints.
        read: Function from the path of a checkpoint to its state; None for ``load``.

    Raises:
        UserError: If the selected file cannot be read, is damaged, is not a checkpoint of
            selftask, or was written by a newer version; if all checkpoints in ``folder`` are
            damaged; or, on every rank, if ranks see different checkpoints.
    """
    if resume == "never":
        return None
    path = fetch(local_run(resume)) if resume != "auto" else folder
    read = partial(load_with, _ENTRIES, read=read)
    saved = _seen_by_all(checkpoints(folder), folder)
    if resume == "auto" or (saved and path.resolve().parent != folder.resolve()):
        return load_newest(folder, read, saved if world_size() > 1 else None)
    if path.is_dir() and not (path / MANIFEST).exists():
        raise UserError(f"resume={resume}: {_instead_of_folder(resume, path)}")
    _seen_by_all([path], path.parent)
    try:
        return read(path), path
    except NoCheckpoint as error:
        raise UserError(
            f"resume={resume}: is not a checkpoint of selftask; if it holds weights to start from, "
            f"init.backbone={resume}"
        ) from error
    except (DamagedCheckpoint, OSError) as error:
        raise UserError(f"resume={resume}: cannot be read ({error})") from error


def load_named(path: Path, read: Read) -> dict[str, Any]:
    """Return ``read(path)`` for a checkpoint that the user names; UserError if it is damaged."""
    with explained(f"{path}: is damaged", DamagedCheckpoint):
        return read(path)


def load_with(entries: Mapping[str, type], path: Path, read: Read | None = None) -> dict[str, Any]:
    """Load a checkpoint and check that it has these entries, of these types.

    Args:
        entries: Type of each required entry.
        path: The checkpoint.
        read: ``load``, or a function like it.

    Raises:
        DamagedCheckpoint: If it cannot be read or lacks an entry.
        NoCheckpoint: If it is intact but not a checkpoint of selftask.
        UserError: If it was written in the format of a newer selftask.
    """
    state = (read or load)(path)
    if "clock" not in state:
        raise NoCheckpoint("has no entry 'clock'")
    written = state.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise UserError(
            f"{path}: is of format {written}, made by a newer selftask; this one reads formats up "
            f"to {FORMAT}: install the newer one"
        )
    for name, kind in entries.items():
        if not isinstance(state.get(name), kind):
            problem = f"is {type(state[name]).__name__}" if name in state else "is missing"
            raise DamagedCheckpoint(f"its entry {name!r} {problem}")
    return state


def _instead_of_folder(resume: str, path: Path) -> str:
    """Return a hint for a folder that is not a sharded checkpoint.

    Args:
        resume: Its path or address.
        path: Its path, or that of a local copy without its checkpoints.
    """
    if is_remote(resume):
        folders = [resume.rstrip("/"), f"{resume.rstrip('/')}/checkpoints"]
        listed = [f"{folder}/{name}" for folder in folders for name in list_names(folder)]
        saved = [name for name in listed[::-1] if NAME.fullmatch(name.rpartition("/")[2])]
    else:
        saved = [str(p) for p in checkpoints(path) or checkpoints(path / "checkpoints")]
    hint = f"name one of its checkpoints, such as {saved[0]}" if saved else "there is none in it"
    return f"is a folder and not a checkpoint; {hint}"


def _seen_by_all(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder`` as rank 0 sees them, the newest first.

    Raises UserError on every rank unless the newest one is the same on all ranks.
    """
    newest = _identity(paths[0]) if paths else ("none", b"")
    ranks = gather_objects((socket.gethostname(), newest, [path.name for path in paths]))
    first_host, first, names = ranks[0]
    for rank, (host, other, _) in enumerate(ranks):
        if other != first:
            seen = other[0] if other[0] != first[0] else f"another {other[0]}"
            raise UserError(
                f"the newest checkpoint in {folder} is {first[0]} for rank 0 on {first_host}, and "
                f"{seen} for rank {rank} on {host}; every rank must see the same files: start "
                "again once the disk shows them to all, or give an out= that all nodes share"
            )
    return [folder / name for name in names]


def _identity(path: Path) -> tuple[str, bytes]:
    """Return the name of a checkpoint with its manifest, or with its length if it has none."""
    manifest = path / MANIFEST if path.is_dir() else path.with_suffix(".json")
    if is_file(manifest):
        return path.name, read_bytes(manifest)
    return (path.name, b"%d" % path.stat().st_size) if is_file(path) else ("none", b"")


def load_newest(
    folder: Path, read: Read | None = None, paths: Sequence[Path] | None = None
) -> tuple[dict[str, Any], Path] | None:
    """Return the newest intact checkpoint and its path; None if there are no checkpoints.

    Damaged files are logged and skipped. If a file disappears while it is read, because a running
    training has replaced it, the newest checkpoint is read instead, unless ``paths`` are given.

    Args:
        folder: Folder of the checkpoints.
        read: ``load``, or a function like it.
        paths: Checkpoints to try in this order; None for those in the folder.

    Raises:
        UserError: If all are damaged, since a new start would discard the run.
    """
    damaged = 0
    for path in checkpoints(folder) if paths is None else paths:
        try:
            return (read or load)(path), path
        except (DamagedCheckpoint, FileNotFoundError) as damage:
            if paths is None and not os.path.lexists(path):
                return load_newest(folder, read)
            damaged += 1
            log.warning("%s is damaged (%s); trying the one before it", path.name, damage)
    if damaged:
        raise UserError(
            f"none of the {damaged} checkpoints in {folder} can be read; "
            "use resume=never (and another out=) to start anew"
        )
    return None


def load(path: Path, wanted: Wanted | None = None) -> dict[str, Any]:
    """Read and verify one checkpoint, onto the CPU; raise DamagedCheckpoint if that fails.

    Tensors of a sharded checkpoint are read as full tensors.

    Args:
        path: A file, or the folder of a sharded checkpoint.
        wanted: Selects the needed tensors, given the state and a name in it such as
            ``model.backbone.conv1.weight``; None for all. In a sharded checkpoint, others become
            None. The tensors of a file are memory-mapped instead, and read when they are used.
    """
    try:
        for file in path.iterdir() if path.is_dir() else (path, path.with_suffix(".json")):
            check_regular(file)
    except UnreadableFile as error:
        raise DamagedCheckpoint(f"{Path(error.filename).name} {error.strerror}") from error
    if path.is_dir():
        from selftask.checkpoint import sharded  # torch.distributed.checkpoint takes 0.7 s

        return sharded.load(path, wanted=wanted)
    manifest_path = path.with_suffix(".json")
    if NAME.fullmatch(path.name) and manifest_path.exists():  # none yet if killed before the end
        verify(path, read_manifest(manifest_path))
    elif zipfile.is_zipfile(path):
        verify_zip(path)
    return read_file(path, mmap=wanted is not None)
