"""Ranks that cannot train together are told why, before the first step."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tiny
from ranks import run_ranks
from selftask.data.fingerprint import check_same_on_all_ranks
from selftask.data.source import Source
from selftask.distributed import process_group
from selftask.distributed.collectives import gather_objects
from selftask.distributed.world import World, read_world
from selftask.errors import UserError
from selftask.logs import write_json
from selftask.run import early_errors
from selftask.run.board import Board
from selftask.run.early_errors import find_early_error, find_end_of_rank0, report_early_errors
from selftask.run.watchdog import Watch


class Named(Source):
    """Images that are only names and labels."""

    def __init__(self, names: list[str], labels: list[int]) -> None:
        self.names, self.labels = names, np.array(labels)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        raise AssertionError("no image is read")

    def path(self, index: int) -> str:
        return self.names[index]

    def describe(self) -> str:
        return "names"


def _compare(rank: int) -> list[str]:
    same = (["a", "b"], [0, 1])
    others = [same, (["a"], [0]), (["a", "c"], [0, 1]), (["a", "b"], [1, 0]), None]
    said = []
    for other in others:
        mine = same if rank == 0 else other
        try:
            check_same_on_all_ranks(None if mine is None else Named(*mine), "data")
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def test_ranks_that_see_different_data() -> None:
    """Number, names, or labels: the same words on both ranks."""
    first, second = run_ranks(_compare, 2)
    assert first == second
    host = socket.gethostname()
    same, fewer, names, labels, none = first
    assert same == ""
    assert f"data: rank 1 on {host} sees other data than rank 0 on {host}: 2 images" in fewer
    assert "2 images on rank 0, 1 on rank 1; every rank must see the same files" in fewer
    assert "as many images (2), but not the same names or order" in names
    assert "other labels" in labels
    assert "2 images on rank 0, 0 on rank 1" in none


@pytest.mark.parametrize(
    ("device", "backend"), [("cuda:1", "nccl"), ("xpu:1", "xccl"), ("cpu", "gloo")]
)
def test_how_the_process_group_is_made(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backend by device, meeting point by the launcher, and the time limit of collectives."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kw: made.append((args, kw)))
    for master, meeting in ((("n1", 4321), "tcp://n1:4321"), (None, "env://")):
        world = World(3, 4, 1, 2, master=master)
        process_group.join_world(world, torch.device(device), timeout_s=7)
        ((args, options),) = made
        assert args == (backend,) and options["init_method"] == meeting
        assert (options["rank"], options["world_size"]) == (3, 4)
        assert options["timeout"].total_seconds() == 7
        assert options["device_id"] == (None if device == "cpu" else torch.device(device))
        made.clear()
    monkeypatch.setenv("SELFTASK_INIT_FILE", "/shared/a file")
    process_group.join_world(World(3, 4, 1, 2), torch.device(device))
    assert made.pop()[1]["init_method"] == "file:///shared/a file"
    process_group.join_world(World(), torch.device(device))
    assert made == [], "one process needs none"


def _by_file(rank: int, folder: Path) -> None:
    """In a process that knows its rank, and a file in place of an address."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update({**own, "SELFTASK_INIT_FILE": str(folder / "new file")})
    world = read_world()
    process_group.join_world(world, torch.device("cpu"), timeout_s=30)
    (folder / str(rank)).write_text(str(gather_objects(world.rank)))
    process_group.leave_world()


def test_ranks_meet_by_a_file(tmp_path: Path) -> None:
    mp.start_processes(_by_file, (tmp_path,), nprocs=2, start_method="forkserver")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[0, 1]"] * 2


def _watch_one_another(rank: int) -> bool:
    job = {"JOB_ID": "7", "GLOBALID": str(rank), "NTASKS": "2"}
    os.environ.update({f"SUBMITIT_LOCAL_{name}": value for name, value in job.items()})
    socket.gethostname = lambda: "no-such-host.invalid"
    board = Board(rank)
    board.set(str(rank), "here")
    gather_objects(None)
    is_there = board.has(str(1 - rank))
    gather_objects(None)  # rank 0 hosts the board
    return is_there


def test_the_board_is_where_the_ranks_have_met() -> None:
    """The name of a machine may not resolve, as in some containers."""
    assert run_ranks(_watch_one_another, 2) == [True, True]


def _two_runs(rank: int) -> list[str]:
    for _ in range(2):
        watch = Watch(rank, 2, timeout_s=60, report=lambda failure: None)
        watch.stop()
        gather_objects(None)
        watch.end()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate() if t.name.startswith("selftask")]
        if not names:
            break
        time.sleep(0.05)
    return names


def test_no_thread_of_a_run_outlives_it() -> None:
    """In a script that trains several times."""
    assert run_ranks(_two_runs, 2) == [[], []]


def test_an_early_error_is_left_for_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_PORT": 7}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "n1")
    with pytest.raises(UserError, match="no room"), report_early_errors(tmp_path):
        raise UserError("no room")
    error = find_early_error(tmp_path, ":n1:7::")
    assert error is not None
    assert (error.rank, error.message) == (1, f"no room (on {socket.gethostname()})")
    assert find_early_error(tmp_path, "n1:8::") is None, "of another attempt"
    with report_early_errors(tmp_path):
        pass
    assert find_early_error(tmp_path, ":n1:7::") is None, "it has started again"


