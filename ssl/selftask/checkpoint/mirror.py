"""Run folders at remote addresses, such as ``out=s3://bucket/run``.

A run works in a local folder, with all guarantees of a local ``out``. A thread copies its files to
the address about once a second: each checkpoint, then its manifest, and ``status.json`` after
everything else. A checkpoint without its manifest is incomplete and ignored, so a kill at any
instant leaves the newest complete checkpoint at the address. A run starts from the files at the
address, or from the local folder if the run's last attempt used that folder.

Two runs at one address are detected only on the same machine, since stores have no locks.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from selftask.checkpoint.rotation import MANIFEST, step_of
from selftask.errors import RunError, explained, reason_of
from selftask.files import addresses
from selftask.files.addresses import is_remote, work_folder
from selftask.files.cache_dir import cache_folder, locked
from selftask.logs import get_logger, read_json

log = get_logger(__name__)

EVERY_S = 1.0  # between two uploads; at least ten times the duration of the last one
TRIES = 3  # for the upload at the end
STATUS = "status.json"
_CHECKPOINT = re.compile(r"checkpoints/(step_\d+)(\.pt|\.json|/.+)")

Stamp = tuple[int, int]  # modification time in ns and size of a local file


def fetch_run(
    address: str, folder: Path, *, num_checkpoints: int | None = None
) -> dict[str, Stamp]:
    """Make ``folder`` a copy of the run at an address, without incomplete checkpoints.

    Nothing is fetched if the last attempt of the run used this folder, since its files are newer.
    Otherwise local files that the copy does not need are removed, and checkpoints with the same
    manifest are not downloaded again.

    Args:
        address: Address of the run.
        folder: Local folder of the run.
        num_checkpoints: Number of newest checkpoints to fetch; None for all.

    Returns:
        The files at the address, each with the stamp of its local copy, or (0, 0) if the copy
        differs or is missing.

    Raises:
        UserError: If a file cannot be read.
    """
    address = address.rstrip("/")
    names = {name for name in addresses.walk(address) if "/replaced_" not in name}
    if STATUS in names and _attempt(read_json(folder / STATUS)) == _attempt_at(address):
        stamps = _stamps(folder)
        return {n: stamps[n] if _is_here(address, folder, n) else (0, 0) for n in names}
    wanted = _with_newest(_complete(names), num_checkpoints)
    for name in set(_stamps(folder)) - wanted:
        (folder / name).unlink()
        with suppress(OSError):  # if a folder is not empty
            (folder / name).parent.rmdir()
    for name in sorted(wanted, key=_rank):
        with explained(f"{address}/{name}: cannot be read"):
            if not _is_here(address, folder, name):
                addresses.download(f"{address}/{name}", folder / name)
    return {**dict.fromkeys(names, (0, 0)), **_stamps(folder)}


def local_run(address: str, *, num_checkpoints: int | None = 0) -> str:
    """Return the path of a local copy of the run at a remote address; other paths are unchanged.

    Args:
        address: Path or address of a run.
        num_checkpoints: Number of newest checkpoints to download; None for all.

    Raises:
        UserError: If a file of the run cannot be read.
    """
    if not is_remote(address) or not addresses.is_folder(address):
        return address
    folder = cache_folder() / "runs" / work_folder(address).name
    with locked(folder.with_name(f"{folder.name}.lock")):
        fetch_run(address, folder, num_checkpoints=num_checkpoints)
    return str(folder)


@contextmanager
def mirrored(out: str, folder: Path, sent: dict[str, Stamp] | None) -> Iterator[Callable[[], None]]:
    """Context that keeps the address ``out`` up to date with ``folder``.

    It yields a function that uploads all changes before it returns. This is also done at exit.

    Args:
        out: Address of the run.
        folder: Local folder of the run.
        sent: The result of ``fetch_run``; None to do nothing.

    Raises:
        RunError: If the last upload failed. After another error, which is raised, this is logged.
    """
    if sent is None:
        yield lambda: None
        return
    mirror = _Mirror(out.rstrip("/"), folder, sent)
    try:
        yield mirror.flush
    except BaseException:
        mirror.stop()
        try:
            mirror.flush()
        except RunError as error:
            log.error("%s", error)
        raise
    mirror.stop()
    mirror.flush()


def upload_files(out: str, folder: Path, *patterns: str) -> None:
    """Upload the files of a run that match a pattern; do nothing if ``out`` is local.

    Args:
        out: Run folder, local or an address.
        folder: Local folder that contains the files.
        *patterns: Glob patterns relative to ``folder``.

    Raises:
        UserError: If a file cannot be written.
    """
    for path in chain(*map(folder.glob, patterns)) if is_remote(out) else ():
        address = f"{out.rstrip('/')}/{path.relative_to(folder).as_posix()}"
        with explained(f"{address}: cannot be written"):
            addresses.upload(path, address)


class _Mirror:
    """Uploader of a folder's changes, in a separate thread."""

    def __init__(self, address: str, folder: Path, sent: dict[str, Stamp]) -> None:
        self.address, self.folder, self._sent = address, folder, dict(sent)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="selftask mirror", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current upload."""
        self._over.set()
        self._thread.join()

    def flush(self) -> None:
        """Upload all changes; raise RunError after ``TRIES`` failures."""
        for attempt in range(1, TRIES + 1):
            try:
                self._upload_changes()
                return
            except Exception as error:
                if attempt == TRIES:
                    raise RunError(
                        f"out={self.address}: cannot be written ({reason_of(error)}); the files "
                        f"of the run are in {self.folder}"
                    ) from error
                time.sleep(EVERY_S)

    def _run(self) -> None:
        pause, failed = EVERY_S, False
        while not self._over.wait(pause):
            began = time.monotonic()
            try:
                self._upload_changes()
                failed = False
            except Exception as error:  # noqa: BLE001 - the run continues; `flush` raises
                if not failed:
                    log.warning("out=%s: %s; trying again", self.address, reason_of(error))
                failed = True
            pause = max(EVERY_S, 10 * (time.monotonic() - began))

    def _upload_changes(self) -> None:
        """Upload changed files in the order of `_rank`, then remove deleted ones.

        The folder is listed first. Files to which a checkpoint refers are uploaded before it, so
        they are at least as new as the checkpoint.
        """
        with self._lock:
            now = _stamps(self.folder)
            for name in sorted(now, key=_rank):
                if self._sent.get(name) != now[name]:
                    self._upload(name, now[name])
            for name in sorted(set(self._sent) - set(now), key=_rank, reverse=True):
                self._remove(name)

    def _upload(self, name: str, stamp: Stamp) -> None:
        manifest = _manifest_of(name)
        if manifest != name and manifest in self._sent:  # manifest of the replaced file
            self._remove(manifest)
        try:
            addresses.upload(self.folder / name, f"{self.address}/{name}")
        except Exception:
            if (self.folder / name).exists():
                raise
            return  # removed in the meantime
        self._sent[name] = stamp

    def _remove(self, name: str) -> None:
        address = f"{self.address}/{name}"
        if addresses.exists(address):
            addresses.remove(address)
        del self._sent[name]


def _stamps(folder: Path) -> dict[str, Stamp]:
    """Return the stamps of a run's files by relative path, without temporary files."""
    stamps = {}
    for above, folders, files in os.walk(folder):  # unlike rglob, it skips removed folders
        folders[:] = [name for name in folders if not _is_skipped(name)]
        for path in (Path(above, name) for name in files if not _is_skipped(name)):
            try:
                status = path.stat()
            except FileNotFoundError:  # removed after it was listed
                continue
            if stat.S_ISREG(status.st_mode):
                name = path.relative_to(folder).as_posix()
                stamps[name] = (status.st_mtime_ns, status.st_size)
    return stamps


