"""NaN: found, dumped, replayed; and what train.on_nan does about it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from nan_runs import failure, inject

import tiny
from ranks import run_ranks
from selftask.cli.main import main
from selftask.hooks.base import function_hook
from selftask.hooks.failures.non_finite import NonFiniteLoss, is_finite
from selftask.task import repeat
from selftask.task.loop import Interrupted, train_loop
from selftask.task.replay import replay


@pytest.mark.parametrize("step", [3, 7])  # before the first checkpoint, and after it
def test_stop_finds_the_step_and_dumps_it(tmp_path: Path, step: int) -> None:
    text = failure(tmp_path, inject("nan_input", step), "train.log_every=4")
    image = r"\(view main\[0\] of \S+\)"
    assert re.search(rf"is nan at step {step} on rank 0: its images are not finite {image}", text)
    assert "Look at the images that the replay lists" in text and "optimizer.lr" not in text
    folder = tmp_path / "run/failures" / f"step_{step}"
    assert str(folder) in text
    assert json.loads((folder / "failure.json").read_text())["step"] == step

    result = replay(folder, [])
    assert result.same
    assert result.module.startswith("network.backbone.")
    assert "Conv2d" in result.module
    assert "not finite either" in result.module
    assert result.images[0] in text
    assert not result.weights
    assert result.gradients


def test_the_dump_holds_the_state_before(tmp_path: Path) -> None:
    """It is that of a run that was stopped before the step."""
    failure(tmp_path, inject("nan_input", 3))
    tiny.train("simclr", tmp_path, "other", "train.stop_at=2")
    dumped = torch.load(next((tmp_path / "run/failures/step_3").glob("step_*.pt")))
    stopped = tiny.last_state(tmp_path / "other")
    for part in ("model", "method", "optimizer", "clock", "rng"):
        assert not tiny.differences(dumped[part], stopped[part]), part


def test_the_first_module_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A weight that is infinite, deep in the network; by the command."""
    task = tiny.task("moco", tmp_path, "run", "train.on_nan=skip", "train.nan_budget=0")
    task.prepare()
    name, weight = list(task.base_model.backbone.named_parameters())[-1]
    with torch.no_grad():
        weight.fill_(torch.inf)
    task.prepare = lambda: None  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match="the output of the network is not finite"):
        train_loop(task)
    assert main(["replay", str(tmp_path / "run/failures/step_1")]) == 0
    out = capsys.readouterr().out
    assert f"weights that are not finite before the step: network.backbone.{name}" in out
    module = name.rpartition(".")[0]
    assert f"first module whose output is not finite: network.backbone.{module} (" in out
    assert "its input is finite" in out


@pytest.mark.parametrize("method", ["simclr", "dino"])
def test_the_loss_is_replayed_bit_for_bit(tmp_path: Path, method: str) -> None:
    """A finite loss, dumped because of a gradient that the injection spoils."""
    text = failure(tmp_path, inject("nan_gradient", 4), method=method)
    assert re.search(
        r"the gradient is not finite, and the loss is \d.* at step 4 .*: network", text
    )
    result = replay(tmp_path / "run/failures/step_4/failure.json", [])  # a file of the dump
    assert result.same
    assert result.loss == result.recorded
    assert not result.gradients
    assert "all is finite here" in "\n".join(result.lines())


def test_the_output_is_told_apart(tmp_path: Path) -> None:
    assert not is_finite([{"features": (torch.tensor([1.0, -torch.inf]),)}])
    assert "the output of the network is not finite" in failure(tmp_path, inject("nan_output", 2))


@pytest.mark.parametrize("step", [4, tiny.STEPS])  # the last one: no later loss shows it
def test_weights_that_are_not_finite_are_neither_saved_nor_exported(
    tmp_path: Path, step: int
) -> None:
    """A gradient of NaN in the step of a checkpoint: the loss of this step is still finite."""
    text = failure(tmp_path, inject("nan_gradient", step), "train.checkpoint_every='2 steps'")
    assert "the gradient is not finite, and the loss is" in text
    assert f"at step {step} on rank 0: network.backbone." in text
    saved = tiny.last_state(tmp_path / "run")
    assert saved["clock"]["steps_done"] == step - (1 if step % 2 else 2)
    assert is_finite(saved["model"])
    assert not (tmp_path / "run/export").exists()