def test_an_error_of_the_command_before_does_not_end_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun on each machine by hand: attempts have the same name, and rank 1 starts later."""
    monkeypatch.setattr(early_errors, "_EVERY_S", 0.01)
    monkeypatch.setattr(early_errors, "_STARTED", time.time())
    ended = threading.Event()
    monkeypatch.setattr(early_errors, "_end_process", lambda rank, failure: ended.set())
    error = {"attempt": ":n1:7::", "message": "no data", "updated": time.time() - 60}
    (tmp_path / "errors").mkdir()
    write_json(tmp_path / "errors" / "early_rank1.json", error)
    first = World(0, 2, 0, 1, launcher="torchrun", attempt=":n1:7::")
    with early_errors.watch_others(tmp_path, first, lambda failure: None):
        assert not ended.wait(0.3)
        write_json(tmp_path / "errors" / "early_rank1.json", {**error, "updated": time.time()})
        assert ended.wait(20)


def test_the_others_learn_how_rank_0_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after it wrote a status; of an earlier attempt or start nothing counts."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": 7}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "n1")

    def end(since: float, attempt: str = ":n1:7::") -> str | None:
        failure = find_end_of_rank0(tmp_path, attempt, since)
        return None if failure is None else failure.message

    start = time.time()
    assert end(start) is None
    with pytest.raises(UserError, match="no data"), report_early_errors(tmp_path):
        raise UserError("no data")
    assert str(end(start)).startswith("no data (on ")
    assert end(start, "n1:8::") is None and end(time.time()) is None
    with report_early_errors(tmp_path):
        assert end(start) is None, "it has started again"
    status = {"attempt": ":n1:7::", "updated": time.time()}
    for state, message in (("running", None), ("failed", "port"), ("interrupted", None)):
        write_json(
            tmp_path / "status.json", {**status, "state": state, "error": message, "by": "I"}
        )
        expected = {"running": None, "failed": "port", "interrupted": "interrupted by I"}[state]
        assert (end(start), end(time.time())) == (expected, None)


def test_ranks_that_have_not_arrived_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 2 has arrived, rank 3 did so in an earlier attempt, and of rank 1 there is no sign."""
    monkeypatch.setattr(early_errors, "_EVERY_S", 0.01)
    monkeypatch.setattr(early_errors, "_WARN_S", 0.03)

    def world(rank: int, attempt: str = "now") -> World:
        return World(rank, 4, rank, 4, attempt=attempt)

    def meet(one: World) -> AbstractContextManager[None]:
        return early_errors.watch_others(tmp_path, one, lambda failure: None)

    def waiting_lines() -> list[str]:
        return [text for text in caplog.messages if text.startswith("waiting for rank")]

    with caplog.at_level("WARNING", "selftask"), meet(world(2)), meet(world(3, "then")):
        assert early_errors.missing_ranks(tmp_path, world(0)) == [1, 3]
        with meet(world(0)):
            end = time.monotonic() + 20
            while len(waiting_lines()) < 2 and time.monotonic() < end:
                time.sleep(0.01)
        number = len(waiting_lines())
    assert number >= 2, "again and again"
    assert all(
        text.startswith("waiting for rank 1, 3 of 4 for 0 s: not sta") for text in waiting_lines()
    )
    assert not (tmp_path / "errors").exists(), "all have met"
    with meet(World()):
        assert not (tmp_path / "errors").exists(), "one process waits for nobody"


def _start_by_hand(folder: Path, port: int, *words: list[str]) -> tuple[list[int], list[list[str]]]:
    """Start a rank for each list of words; return their exit codes and output lines."""
    world = {"WORLD_SIZE": str(len(words)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank, more in enumerate(words):
        command = tiny.command("simclr", folder, "run", *more)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                command,
                env={**tiny.environment(), **world, **own},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    return [rank.returncode for rank in ranks], said


@pytest.mark.slow
@pytest.mark.parametrize("taken", [True, False])
def test_the_others_stop_if_rank_0_ends_before_they_meet(taken: bool, tmp_path: Path) -> None:
    """Its port is taken, or its data missing: a minute, not the twenty of the process group."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        if not taken:
            server.close()
        codes, said = _start_by_hand(tmp_path, port, [] if taken else ["data=nowhere"], [])
    assert codes == [2, 1], said
    cause = "if the port is taken, set MASTER_PORT" if taken else "data: no such"
    assert cause in said[0][-1] and cause in said[1][-1], said
    assert said[1][-1].startswith("rank 1 stops: rank 0 has ended: ")
    status = tiny.status(tmp_path / "run")
    assert (status["state"], status["rank"]) == ("failed", 0)


@pytest.mark.slow
def test_rank_0_names_the_rank_that_failed_before_they_met(tmp_path: Path) -> None:
    """Data missing on one node: rank 0 does not wait for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    codes, said = _start_by_hand(tmp_path, port, [], ["data=nowhere"])
    assert codes == [1, 2]
    assert "RUN FAILED at step 0 on rank 1: data: no such" in said[0][-1], said
    assert said[0][-1] in (tmp_path / "run/log.txt").read_text()
    status = tiny.status(tmp_path / "run")
    assert (status["state"], status["rank"]) == ("failed", 1)
