"""The entropy of targets over prototypes: one column and one definition for several methods."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from selftask.checkpoint.kept import Kept
from selftask.methods.families.prototypes import log_target_entropy

TARGETS = {
    "dino": "probs",
    "esvit": "probs",
    "ibot": "image_targets",  # as dinov2 and dinov3
    "msn": "targets",
}  # method -> name of the probabilities (..., K) in the batch


@pytest.mark.parametrize("method", TARGETS)
def test_the_column_is_the_mean_entropy_of_the_targets(method: str, tmp_path: Path) -> None:
    task = tiny.train(method, tmp_path, "run", "train.max_steps=1")
    probs = task.last_batch[TARGETS[method]].double()
    entropies = [
        -sum(p * math.log(p) for p in row if p > 0) for row in probs.flatten(0, -2).tolist()
    ]
    (row,) = tiny.rows(tmp_path / "run")
    assert row["target_entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
    assert 0 < row["target_entropy"] < math.log(probs.shape[-1])


def test_it_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    best = "train.keep_best={metric: target_entropy, mode: min}"
    words = [best, "train.checkpoint_every=1 step", "train.max_steps=4", "optimizer.lr=0.05"]
    tiny.train("msn", tmp_path, "run", *words)
    values = {row["step"]: row["target_entropy"] for row in tiny.rows(tmp_path / "run")}
    kept = Kept.read(tmp_path / "run" / "checkpoints").best
    assert [step for step, _ in kept] == [min(values, key=values.__getitem__)]


def test_it_is_logged_as_the_mean_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has collapsed to one prototype: an entropy of 0."""
    monkeypatch.setattr("selftask.methods.families.prototypes.all_reduce_mean", lambda x: x / 2)
    logged: dict[str, float] = {}
    task: Any = SimpleNamespace(should_log=True, log=logged.__setitem__)
    log_target_entropy(torch.full((3, 4), 0.25), task)
    assert logged["target_entropy"] == pytest.approx(math.log(4) / 2)
    task.should_log = False
    logged.clear()
    log_target_entropy(torch.full((3, 4), 0.25), task)
    assert not logged
