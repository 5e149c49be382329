"""Changes that `selftask plan` suggests: a run accepts each of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.plan import remedies
from selftask.plan.assumptions import Assumptions
from selftask.plan.memory import RankMemory


@dataclass(frozen=True)
class Data:
    config: Config


@pytest.mark.parametrize(
    ("setting", "left_out"),
    [
        ("train.log_every=1", None),
        ("optimizer=muon", "parallel.reduce=fsdp"),
        ("train.step=manual", "train.precision=bfloat16"),
    ],
)
def test_a_run_accepts_each_suggested_change(
    setting: str, left_out: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each of them made the run fit."""
    monkeypatch.setattr(remedies, "fake_task", lambda *_: nullcontext())
    monkeypatch.setattr(remedies, "simulate", lambda *_: None)
    monkeypatch.setattr(remedies, "rank_memory", lambda *_: RankMemory({"weights": 1}))
    words = ["launch.processes=2", "train.precision=float32", setting]
    config = load_config("simclr", words)
    plan: Any = SimpleNamespace(
        config=config,
        data=Data(config),
        memory=RankMemory({"weights": 100}),
        assumptions=Assumptions(memory=10.0),
    )
    changes = [one.words for one in remedies.remedies(plan)]
    assert ({"train.precision=bfloat16", "parallel.reduce=fsdp"} - {left_out}) <= {*changes}
    assert left_out not in changes
    for change in changes:
        load_config("simclr", [*words, *change.split()])
