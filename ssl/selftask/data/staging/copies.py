"""Copy files to a faster disk, atomically and only once; the next run uses the copies too.

The copy of ``/data/x/1.jpg`` below ``/scratch`` is ``/scratch/data/x/1.jpg``. A copy is up to date
if it has the size and the modification time of the original. ``.checksums`` has one line per copied
file: crc32 (hexadecimal), size in bytes, path.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from selftask.config.values.budget import show_bytes
from selftask.data.reading.progress_log import log_progress
from selftask.data.reading.storage import FileStat, open_file
from selftask.distributed.heartbeat import track
from selftask.distributed.out_of_memory import available_bytes
from selftask.errors import UserError, explained
from selftask.files.addresses import is_remote
from selftask.files.cache_dir import locked
from selftask.files.paths import expand_user
from selftask.logs.stages import stage

THREADS = 8  # files copied at the same time
BATCH = 4096  # files submitted to the threads at once
PIECE = 4 << 20  # bytes
BLOCK = 4096  # bytes; disks allocate whole blocks
EVERY_S = 10.0  # between two progress lines
SLACK_NS = 2_000_000_000  # file systems round times
RAM = Path("/dev/shm")


def folder_for(stage_to: str) -> Path:
    """Create and return the folder of ``data.stage_to``; for ``ram`` it is in shared memory.

    Raises:
        UserError: If the folder cannot be created, or the machine has no shared memory.
    """
    if stage_to == "ram":
        if not RAM.is_dir():
            raise UserError(f"data.stage_to=ram: this machine has no {RAM}; name a folder")
        folder = RAM / f"selftask-{os.getuid()}"
    else:
        folder = expand_user(stage_to).absolute()
    with explained(f"data.stage_to={stage_to}: {folder} cannot be made", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def copy_path(folder: Path, path: str) -> str:
    """Return the path below ``folder`` for the copy of a file or folder."""
    inside = path.replace("://", "/") if is_remote(path) else os.path.abspath(path)
    return f"{folder}/{inside.lstrip('/')}"


def copy_files(files: list[FileStat], folder: Path) -> None:
    """Copy missing or outdated files to ``folder``, one process of a machine at a time.

    Raises:
        UserError: If there is too little space, or a file cannot be copied.
    """
    with locked(folder / ".lock"):
        missing = [file for file in files if not _is_copied(file, folder)]
        if missing:
            _check_space(missing, folder)
            _copy(missing, folder)
    there = len(files) - len(missing)
    if there:
        log_progress(f"{there} files were in {folder} already")


def _is_copied(file: FileStat, folder: Path) -> bool:
    try:
        status = os.stat(copy_path(folder, file.path))
    except OSError:
        return False
    near = abs(status.st_mtime_ns - _time_of_copy(file)) < SLACK_NS
    return near and (file.size < 0 or status.st_size == file.size)


def _time_of_copy(file: FileStat) -> int:
    """Return the original's modification time in ns; for a remote file, a hash of its stamp."""
    if is_remote(file.path):
        return (zlib.crc32(file.stamp.encode()) & 0x7FFFFFFF) * 1_000_000_000
    return int(file.stamp)


def _check_space(missing: list[FileStat], folder: Path) -> None:
    needed = sum(-(-max(file.size, 0) // BLOCK) * BLOCK for file in missing)
    free = min(shutil.disk_usage(folder).free, _free_memory(folder))
    if needed > free:
        raise UserError(
            f"data.stage_to: {folder} has {show_bytes(free)} free, and the data needs "
            f"{show_bytes(needed)} more; data.subset=FRACTION copies a part of it"
        )


def _free_memory(folder: Path) -> float:
    """Return the free memory in bytes if the folder is in memory, else infinity."""
    available = available_bytes() if folder.is_relative_to(RAM) else None
    return float("inf") if available is None else available


def _copy(missing: list[FileStat], folder: Path) -> None:
    began = time.monotonic()
    total = sum(max(file.size, 0) for file in missing)
    log_progress(f"copying {len(missing)} files, {show_bytes(total)}, to {folder}")
    done, last = 0, began
    with (
        open(folder / ".checksums", "a", encoding="utf-8", errors="surrogateescape") as checksums,
        ThreadPoolExecutor(max_workers=THREADS) as pool,
        stage("copy", total / 1e6) as line,
    ):
        for file, checksum, size in track("copying the data", _copies(pool, missing, folder)):
            checksums.write(f"{checksum:08x} {size} {file.path}\n")
            done += size
            line.update(done / 1e6, f"MB to {folder}")
            if not line.is_drawn and time.monotonic() - last > EVERY_S:
                last = time.monotonic()
                share, rate = done / max(total, 1), done / (last - began)
                log_progress(f"{100 * share:.0f} % copied, {rate / 1e6:.0f} MB/s")
    seconds = time.monotonic() - began
    log_progress(f"copied {show_bytes(done)} to {folder} in {seconds:.0f} s")
    if folder.is_relative_to(RAM):
        log_progress(f"it stays in memory for the next run, until `rm -r {folder}`")


def _copies(
    pool: ThreadPoolExecutor, missing: list[FileStat], folder: Path
) -> Iterator[tuple[FileStat, int, int]]:
    """Copy files in batches; yields each file, its crc32 and its size."""
    for start in range(0, len(missing), BATCH):
        batch = missing[start : start + BATCH]
        results = pool.map(partial(_copy_one, folder=folder), batch)
        for file, result in zip(batch, results, strict=True):
            yield (file, *result)


def _copy_one(file: FileStat, folder: Path) -> tuple[int, int]:
    """Copy a file under a temporary name and rename it; returns its crc32 and size.

    Raises UserError if it cannot be copied.
    """
    target = Path(copy_path(folder, file.path))
    made = target.with_name(f".{target.name}.{os.getpid()}")
    checksum = size = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_file(file.path) as original, open(made, "wb") as copy:
            while piece := original.read(PIECE):
                checksum, size = zlib.crc32(piece, checksum), size + len(piece)
                copy.write(piece)
        if file.size not in (-1, size):
            raise OSError(f"{size} bytes were read instead of {file.size}")
        when = _time_of_copy(file)
        os.utime(made, ns=(when, when))
        os.replace(made, target)
    except OSError as error:
        made.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise UserError(
            f"data.stage_to: {file.path} cannot be copied to {target}: {reason}"
        ) from error
    return checksum, size
