"""Conditions for log lines by line of code, and the mean run time of a function."""

from __future__ import annotations

import math

import pytest
import torch

from selftask.logs import limited, pace
from selftask.logs.limited import every_n, every_n_seconds, first_n
from selftask.logs.pace import TimeCounter


def test_calls_are_counted_by_line_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_calls", type(limited._calls)())
    seen = [(first_n(2), every_n(3)) for _ in range(7)]
    assert [first for first, _ in seen] == [True, False, False, False, False, False, False]
    pairs = []
    for _ in range(7):
        a = first_n(2)
        b = every_n(3)
        pairs.append((a, b, first_n()))
    assert [a for a, _, _ in pairs] == [True] * 2 + [False] * 5
    assert [b for _, b, _ in pairs] == [True, False, False, True, False, False, True]
    assert [c for _, _, c in pairs] == [True] + [False] * 6


def test_seconds_pass_by_line_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(limited.time, "monotonic", lambda: now[0])
    seen = []
    for moment in (0.0, 1.0, 2.0, 2.5, 3.9, 4.0):
        now[0] = 50.0 + moment
        a = every_n_seconds(2)
        b = every_n_seconds(1.5)
        seen.append((a, b))
    assert [a for a, _ in seen] == [True, False, True, False, False, True]
    assert [b for _, b in seen] == [True, False, True, False, True, False]


def test_mean_time_without_the_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [0.0], []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pace, "wait_for", waited.append)
    counter = TimeCounter(skip=2, device=torch.device("cpu"))

    @counter
    def work(seconds: float) -> float:
        now[0] += seconds
        return seconds

    assert math.isnan(counter.mean_s)
    assert [work(seconds) for seconds in (90.0, 80.0, 1.0)] == [90.0, 80.0, 1.0]
    with counter:
        now[0] += 4.0
    assert (counter.count, counter.total_s, counter.mean_s) == (2, 5.0, 2.5)
    assert waited == [torch.device("cpu")] * 8  # before and after each call
