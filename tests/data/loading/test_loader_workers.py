"""Worker processes: killed, stuck, forgotten, orphaned; and the memory batches come in."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from numbered import Numbers, dataset, read

import selftask
from selftask.data.loading import workers
from selftask.data.loading.loader import Batches, EvalBatches
from selftask.distributed.world import STOP_SIGNALS
from selftask.errors import RunError

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(selftask.__file__).parents[1])}
IMPORTS = """
from selftask.config.schema import Component, ViewConfig
from selftask.data.loading.dataset import ViewDataset
from selftask.data.open_source import open_source
from selftask.data.loading.loader import Batches
from selftask.data.views import Views
"""
START_WORKERS = """
data = ViewDataset(open_source(Component(name="digits")), Views({"a": ViewConfig()}), 0)
batches = Batches(data, batch_size=64, seed=0, num_workers=2)
next(batches)
print(*(worker.pid for worker in batches._reader._workers), flush=True)
"""


def test_a_killed_worker_is_named() -> None:
    batches = Batches(dataset(Numbers(20, dies_at=7)), batch_size=10, seed=0, num_workers=1)
    with pytest.raises(RunError, match=r"worker process \d+ was killed by SIGKILL; out of memory"):
        read(batches, 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's __del__
def test_a_worker_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would wait for them forever at its exit, after a limit of processes (ulimit -u)."""
    fork, started = os.fork, []

    def limited() -> int:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if pid := fork():
            started.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", limited)
    with pytest.raises(RunError, match=r"2 workers cannot be started: .*unavailable.*ulimit -u"):
        next(Batches(dataset(Numbers(20)), batch_size=10, seed=0, num_workers=2))
    (pid,) = started
    deadline = time.monotonic() + 20
    while pid in {child.pid for child in active_children()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_kept_of_evaluations_that_ended(num_workers: int, stopped: bool) -> None:
    """Neither a reader nor its workers."""
    known = sum(stop.alive for stop in workers._OPEN)  # of other tests
    for _ in range(3):
        batches = EvalBatches(dataset(Numbers(8)), batch_size=2, num_workers=num_workers)
        images = iter(batches)
        assert len(next(images).index) == 2
        images.close() if stopped else list(images)  # type: ignore[attr-defined]
        assert sum(stop.alive for stop in workers._OPEN) <= known


def test_workers_end_with_a_reader_in_a_reference_cycle() -> None:
    """As after an exception that somebody keeps: its traceback refers to the reader."""
    batches = Batches(dataset(Numbers(40)), batch_size=4, seed=0, num_workers=1)
    next(batches)
    reader: Any = batches._reader
    (worker,) = reader._workers
    reader.itself = reader
    del batches, reader
    gc.collect()
    assert not worker.is_alive()


def test_a_reader_ends_no_workers_that_another_thread_starts_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two evaluations at once, as in a web server."""
    first, second = (
        Batches(dataset(Numbers(40)), batch_size=4, seed=0, num_workers=1) for _ in range(2)
    )
    start = workers.DataLoader.__iter__

    def start_both(loader: Any) -> Any:
        monkeypatch.undo()
        second.start(0)
        return start(loader)

    monkeypatch.setattr(workers.DataLoader, "__iter__", start_both)
    first.start(0)
    first.close()
    assert len(read(second, 10)) == 10
    second.close()


def test_workers_leave_signals_to_the_main_process() -> None:
    batches = Batches(dataset(Numbers(40)), batch_size=4, seed=0, num_workers=2)
    batches.start(0)
    next(batches)
    for worker in batches._reader._workers:  # type: ignore[union-attr]
        for number in STOP_SIGNALS:
            os.kill(worker.pid, number)  # type: ignore[arg-type]
    assert [next(batches).number for _ in range(20)] == list(range(1, 21))
    batches.close()


def test_scripts_that_forget_to_close_end() -> None:
    """Each in a fork of one process that has imported torch."""
    endings = {
        "pass": 0,
        "raise RuntimeError('mine')": 1,  # its traceback keeps the loader alive
        "kept = batches._reader._iterator; del batches": 0,  # nobody is left to close it
    }
    fork_each = f"""
import os, signal
for ending in {list(endings)}:
    if not os.fork():
        signal.alarm(60)  # it would run for ever if it fails
        exec(START_WORKERS)
        exec(ending)
        break
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print("code", code, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"START_WORKERS = {START_WORKERS!r}\n{IMPORTS}{fork_each}"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("code")]
    assert codes == [str(code) for code in endings.values()], done.stderr


def test_a_stuck_worker_does_not_keep_the_run_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # seconds
    batches = Batches(dataset(Numbers(40)), batch_size=4, seed=0, num_workers=1)
    next(batches)
    (worker,) = batches._reader._workers  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    batches.close()
    worker.join(timeout=10)
    assert not worker.is_alive()


def test_no_orphans_when_the_main_process_is_killed() -> None:
    """Nor when it dies before a worker has begun."""
    at_once = IMPORTS + START_WORKERS.replace("next(batches)", "batches.start(0)")
    command = [sys.executable, "-c", at_once + "import time; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as main:
        assert main.stdout is not None
        pids = [int(pid) for pid in main.stdout.readline().split()]
        assert len(pids) == 2
        main.kill()
    deadline = time.monotonic() + 40
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_running, pids))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