def _is_skipped(name: str) -> bool:
    return name == ".lock" or name.endswith(".tmp") or "replaced_" in name


def _manifest_of(name: str) -> str:
    """Return the manifest of a checkpoint's file, or an empty string for other files."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return ""
    end = f"/{MANIFEST}" if match[2].startswith("/") else ".json"
    return f"checkpoints/{match[1]}{end}"


def _rank(name: str) -> tuple[int, str]:
    """Return a sort key for the order: others, checkpoints, manifests, ``status.json``."""
    manifest = _manifest_of(name)
    if not manifest:
        return (3 if name == STATUS else 0), name
    return (2 if manifest == name else 1), name


def _complete(names: set[str]) -> set[str]:
    """Return the names of all files except those of incomplete checkpoints."""
    return {name for name in names if not (manifest := _manifest_of(name)) or manifest in names}


def _with_newest(names: set[str], number: int | None) -> set[str]:
    """Return the names without files of older checkpoints; the ``number`` newest are kept."""
    steps = {name: step_of(Path(m[1])) for name in names if (m := _CHECKPOINT.fullmatch(name))}
    newest = sorted(set(steps.values()), reverse=True)[:number]
    return {name for name in names if name not in steps or steps[name] in newest}


def _is_here(address: str, folder: Path, name: str) -> bool:
    """Return True if a checkpoint's file is complete here, with the manifest of the address."""
    manifest, path = _manifest_of(name), folder / name
    if manifest in ("", name) or not path.exists() or not (folder / manifest).exists():
        return False
    content = (folder / manifest).read_bytes()
    if content != addresses.read_bytes(f"{address}/{manifest}"):
        return False
    entries = read_json(folder / manifest)  # empty if a kill cut off its upload
    entry = entries.get("files", {path.name: entries}).get(path.name, {})
    return bool(path.stat().st_size == entry.get("bytes"))


def _attempt(status: dict[str, Any]) -> list[Any]:
    """Return the entries of ``status.json`` that identify an attempt."""
    return [status.get(name) for name in ("host", "pid", "started")]


def _attempt_at(address: str) -> list[Any]:
    try:
        return _attempt(json.loads(addresses.read_bytes(f"{address}/{STATUS}")))
    except ValueError:  # incomplete file
        return []
