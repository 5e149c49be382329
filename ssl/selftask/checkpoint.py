"""How a state reaches the disk and comes back: atomic, checked, the last few kept.

What is in a state is the task's business; when to save is a hook's. A file holds tensors and plain
python only, so ``torch.load(path, weights_only=True)`` reads it where selftask is not installed.
A folder in the place of a file is a sharded checkpoint (``sharded``), under the same rules.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from selftask.errors import UserError
from selftask.file_system import expand_user
from selftask.logs import get_logger

log = get_logger(__name__)

SEAL = "seal.json"  # of a sharded one
_NAME = re.compile(r"step_(\d+)(\.pt)?")
_SCALARS = (bool, int, float, str, type(None))


FORMAT = 1  # of what this version writes; it reads those up to it
_ENTRIES = {
    **dict.fromkeys(("model", "method", "optimizer", "scaler", "clock", "hooks", "scalars"), dict),
    **dict.fromkeys(("meters", "rng"), list),
    "metrics_bytes": int,
}


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be trusted."""


class NoCheckpoint(DamagedCheckpoint):
    """The file is intact but is not a selftask checkpoint."""


def save(
    state: dict[str, Any], folder: Path, step: int, *, keep: int, durable: Sequence[Path] = ()
) -> Path:
    """Write ``folder/step_N.pt`` so that a kill at any instant leaves it whole or absent.

    Temporary file, fsync, rename, fsync of the folder; beside it a small JSON with length and
    CRC-32. The ``durable`` files, which the state refers to, are brought to the disk before the
    rename. All but the newest ``keep`` are removed. Raises TypeError, naming the key, for a state
    that holds anything but tensors and plain python; OSError if there is no room or no access, and
    then leaves the folder as it was.
    """
    check_plain(state)
    clear(folder)
    path = write(state, folder, step, durable=durable)
    rotate(path, keep)
    return path


def write(state: dict[str, Any], folder: Path, step: int, *, durable: Sequence[Path] = ()) -> Path:
    """The same, of a plain state, and without removing any other."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:09d}.pt"
    temporary = folder / f".{path.name}.tmp"
    try:
        seal = {"step": step, **write_checked(state, temporary)}
        for file in durable:
            sync(file)
        seal_path = path.with_suffix(".json")
        seal_path.unlink(missing_ok=True)  # of a damaged file of the same step, if any
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk, half a file is in the way
        raise
    write_durably(seal_path, json.dumps(seal))
    sync(folder)
    return path


def clear(folder: Path) -> None:
    """Make the folder, and remove what a run that was killed while it saved has left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".step_*.tmp"):
        discard(left_over)


def rotate(newest: Path, keep: int) -> None:
    """Remove all but the newest ``keep``, and one of the other kind of the same step."""
    for path in checkpoints(newest.parent):
        if path != newest and step_of(path) == step_of(newest):
            discard(path)
    for path in checkpoints(newest.parent)[keep:]:
        discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint, its seal first: without that, what is left of a folder is none."""
    if path.is_dir():
        (path / SEAL).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def write_checked(state: dict[str, Any], path: Path) -> dict[str, int]:
    """Write the file and bring it to the disk; its length in bytes and its CRC-32."""
    with path.open("wb") as file:
        writer = _Checked(file)
        try:
            torch.save(state, writer)  # type: ignore[arg-type]  # writing is all that it needs
        except RuntimeError:
            if writer.error is not None:  # torch tells of its own trouble that came of it
                raise writer.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": writer.length, "crc32": writer.crc}


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first: files, and the folders of sharded ones."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(path.stem.removeprefix("step_"))


Read = Callable[[Path], dict[str, Any]]


def find(resume: str, folder: Path, read: Read | None = None) -> tuple[dict[str, Any], Path] | None:
    """The state that ``resume`` asks for, and its path; None to start anew.

    ``auto``: the newest good one of ``folder``. ``never``: none. A file of ``folder``: that one. A
    file from elsewhere is where a run starts; once ``folder`` has a checkpoint, the run goes on
    with that, so that the same command again resumes. ``read`` is ``load``, or does as it does.
    Raises UserError for a damaged file.
    """
    if resume == "never":
        return None
    path = expand_user(resume)
    read = partial(load_with, _ENTRIES, read=read)
    if resume == "auto" or (checkpoints(folder) and path.resolve().parent != folder.resolve()):
        return load_newest(folder, read)
    if path.is_dir() and not (path / SEAL).exists():
        raise UserError(f"resume={resume}: {_instead_of_folder(path)}")
    try:
        return read(path), path
    except NoCheckpoint as error:
        raise UserError(
            f"resume={resume}: is not a checkpoint of selftask; if it holds weights to start from, "
            f"init.backbone={resume}"
        ) from error
    except (DamagedCheckpoint, OSError) as error:
        raise UserError(f"resume={resume}: cannot be read ({error})") from error


def load_with(entries: Mapping[str, type], path: Path, read: Read | None = None) -> dict[str, Any]:
    """Load a checkpoint and check that it has these entries, of these types.

    Raises DamagedCheckpoint, or NoCheckpoint for a file of something else, and UserError for the
    format of a newer selftask.
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
            found = f"is {type(state[name]).__name__}" if name in state else "is missing"
            raise DamagedCheckpoint(f"its entry {name!r} {found}")
    return state


