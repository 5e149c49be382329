"""Durations in words."""

from __future__ import annotations

import pytest

from selftask.config.values.duration import Duration, parse_duration


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("10 epochs", 70),
        ("1 epoch", 7),
        ("0.5 epochs", 4),  # 3.5, rounded to even
        ("500 steps", 500),
        ("500", 500),
        (20, 20),
        (0, 0),
        ("5%", 10),
        ("100 %", 200),
    ],
)
def test_in_steps(text: str | int, steps: int) -> None:
    assert parse_duration(text).steps(steps_per_epoch=7, total_steps=200) == steps


@pytest.mark.parametrize("text", ["ten epochs", "-1", "5 hours", "", "1.5 steps", "101%", True])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|whole|more than"):
        parse_duration(text)


def test_units() -> None:
    assert parse_duration("2epochs") == Duration(2, "epoch")
    assert parse_duration(" 3 step ") == Duration(3, "step")
