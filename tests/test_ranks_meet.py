"""Ranks that cannot train together are told why, before the first step."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

import tiny
from ranks import run_ranks
from selftask.data.fingerprint import check_same_on_all_ranks
from selftask.data.source import Source
from selftask.errors import UserError
from selftask.run.early_errors import find_early_error, report_early_errors


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
    assert f"data: rank 1 on {host} has 1 image, not the 2 images of rank 0 on {host}" in fewer
    assert "has 2 images with other names than rank 0" in names
    assert "has 2 images with other labels than rank 0" in labels
    assert "has 0 images, not the 2 images of rank 0" in none


def test_an_early_error_is_left_for_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_PORT": 7}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "n1")
    with pytest.raises(UserError, match="no room"), report_early_errors(tmp_path):
        raise UserError("no room")
    found = find_early_error(tmp_path, "n1:7::")
    assert found is not None
    assert (found.rank, found.message) == (1, f"no room (on {socket.gethostname()})")
    assert find_early_error(tmp_path, "n1:8::") is None, "of another attempt"
    with report_early_errors(tmp_path):
        pass
    assert find_early_error(tmp_path, "n1:7::") is None, "it has started again"


@pytest.mark.slow
def test_rank_0_names_the_rank_that_failed_before_they_met(tmp_path: Path) -> None:
    """Data missing on one node: rank 0 does not wait for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank, data in enumerate([[], ["data=nowhere"]]):
        command = tiny.command("simclr", tmp_path, "run", *data)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                command,
                env={**tiny.environment(), **world, **own},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 2]
    assert "RUN FAILED at step 0 on rank 1: data: no such" in said[0][-1], said
    assert said[0][-1] in (tmp_path / "run/log.txt").read_text()
    status = tiny.status(tmp_path / "run")
    assert (status["state"], status["rank"]) == ("failed", 1)