def _instead_of_folder(path: Path) -> str:
    """What was meant by a folder that is no sharded checkpoint: of a run, one that lies in it."""
    there = checkpoints(path) or checkpoints(path / "checkpoints")
    hint = f"name one of its checkpoints, such as {there[0]}" if there else "there is none in it"
    return f"is a folder and not a checkpoint; {hint}"


def set_aside(folder: Path, step: int) -> None:
    """Move checkpoints after ``step`` to ``folder/replaced_N``: another course of the run begins.

    Left in place, they would be taken for its newest ones by ``keep`` and by the next resume.
    """
    newer = [path for path in checkpoints(folder) if step_of(path) > step]
    if not newer:
        return
    aside = folder / f"replaced_{sum(1 for _ in folder.glob('replaced_*')) + 1}"
    aside.mkdir()
    for path in newer:
        for file in (path, path.with_suffix(".json")):
            if file.exists():
                os.replace(file, aside / file.name)
    log.info("moved %d checkpoints after step %d to %s", len(newer), max(step, 0), aside)


def load_newest(folder: Path, read: Read | None = None) -> tuple[dict[str, Any], Path] | None:
    """The newest good checkpoint and its path; None where there is none at all.

    A damaged file is named in the log and the one before it is taken. One that is removed while it
    is read has been replaced by a run that trains there: the newest one is read then. Raises
    UserError when all are damaged: starting anew silently would throw a run away.
    """
    damaged: set[Path] = set()
    while left := [path for path in checkpoints(folder) if path not in damaged]:
        path = left[0]
        try:
            return (read or load)(path), path
        except (DamagedCheckpoint, FileNotFoundError) as damage:
            if os.path.lexists(path):
                damaged.add(path)
                log.warning("%s is damaged (%s); trying the one before it", path.name, damage)
    if damaged:
        raise UserError(
            f"none of the {len(damaged)} checkpoints in {folder} can be read; "
            "use resume=never (and another out=) to start anew"
        )
    return None


def load(path: Path) -> dict[str, Any]:
    """Read and verify one checkpoint, onto the CPU. Raises DamagedCheckpoint.

    Of a sharded one every tensor is made whole.
    """
    if path.is_dir():
        from selftask import sharded

        return sharded.load(path)
    seal_path = path.with_suffix(".json")
    if _NAME.fullmatch(path.name) and seal_path.exists():  # a kill before the last rename: none yet
        verify(path, read_seal(seal_path))
    elif zipfile.is_zipfile(path):
        _verify_zip(path)
    return read_file(path)


def _verify_zip(path: Path) -> None:
    """Compare the records of a file with their own checksums, which torch.load does not."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
        raise DamagedCheckpoint(str(error)) from error
    if damaged is not None:
        raise DamagedCheckpoint(f"checksum of {damaged} differs")


def read_file(path: Path) -> dict[str, Any]:
    """The state that a file holds. Raises DamagedCheckpoint."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises five kinds for a damaged zip
        raise DamagedCheckpoint(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint("holds no state dict")
    return state


def check_plain(value: Any, key: str = "state") -> None:
    """Raise TypeError naming the first key whose value only pickle could store.

    Subclasses do not count: numpy's float64 is a float, and yet ``weights_only`` refuses it.
    """
    if type(value) in (dict, OrderedDict):
        for name, item in value.items():
            check_plain(name, f"a key of {key}")
            check_plain(item, f"{key}.{name}")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            check_plain(item, f"{key}[{number}]")
    elif type(value) not in _SCALARS and not isinstance(value, torch.Tensor):
        raise TypeError(f"{key} is a {type(value).__name__}: checkpoints hold tensors and scalars")


def read_seal(path: Path) -> dict[str, Any]:
    """What is in a seal. Raises DamagedCheckpoint."""
    try:
        seal = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedCheckpoint(f"{path.name} is not a seal") from error
    if not isinstance(seal, dict):
        raise DamagedCheckpoint(f"{path.name} is not a seal")
    return seal


def verify(path: Path, seal: Any, *, content: bool = True) -> None:
    """Compare a file with what its seal says of it; without ``content``, its length only.

    Raises DamagedCheckpoint.
    """
    try:
        length, expected_crc = seal["bytes"], seal["crc32"]
    except (KeyError, TypeError) as error:
        raise DamagedCheckpoint("its seal lacks the length or the checksum") from error
    size = path.stat().st_size
    if size != length:
        raise DamagedCheckpoint(f"{size} of {length} bytes")
    if content and crc32(path) != expected_crc:
        raise DamagedCheckpoint("checksum differs")


def crc32(path: Path) -> int:
    """The CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


class _Checked(io.RawIOBase):
    """A file that adds up length and CRC-32 of what passes through, in order."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.file, self.length, self.crc = file, 0, 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        self.crc = zlib.crc32(block, self.crc)
        self.length += len(block)
        try:
            return self.file.write(block)
        except OSError as error:
            self.error = error
            raise


def write_durably(path: Path, text: str) -> None:
    """Write a small file that is on the disk before it has its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