def test_weights_that_overflow_end_the_run(tmp_path: Path) -> None:
    """Gradients are finite, so repeating the steps finds nothing else to name."""

    def overflow(task: Any) -> None:
        with torch.no_grad():
            next(task.base_model.parameters()).fill_(torch.inf)

    task = tiny.task("simclr", tmp_path, "run", "train.checkpoint_every='1 steps'")
    task.add_hook(function_hook(on_update=overflow))
    with pytest.raises(NonFiniteLoss, match=r"weights are not finite after step 1: network\.backb"):
        train_loop(task)


def test_what_does_not_occur_again(tmp_path: Path) -> None:
    """As after a fault of the hardware: the run still fails, and says so."""
    task = tiny.task("simclr", tmp_path, "run", "train.log_every=5")
    task.prepare()
    calls = task.calls["on_loss_and_meter"]

    def spoil_once(task: Any) -> None:
        if task.steps_done == 2 and spoil_once in calls:
            task.last_batch.loss = task.last_batch.loss * torch.inf

    calls.insert(0, spoil_once)
    prepare, task.prepare = task.prepare, lambda: setattr(task, "prepare", prepare)  # once
    with pytest.raises(
        NonFiniteLoss, match=r"loss is -?inf at step 3 .*all was finite when the steps were repea"
    ):
        train_loop(task)


@pytest.mark.parametrize("kind", ["nan_input", "nan_output", "nan_gradient", "inf_loss"])
def test_a_skipped_step_leaves_no_trace(tmp_path: Path, kind: str) -> None:
    """BatchNorm's statistics included: equal to the state before, except for the counters."""
    fault = [] if kind == "inf_loss" else [inject(kind, 2)]
    task = tiny.task("moco", tmp_path, "run", "train.on_nan=skip", *fault)
    task.prepare()

    def spoil(task: Any) -> None:
        if kind == "inf_loss" and task.steps_done == 1:
            task.last_batch.loss = task.last_batch.loss + torch.inf

    task.calls["on_loss_and_meter"].insert(0, spoil)
    task.on_start()
    task.on_phase_start()
    task.step()
    states = [torch.load(_saved(task, tmp_path / "a.pt"))]
    task.step()
    states.append(torch.load(_saved(task, tmp_path / "b.pt")))
    for part in ("model", "method", "optimizer"):
        assert not tiny.differences(states[0][part], states[1][part])
    assert task.clock.skipped == 1
    task.close()


def _saved(task: Any, path: Path) -> Path:
    torch.save(task.state_dict(), path)
    return path


def test_skip_goes_on_within_its_budget(tmp_path: Path) -> None:
    more = ("train.on_nan=skip", "train.nan_budget=1")
    task = tiny.train("simclr", tmp_path, "run", *more, inject("nan_input", 4))
    assert (task.steps_done, task.clock.skipped) == (tiny.STEPS, 1)
    assert [row["step"] for row in tiny.rows(tmp_path / "run") if "loss" in row] == [
        step for step in range(1, tiny.STEPS + 1) if step != 4
    ]
    more = ("train.on_nan=skip", "train.nan_budget=0", "out=" + str(tmp_path / "other"))
    assert "after 0 skipped steps" in failure(tmp_path, *more, inject("nan_input", 4))


def skip(folder: Path, out: str, bad: set[int], *more: str) -> Any:
    """A run that skips the steps ``bad``."""
    task = tiny.task("simclr", folder, out, "train.on_nan=skip", "train.max_steps=5", *more)

    def spoil(task: Any) -> None:
        if task.steps_done + 1 in bad:
            task.last_batch.loss = task.last_batch.loss + torch.inf

    task.add_hook(function_hook(on_loss_and_meter=spoil), "spoil")
    with suppress(Interrupted):
        train_loop(task)
    return task


