"""What ``selftask check`` says about planted faults, and about what its steps do not reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from selftask.cli.check import load, main
from selftask.equivalence.durations import shorten_durations
from selftask.equivalence.tiny_recipe import make_tiny

SOURCE = '''
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean
from selftask.methods.base import Method
from selftask.registry import register_method


@register_method("faulty")
class Faulty(Method):
    """One fault of several kinds."""

    loss_reduction = "samples"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        fault: str = "none"
        late_start: int | str = setting("10 epochs", duration=True)
        plain_start: int = 0

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(()))
        self.unsaved = 0.0

    def setup(self, task):
        from selftask.config.values.duration import steps_in

        self.start = steps_in(self.config.late_start, task.length)

    def on_forward(self, task):
        late = task.steps_done >= self.start and task.steps_done >= self.config.plain_start
        task.last_batch["late"] = float(late)

    def forward(self, output, batch):
        fault = self.config.fault
        loss = (output[0] - output[1]).square().sum(dim=1).mean()
        if fault == "draw":
            loss = loss * (1 + torch.rand(()))
        if fault == "dropout":
            loss = loss + F.dropout(output, 0.5).square().mean()
        if fault == "sum":
            loss = loss / output.std()
        if fault == "late":
            loss = loss + batch["late"] * output.std()
        return loss + 0.1 * (self.mean + self.unsaved) * output.square().mean()

    def on_update(self, task):
        mean = task.last_batch.output.detach().mean()
        if self.config.fault != "unreduced":
            mean = all_reduce_mean(mean)
        if self.config.fault == "unsaved":
            self.unsaved += float(mean)
        self.mean.lerp_(mean, 0.5)
'''


@pytest.fixture
def faulty(tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["faulty", "import=[faulty]", "--ranks=1,2", *words])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        ("draw", "random numbers differ: a step uses the global generator of torch"),
        pytest.param("dropout", "random numbers differ", marks=pytest.mark.slow),
        ("sum", "a missing sum over ranks"),
        ("unreduced", "state that is not reduced?"),
        ("unsaved", "state that is not saved?"),
        ("late", "a missing sum over ranks"),
    ],
)
def test_hints_tell_planted_faults_apart(
    fault: str, hint: str, faulty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """``late`` begins after ten epochs of the recipe, and within the steps of the check."""
    code, output = check(capsys, f"method.fault={fault}")
    assert code == 1, output
    others = {"random numbers", "missing sum", "that is not reduced", "that is not saved"}
    assert hint in output, output
    assert not [other for other in others if other in output and other not in hint]


def test_what_is_not_reached_is_named(faulty: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A duration from the command line is kept; an undeclared number is seen when compared."""
    code, output = check(capsys, "method.fault=late", "method.late_start=2", "method.plain_start=5")
    assert code == 0, output
    assert "not reached in these steps: step 5, which faulty.py:36 compares" in output
    assert "(--steps 6)" in output
    code, output = check(capsys, "method.late_start=7 steps")
    assert "not reached in these steps: method.late_start=7 steps (--steps 8)" in output


def test_durations_of_shipped_recipes_become_one_step() -> None:
    words = ["method.freeze_last_layer=2 epochs"]
    small = make_tiny(load("dino/digits", words), batch_size=8, steps=3)
    short = shorten_durations(small)
    assert short.method.args["freeze_last_layer"] == "2 epochs", "the command line is kept"
    assert small.method.args["teacher_temperature"]["warmup"] == "50%"
    assert short.method.args["teacher_temperature"]["warmup"] == 1
    assert short.optimizer.warmup == 1
    assert short.method.args["momentum"] == small.method.args["momentum"]
