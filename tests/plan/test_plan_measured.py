"""The figures of a plan against a real run: torch's profiler, and the checkpoint on the disk."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.plan.assumptions import Assumptions, take_assumptions
from selftask.plan.plan import make_plan
from selftask.plan.remedies import remedies
from selftask.registry import METHODS
from selftask.task import Task

pytestmark = pytest.mark.slow

VIT = ("backbone=vit_tiny", "backbone.img_size=32", "backbone.patch_size=4", "train.batch_size=32")
RUNS = {
    "simclr": ("simclr/digits", "backbone=resnet18", "train.batch_size=64"),
    "mae": ("mae/digits", *VIT),
    "dino": ("dino/digits", *VIT),
    "bfloat16": ("simclr/digits", "train.precision=bfloat16", "train.batch_size=128"),
    "recomputed": ("mae/digits", *VIT, "parallel.activation_checkpointing=blocks"),
    "accumulated": ("byol/digits", "train.step=accumulate", "train.accumulate=3"),
}


def config_of(out: Path, recipe: str, *words: str) -> Config:
    short = ("train.max_steps=3", "train.epochs=null", "eval.evaluations={}", "data.num_workers=0")
    return load_config(recipe, [*words, *short, f"out={out}"])


def train_and_measure(config: Config, trace: Path) -> int:
    """Train; return the greatest sum, in a step, of what torch's allocator has out on loan.

    Memory that an earlier profile has seen counts below zero when it is freed during this one, so
    the tasks of the tests before are freed first.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        task = Task(config)
        step = task.train_step_function
        task.train_step_function = lambda task: record_function("a step")(step)(task)
        for _ in task.steps():
            pass
        task.close()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "a step"]
    assert len(steps) >= 3  # and one call that finds no further batch
    moves = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    moves.sort(key=lambda move: move[0])  # of equal times as the trace has them
    total = peak = 0
    for time, size in moves:
        total += size
        if any(start <= time <= end for start, end in steps):
            peak = max(peak, total)
    return peak


@pytest.mark.parametrize("name", RUNS)
def test_memory_and_checkpoint_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", *RUNS[name])
    plan = make_plan(config, Assumptions())
    measured = train_and_measure(config, tmp_path / "trace.json")
    tolerance = 0.15 if name == "bfloat16" else 0.1  # oneDNN copies more with AVX-512
    assert plan.memory.total == pytest.approx(measured, rel=tolerance)
    (file,) = sorted((tmp_path / "run" / "checkpoints").glob("*.pt"))[-1:]
    assert plan.checkpoints.size == pytest.approx(file.stat().st_size, rel=0.02)


OTHERS = ("dinov2/vitg14_imagenet", "simmim/swin_base_imagenet", "vicregl/convnext_small_imagenet")


def test_every_method_can_be_planned() -> None:
    for name in (*(f"{method}/digits" for method in METHODS.names()), *OTHERS):
        rest, given = take_assumptions(["samples=1.28M", "side=32", "classes=10"])
        plan = make_plan(load_config(name, rest), given)
        assert plan.step.flops["forward"] > 0, name
        assert plan.memory.of["activations"] > 0, name
        assert plan.checkpoints.size > plan.memory.of["weights"], name


def test_remedies_fit_and_say_what_they_change() -> None:
    words = ["samples=1.28M", "launch.processes=8", "memory=24GB", "train.precision=float32"]
    rest, given = take_assumptions(words)
    config = load_config("mae/vit_base_imagenet", rest)
    plan = make_plan(config, given)
    assert not plan.memory.fits(24e9)
    actual = {remedy.words: remedy.memory for remedy in remedies(plan)}
    assert "parallel.activation_checkpointing=blocks" in actual
    assert "train.batch_size=1024 train.accumulate=4 train.step=accumulate" in actual
    for change, memory in actual.items():
        changed = make_plan(load_config("mae/vit_base_imagenet", [*rest, *change.split()]), given)
        assert changed.memory.total == memory.total <= 0.95 * 24e9


def test_the_page_shows_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```sh\nselftask ([^\n]*)\n```\n\n```text\n(.*?)^```", page, re.M | re.S)
    assert len(shown) == 2
    for command, output in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out == output
