"""Ranks for users' own tests, and the self-test of collectives that is made with them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ranks  # noqa: F401 - sets what the server imports once
from selftask.cli.main import main
from selftask.distributed.collectives import all_reduce_mean
from selftask.equivalence import self_test
from selftask.equivalence.on_ranks import on_ranks
from selftask.errors import RunError


def mean_rank(rank: int, factor: float) -> tuple[int, float]:
    return os.getpid(), float(all_reduce_mean(torch.tensor(factor * rank)))


def waits_for_nobody(rank: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def raises_on_one(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("only here")
    dist.barrier()


def dies_on_one(rank: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def killed_on_one(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_of_all_ranks() -> None:
    (first, a), (second, b) = on_ranks(mean_rank, 2, 3.0)
    assert len({first, second, os.getpid()}) == 3
    assert a == b == 1.5


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as tests start them, from a server: each new process imports torch for seconds."""
    server = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
    monkeypatch.setattr("selftask.equivalence.on_ranks.multiprocessing", server)


@pytest.mark.usefixtures("_forked")
def test_a_rank_that_hangs_is_shown_with_its_line() -> None:
    with pytest.raises(RunError) as error:
        on_ranks(waits_for_nobody, 2, timeout_s=4)
    text = str(error.value)
    assert "hung for 4 s" in text and "in waits_for_nobody" in text


@pytest.mark.usefixtures("_forked")
def test_a_rank_that_raises_or_dies_is_named() -> None:
    with pytest.raises(RunError, match=r"rank 1 of 2 raised an exception") as error:
        on_ranks(raises_on_one, 2)
    assert "ZeroDivisionError: only here" in str(error.value)
    with pytest.raises(RunError, match=r"rank 0 of 2 ended with code 7"):
        on_ranks(dies_on_one, 2)
    with pytest.raises(RunError, match=r"rank 0 of 2 was killed by SIGKILL"):
        on_ranks(killed_on_one, 2)


def wrong_sum(rank: int) -> float:
    """The exchange with a collective that adds nothing on one rank."""
    if rank == 1:
        dist.all_reduce = lambda x, *args, **more: None
    else:
        dist.all_reduce = lambda x, *args, **more: x.add_(2.0)
    return exchange(rank)


exchange = self_test.exchange


@pytest.mark.usefixtures("_forked")
def test_the_self_test_sees_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "--collectives"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("self-test") and "gloo, 2 ranks: results are right" in line
    monkeypatch.setattr(self_test, "exchange", wrong_sum)
    with pytest.raises(RunError, match=r"rank 1 .*\n(.*\n)*.*all_reduce gave \[2.0, 2.0, 2.0\]"):
        self_test.check_collectives()
