"""A meter of the user: the example of docs/phases.md, and what is no meter."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from page_blocks import ROOT
from selftask.classy import ClassyMeter
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.registry import METERS
from selftask.task import build
from selftask.task.scoring import log_meters


def test_the_meter_of_the_page_is_the_mean_confidence(forget_names: None, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "phases.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# confidence.py.*?)^```", page, re.M | re.S)
    scope: dict[str, Any] = {"__name__": "confidence", "__file__": str(tmp_path)}
    exec(compile(code, str(tmp_path / "confidence.py"), "exec"), scope)
    scores = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    meter, resumed = scope["Confidence"](), scope["Confidence"]()
    assert meter.value == {"mean": 0.0}
    for part in scores.split(3):
        meter.update(part, torch.zeros(len(part)))
    meter.sync_state()
    resumed.set_classy_state(meter.get_classy_state())
    expected = float(torch.softmax(scores, 1).max(1).values.mean())
    assert meter.value == resumed.value == {"mean": pytest.approx(expected)}


class Plain:
    def update(self, model_output: Any, target: Any) -> None: ...


class Narrow(ClassyMeter):  # type: ignore[misc]
    def update(self, scores: Any) -> None: ...


class OneNumber(ClassyMeter):  # type: ignore[misc]
    value = 0.5

    def sync_state(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Plain, "meters.own: Plain must extend selftask.classy.ClassyMeter"),
        (Narrow, r"update of meters.own is called with \(model_output, target\), and takes \(sco"),
    ],
)
def test_what_is_no_meter_is_named(
    kind: type, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METERS._registered, "own", kind)
    config = SimpleNamespace(meters={"own": Component(name="own")})
    task: Any = SimpleNamespace(
        config=config, out=Path(), data_module=SimpleNamespace(val_source=None)
    )
    with pytest.raises(UserError, match=rf"test_own_meter.py:\d+: {message}"):
        build.meters(task)


def test_a_value_without_names_is_an_error() -> None:
    config = SimpleNamespace(meters={"own": Component(name="own")})
    task: Any = SimpleNamespace(config=config, meters=[OneNumber()], train=False)
    with pytest.raises(UserError, match=r"test_own_meter.py:\d+: value of OneNumber is 0.5; numb"):
        log_meters(task)
