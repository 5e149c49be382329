"""Rows of the log: times and memory over ranks, settings of groups, and their history."""

from __future__ import annotations

import resource
import statistics
from pathlib import Path

import pytest
import torch

import tiny
from ranks import run_ranks
from selftask.logs import format_row, pace, read_metrics
from selftask.logs.history import LENGTH, History
from selftask.logs.pace import Pace, memory_mb, over_ranks, settings_of_groups


def test_pace_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a second and one with an evaluation of ten seconds before it."""
    now = [100.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    measured = Pace()
    for seconds in (1.0, 11.0, 1.0):
        now[0] += seconds
        measured.step_ends()
    row = measured.take(data_wait_s=2.6)
    assert row == pytest.approx({"data_wait": 0.2, "step_s": 13 / 3, "step_s_median": 1.0})
    assert measured.mean_s == pytest.approx(13 / 3)
    now[0] += 2.0
    measured.step_ends()
    assert measured.take(2.6)["data_wait"] == 0.0
    assert measured.mean_s == pytest.approx(15 / 4)


def unequal(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    terms = {"a": torch.tensor(1.0 + rank), "b": torch.tensor(4.0, dtype=torch.bfloat16)}
    return over_ranks(terms, {"step_s": 0.5 * rank, "memory_mb": 8.0 - rank}, torch.device("cpu"))


def test_over_ranks() -> None:
    for means, maxima in run_ranks(unequal, 2):
        assert means == {"a": 1.5, "b": 4.0}
        assert maxima == {"step_s": 0.5, "memory_mb": 8.0}


def test_settings_of_groups() -> None:
    equal = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.1}]
    assert settings_of_groups(equal) == {}
    unequal = [{"lr": 0.1, "weight_decay": 0.05, "name": "head"}, {"lr": 0.2, "weight_decay": 0}]
    assert settings_of_groups(unequal) == {"weight_decay": 0.05, "lr/head": 0.1, "lr/1": 0.2}


def test_the_rows_of_a_run(tmp_path: Path) -> None:
    tiny.train("simclr", tmp_path, "run", "train.log_every=4")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    each = tiny.rows(tmp_path / "run")
    tiny.train("simclr", tmp_path, "every", "train.log_every=1")
    losses = [row["loss"] for row in tiny.rows(tmp_path / "every")]
    assert [row["step"] for row in each] == [4, 8, 12, 15]
    for row, first in zip(rows, (0, 4, 8, 12), strict=True):
        window = losses[first : row["step"]]
        assert row["loss"] == pytest.approx(statistics.fmean(window), rel=1e-6)
        assert row["loss_median"] == pytest.approx(statistics.median(window), rel=1e-6)
        assert row["images_per_s"] * row["step_s"] == pytest.approx(tiny.BATCH_SIZE)
        assert row["step_s_median"] > 0
    assert rows[-1]["eta_s"] == 0 < rows[0]["eta_s"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert 0 < rows[0]["memory_mb"] <= rows[-1]["memory_mb"] <= peak * (1 + 1e-6)


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "device_memory_mb" not in memory_mb(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 << 30)
    peaks = memory_mb(torch.device("cuda"))
    assert (peaks["device_memory_mb"], peaks["device_reserved_mb"]) == (3072, 5120)


def test_a_line() -> None:
    row = {"step": 50, "loss": 1.23456, "loss_median": 1.2, "device_memory_mb": 1536.0}
    row |= {"eta_s": 4000.4, "memory_mb": 800.0, "lr/1": 0.1, "weight_decay": 0.05}
    assert format_row(row) == "step 50  loss 1.235  device_memory 1.5 GiB  eta 1:06:40"


def test_history_against_a_list() -> None:
    history, values = History(), [((7 * n) % 31) / 3 for n in range(2 * LENGTH)]
    for step, value in enumerate(values):
        history.add({"step": step, "loss": value, "images_per_s": 1.0, "text": "no number"})
    assert history.keys() == {"loss", "images_per_s"}
    loss = history["loss"]
    assert loss.last() == values[-LENGTH:] and loss.latest == values[-1]
    assert loss.mean(10) == pytest.approx(sum(values[-10:]) / 10)
    assert loss.median(9) == sorted(values[-9:])[4]
    assert (loss.min(5), loss.max(5)) == (min(values[-5:]), max(values[-5:]))
    with pytest.raises(KeyError, match=r"no column 'los' in the rows so far; did you mean 'loss'"):
        history["los"]
    copied = History()
    copied.load_state_dict(history.state_dict())
    assert copied.keys() == {"loss"}, "what a clock measured is not part of a state"
    assert copied["loss"].last() == loss.last() and copied["loss"].steps == loss.steps


def test_history_survives_a_resume(tmp_path: Path) -> None:
    whole = tiny.train("simclr", tmp_path, "whole").history
    tiny.train("simclr", tmp_path, "run", "train.stop_at=7")
    resumed = tiny.train("simclr", tmp_path, "run").history
    assert whole["loss"].last() == resumed["loss"].last() and len(whole["loss"].values) == 15
