"""The verdict on real small runs in which one thing is wrong, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main
from selftask.report.record import RunRecord
from selftask.report.verdict import Verdict, verdict_of

pytestmark = pytest.mark.slow

LONG = "train.epochs=20"  # 100 steps


def verdict(folder: Path, *more: str, method: str = "simclr") -> Verdict:
    words = tiny.overrides(method, folder, "run", LONG, *more)
    assert main(["train", f"{method}/digits", *words]) == 0
    return verdict_of(RunRecord.read(folder / "run"))


def test_a_healthy_run(tmp_path: Path) -> None:
    result = verdict(tmp_path, method="vicreg")
    assert result.learns is True, result
    assert result.headline.startswith("learning: the loss fell from ")


def test_weights_decay_to_nothing(tmp_path: Path) -> None:
    result = verdict(tmp_path, "optimizer.weight_decay=300", "optimizer.decay_1d=true")
    assert result.headline.startswith("collapsed at step "), result
    rows = RunRecord.read(tmp_path / "run").columns["emb_std"]
    step = int(result.headline.split()[3].rstrip(":"))
    assert max(v for s, v in zip(rows.steps, rows.values, strict=True) if s >= step) < 0.05
    assert rows.values[rows.steps.index(step) - 1] >= 0.05


def test_no_learning_rate(tmp_path: Path) -> None:
    result = verdict(tmp_path, "optimizer.lr=0")
    assert result.headline == "nothing is trained: the learning rate is 0; raise optimizer.lr"


def test_a_learning_rate_that_is_far_too_small(tmp_path: Path) -> None:
    """The hook `health` sees that no weight moves; its event says what it is about."""
    result = verdict(tmp_path, "optimizer.lr=1e-30")
    assert result.learns is False, result


def test_absurd_learning_rate(tmp_path: Path) -> None:
    result = verdict(tmp_path, "optimizer.lr=30", "optimizer.warmup=0")
    assert result.learns is not True, result
