"""The entropy of targets over prototypes: one column and one definition for several methods."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import tiny
from selftask.checkpoint.kept import Kept

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
