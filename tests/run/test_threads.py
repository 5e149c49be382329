"""``train.threads``: what auto is, and that a stop does not change it, bit for bit."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from selftask.config.schema import Config
from selftask.config.values import auto_values
from selftask.distributed.world import World
from selftask.task import numerics
from selftask.task.numerics import num_threads

CORES = {1: 1, 2: 1, 3: 2, 4: 3, 8: 6, 16: 12, 64: 48}


def config(folder: Path, *more: str) -> Config:
    return tiny.config("simclr", folder, "run", "train.threads=auto", *more)


@pytest.mark.parametrize("cores", CORES)
def test_auto_on_a_cpu_does_not_depend_on_the_workers(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_cores(cores, monkeypatch)
    auto = config(tmp_path)
    for workers in (0, 1, cores, 8):
        chosen = replace(auto, data=replace(auto.data, num_workers=workers))
        assert num_threads(chosen, World()) == CORES[cores]
    chosen = replace(auto, data=replace(auto.data, num_workers=4))
    assert num_threads(chosen, World(local_size=cores)) == 1
    chosen = replace(auto, train=replace(auto.train, threads=5))
    assert num_threads(chosen, World(local_size=2)) == 5


def test_auto_with_a_gpu_leaves_the_workers_their_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_cores(16, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = config(tmp_path, "train.device=auto", "data.num_workers=6")
    assert num_threads(chosen, World()) == 10
    assert num_threads(chosen, World(local_size=4)) == 1


@pytest.mark.parametrize(
    ("launcher", "usable", "expected"),
    [("slurm", 8, 6), ("slurm", 32, 6), ("slurm", 64, 6), ("slurm", 2, 1), ("torchrun", 8, 1)],
    ids=["bound", "not bound", "whole machine", "bound to fewer", "in one task"],
)
def test_a_rank_bound_by_srun_uses_all_of_its_own_cores(
    launcher: str, usable: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on a node of which the job has 32 cores."""
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "32")
    give_cores(usable, monkeypatch)
    assert num_threads(config(tmp_path), World(local_size=4, launcher=launcher)) == expected


def give_cores(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (auto_values, numerics):
        monkeypatch.setattr(module, "cores", lambda: number)


WHOLE, WORKERS = ("train.threads=3", "data.num_workers=0"), "data.num_workers=2"


@pytest.mark.slow
def test_a_stop_keeps_the_threads(tmp_path: Path) -> None:
    """Three threads; resumed by auto on one core and with workers. The sums of one differ."""
    folder, net = tmp_path, ("backbone.width=32", "train.epochs=2")

    def trained(out: str, *more: str, on: str = "") -> Path:
        words = tiny.command("simclr", folder, out, *net, *more)
        result = tiny.run([*on.split(), *words], folder)
        assert result.returncode == 0 or "train.stop_at=6" in more, result.stderr
        return folder / out

    whole = trained("whole", *WHOLE)
    one = trained("one", "train.threads=1")
    trained("parts", *WHOLE, "train.stop_at=6")
    one_core = f"taskset -c {min(os.sched_getaffinity(0))}"
    parts = trained("parts", "train.threads=auto", WORKERS, on=one_core)
    assert "threads: 3 of torch as before the stop" in (parts / "log.txt").read_text()
    assert tiny.differences(tiny.last_state(whole), tiny.last_state(parts)) == []
    assert tiny.rows(whole) == tiny.rows(parts)
    different = tiny.differences(tiny.last_state(whole), tiny.last_state(one))
    assert [place for place in different if place.startswith(".model")]


def test_a_run_says_that_it_goes_on_with_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.train("simclr", tmp_path, "run", "train.stop_at=2")
    saved = tiny.last_state(tmp_path / "run")["threads"]
    assert saved == [1]
    go_on = tiny.task("simclr", tmp_path, "run")
    try:
        torch.set_num_threads(2)
        with caplog.at_level(logging.WARNING):
            go_on.prepare()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
        go_on.close()
    assert "threads: 2 of torch, 1 before the stop" in caplog.text