def test_the_budget_is_of_steps_in_a_row_also_across_a_resume(tmp_path: Path) -> None:
    once = "train.nan_budget=1"
    assert skip(tmp_path, "apart", {2, 4}, once).clock.skipped == 2
    assert skip(tmp_path, "parts", {2}, once, "train.stop_at=2").clock.skipped == 1
    with pytest.raises(NonFiniteLoss, match=r"at step 3 .*, after 1 skipped steps"):
        skip(tmp_path, "parts", {3}, once)


def test_the_first_failures_of_a_run_are_dumped(tmp_path: Path) -> None:
    """Steps after a resume are not the first ones."""
    skip(tmp_path, "run", {1, 2}, "train.nan_budget=9", "train.stop_at=2")
    skip(tmp_path, "run", {3, 4, 5}, "train.nan_budget=9")
    dumped = sorted(folder.name for folder in (tmp_path / "run/failures").iterdir())
    assert dumped == ["step_1", "step_2", "step_3"]


def test_a_run_does_not_repeat_more_steps_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is the third one, and the run has no checkpoint, or two."""
    for most, message in ((2, "the last checkpoint is of step 0"), (3, "step 3 on rank 0: its im")):
        monkeypatch.setattr(repeat, "MOST_REPEATED", most)
        assert message in failure(tmp_path, inject("nan_input", 3), f"out={tmp_path}/{most}")
    monkeypatch.setattr(repeat, "MOST_REPEATED", 0)
    often = ("train.checkpoint_every='1 steps'", f"out={tmp_path}/often")
    assert "checkpoint is of step 2" in failure(tmp_path, inject("nan_input", 3), *often)


def test_terms_in_a_row_are_those_of_a_step_that_counts(tmp_path: Path) -> None:
    """The last step before the row is skipped."""
    more = ("train.on_nan=skip", "train.log_every=2", "train.max_steps=2", inject("nan_output", 2))
    tiny.train("barlow", tmp_path, "run", *more)
    (row,) = (row for row in tiny.rows(tmp_path / "run") if "invariance" in row)
    assert row["invariance"] > 0
    assert row["redundancy"] > 0


def test_resume_bit_for_bit_with_skipped_steps(tmp_path: Path) -> None:
    more = ("train.on_nan=skip", inject("nan_input", 4))
    tiny.train("byol", tmp_path, "whole", *more)
    for stop in ("4", "6", "null"):
        tiny.train("byol", tmp_path, "parts", *more, f"train.stop_at={stop}")
    assert not tiny.differences(
        tiny.last_state(tmp_path / "whole"), tiny.last_state(tmp_path / "parts")
    )


def _on_ranks(rank: int, folder: Path) -> list[tuple[dict[str, int], str]]:
    results = []
    for policy in ("skip", "stop"):
        more = (f"train.on_nan={policy}", inject("nan_input", 3, rank=1), "train.max_steps=4")
        task = tiny.task("simclr", folder, policy, *more)
        text = ""
        try:
            train_loop(task)
        except FloatingPointError as error:
            text = str(error)
        results.append((task.clock.state_dict(), text))
    return results


def test_one_of_two_ranks(tmp_path: Path) -> None:
    """Both skip, or both raise. The rank is named; one process replays the batches of both."""
    tiny.digits_file(tmp_path)
    for (clock, text), (stopped, error) in run_ranks(_on_ranks, 2, tmp_path):
        assert (clock["steps_done"], clock["skipped"]) == (4, 1)
        assert not text
        assert stopped["steps_done"] == 2
        assert "the loss is nan at step 3 on rank 1: its images are not finite (view main" in error
    result = replay(tmp_path / "skip/failures/step_3", [])
    assert result.ranks == 2
    assert result.same
    assert "on rank 1" in result.problem
    assert result.images[0] in error
