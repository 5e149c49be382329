"""The arithmetic that a run prints, beside numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import tiny
from selftask.config.load import load_config
from selftask.config.run_length import RunLength
from selftask.optim.arithmetic import arithmetic


def half_cosine(peak: float, progress: float) -> str:
    return f"{peak * 0.5 * (1 + math.cos(math.pi * progress)):.4g}"


CASES: dict[str, tuple[list[str], int, int, list[str]]] = {
    "eight ranks, linear": (
        ["batch_size: 1024, epochs: 100", "lr: {base: 0.3, per: 256}, warmup: 10 epochs"],
        50_000,
        8,
        [
            "batch    128 a rank x 8 ranks = 1,024 samples a step",
            "epoch    48 steps of 1,024 = 49,152 of 50,000 samples",
            "run      4,800 steps = 100 epochs = 4,915,200 samples",
            "warm-up  10 epochs = 480 steps",
            (
                "lr       0.3 x 1,024 / 256 = 1.2; cosine: 0 at step 1, 1.2 at step 481, "
                f"{half_cosine(1.2, 4319 / 4320)} at step 4,800"
            ),
        ],
    ),
    "a warm-up longer than the run": (
        ["batch_size: 100, epochs: 2", "lr: 0.8, warmup: 10 epochs"],
        500,
        1,
        [
            "batch    100 a rank x 1 rank = 100 samples a step",
            "epoch    5 steps of 100 = 500 of 500 samples",
            "run      10 steps = 2 epochs = 1,000 samples",
            "warm-up  10 epochs = 50 steps, shortened to the length of the run",
            "lr       cosine: 0 at step 1, 0.72 at step 10",
        ],
    ),
    "accumulated, root": (
        [
            "batch_size: 64, accumulate: 3, step: accumulate, epochs: 2",
            "lr: {base: 0.1, per: 48, rule: sqrt}, schedule: linear, end_lr: 0.01, warmup: 0",
        ],
        700,
        2,
        [
            "batch    32 a rank x 2 ranks x 3 accumulated = 192 samples a step",
            "epoch    4 steps of 192, the last of 64 = 640 of 700 samples",
            "run      8 steps = 2 epochs = 1,280 samples",
            "warm-up  0 steps",
            # twice: sqrt(192 / 48); the last step begins after 19 of 20 batches
            (
                f"lr       0.1 x sqrt(192 / 48) = 0.2; linear: 0.2 at step 1, "
                f"{0.2 - 0.18 * 19 / 20:.4g} at step 8"
            ),
        ],
    ),
    "updated by epochs": (
        [
            "batch_size: 100, epochs: 4",
            "lr: 0.8, schedule: {name: cosine, update: epoch}, warmup: 0",
        ],
        1000,
        1,
        [
            "batch    100 a rank x 1 rank = 100 samples a step",
            "epoch    10 steps of 100 = 1,000 of 1,000 samples",
            "run      40 steps = 4 epochs = 4,000 samples",
            "warm-up  0 steps",
            f"lr       cosine: 0.8 at step 1, {half_cosine(0.8, 3 / 4)} at step 40",
        ],
    ),
    "cut short, 1 rank": (
        [
            "batch_size: 10, epochs: 3, max_steps: 15",
            "lr: 0.5, schedule: constant, warmup: 20%, start_lr: 0.2",
        ],
        100,
        1,
        [
            "batch    10 a rank x 1 rank = 10 samples a step",
            "epoch    10 steps of 10 = 100 of 100 samples",
            "run      15 steps = 1.5 epochs = 150 samples",
            "warm-up  20% = 3 steps",
            "lr       constant: 0.2 at step 1, 0.5 at step 4, 0.5 at step 15",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers(case: str) -> None:
    (train, optimizer), samples, ranks, expected = CASES[case]
    words = [f"train={{{train}}}", f"optimizer={{name: sgd, {optimizer}}}"]
    config = load_config("supervised/digits", words)
    length = RunLength.of(config.train, samples)
    assert arithmetic(config, length, ranks) == ["arithmetic:", *(f"  {row}" for row in expected)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_printed_once_and_holds(
    accumulate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The learning rates of the rows are those that were announced; a step has 16 samples."""
    words = ["train.epochs=1", "optimizer.lr={base: 0.08, per: 32}", "optimizer.warmup=2"]
    if accumulate > 1:
        words += ["train.step=accumulate", "train.accumulate=2", "train.batch_size=8"]
    with caplog.at_level("DEBUG", logger="selftask"):
        tiny.train("simclr", tmp_path, "run", *words)
    logged = [message.strip() for message in caplog.messages if message.startswith("  lr       ")]
    assert len(logged) == 1
    assert logged[0].startswith(
        "lr       0.08 x 16 / 32 = 0.04; cosine: 0 at step 1, 0.04 at step 3"
    )
    rows: list[dict[str, Any]] = [row for row in tiny.rows(tmp_path / "run") if "lr" in row]
    assert [f"{rows[i]['lr']:.4g}" for i in (0, 2)] == ["0", "0.04"]
    assert logged[0].endswith(f"{rows[4]['lr']:.4g} at step 5")
