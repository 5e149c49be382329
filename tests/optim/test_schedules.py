"""Schedules by name beside their formulas."""

from __future__ import annotations

import math

import pytest

from selftask.errors import UserError
from selftask.optim.schedules import build_schedule


def test_exponential_after_a_warmup() -> None:
    schedule = build_schedule("exponential", 0.8, 0.002, warmup=0.2, warmup_start=0.1)
    assert schedule(0.1) == pytest.approx(0.1 + 0.7 * 0.5)
    for where in (0.2, 0.4, 0.9, 0.999):
        progress = (where - 0.2) / 0.8
        wanted = math.exp((1 - progress) * math.log(0.8) + progress * math.log(0.002))
        assert schedule(where) == pytest.approx(wanted)


def test_exponential_cannot_reach_zero() -> None:
    with pytest.raises(UserError, match=r"exponential: from 0\.8 it cannot end at 0"):
        build_schedule("exponential", 0.8, 0.0)
