"""Rules for parameters and the plateau in whole runs: frozen, resumed, on several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import tiny
from selftask.api.trainer import Trainer
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.hooks.plateau import Plateau

STEM = "model.backbone.stem"
RULES = (
    "optimizer.groups=[{match: backbone.stem, freeze: 3}, {match: head, lr: 2, schedule: constant},"
    " {type: BatchNorm2d, weight_decay: 0.01}]"
)
PLATEAU = "hooks.plateau={metric: loss, mode: min, factor: 0.5, patience: 1, threshold: 0.05}"


def tensors(out: Path, step: int) -> dict[str, Tensor]:
    from selftask.checkpoint import store

    state = store.load(out / f"checkpoints/step_{step:09d}.pt")
    return {f"model.{name}": value for name, value in state["model"].items()}


def moments_of(out: Path, step: int) -> int:
    """The number of parameters of which the optimizer has a state."""
    from selftask.checkpoint import store

    state = store.load(out / f"checkpoints/step_{step:09d}.pt")
    return len(state["optimizer"]["optim"]["state"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    tiny.train("simclr", folder, "whole", *words())
    return folder


def words(*more: str) -> tuple[str, ...]:
    every = ("train.max_steps=8", "train.checkpoint_every='1 steps'", "train.keep_checkpoints=20")
    return (RULES, PLATEAU, "optimizer.weight_decay=0.1", *every, *more)


def test_frozen_for_three_steps(whole: Path) -> None:
    states = {step: tensors(whole / "whole", step) for step in (1, 3, 4, 8)}
    trained = [n for n in states[1] if not torch.equal(states[1][n], states[8][n])]
    weights = [name for name in trained if "running" not in name and "num_batches" not in name]
    frozen = {n for n in weights if torch.equal(states[1][n], states[3][n])}
    assert frozen == {name for name in weights if name.startswith(STEM)} != set()
    assert not [n for n in frozen if torch.equal(states[3][n], states[4][n])]
    moments = {step: moments_of(whole / "whole", step) for step in (3, 4)}
    assert moments == {3: len(weights) - len(frozen), 4: len(weights)}, "made when first updated"
    statistics = [n for n in states[1] if n.startswith(STEM) and "running" in n]
    assert statistics and not [n for n in statistics if torch.equal(states[1][n], states[3][n])]


@pytest.mark.parametrize("stop", [2, 5])
def test_stopped_while_frozen_or_after_is_never_stopped(whole: Path, stop: int) -> None:
    tiny.train("simclr", whole, f"parts_{stop}", *words(f"train.stop_at={stop}"))
    tiny.train("simclr", whole, f"parts_{stop}", *words())
    assert tiny.rows(whole / "whole") == tiny.rows(whole / f"parts_{stop}")
    states = (tiny.last_state(whole / "whole"), tiny.last_state(whole / f"parts_{stop}"))
    assert tiny.differences(*states) == []
    assert states[0]["hooks"]["plateau"]["scale"] < 1.0


def test_other_rules_do_not_fit_a_checkpoint(whole: Path) -> None:
    """Torch's state numbers the parameters, and other rules number them otherwise."""
    path = whole / "whole/checkpoints/step_000000002.pt"
    other = "optimizer.groups=[{match: backbone.stem, lr: 2}]"
    with pytest.raises(UserError, match=r"put 'network\..*' where the checkpoint has 'network\."):
        tiny.train("simclr", whole, "other", other, f"resume={path}")


def test_plateau_is_torchs(tmp_path: Path) -> None:
    """The lr of each row, from the losses of the rows before by torch's scheduler."""
    constant = ("optimizer.schedule=constant", "optimizer.warmup=0", "optimizer.lr=0.01")
    tiny.train("simclr", tmp_path, "run", PLATEAU, *constant)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    scheduler = ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=1, threshold=0.05)
    rows = [row for row in tiny.rows(tmp_path / "run") if "loss" in row]
    for row in rows:
        assert row["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
        scheduler.step(row["loss"])
    assert 2 <= len({row["lr"] for row in rows}) < len(rows)


def test_settings_and_state_of_the_plateau_are_torchs() -> None:
    """Also after a resume at any row: during the patience, in the cooldown, at the least factor."""
    args: dict[str, Any] = {"factor": 0.3, "patience": 1, "threshold": 0.1, "cooldown": 2}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = ReduceLROnPlateau(optimizer, "min", **args, min_lr=0.01, eps=0.0)
    losses = [1.0, 0.95, 0.93, 0.92, 0.91, 0.9, 0.7, *[0.69] * 20]
    hook, factors = Plateau(metric="loss", mode="min", min_factor=0.01, **args), []
    for step, loss in enumerate(losses, start=1):
        task: Any = SimpleNamespace(steps_done=step, last_row={"loss": loss}, optimizer=Mock())
        state, hook = hook.state_dict(), replace(hook)
        hook.load_state_dict(state)
        hook.on_start(task)
        hook.on_row(task)
        (factor,) = task.optimizer.multiply_lr.call_args.args
        factors.append(factor())
        theirs.step(loss)
        assert factors[-1] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert sorted(set(factors)) == pytest.approx([0.01, 0.027, 0.09, 0.3, 1.0])


def test_plateau_of_an_evaluation_that_also_runs_before_training(tmp_path: Path) -> None:
    val = tiny.digits_file(tmp_path, "val.npz", 400, 430)
    evaluated = (f"data.val={val}", "eval={evaluations: {knn: {k: [5]}}, every: 1 steps}")
    plateau = "hooks.plateau={metric: knn_top1, patience: 0, threshold: 1}"  # it has to double
    task = tiny.task("simclr", tmp_path, "run", plateau, *evaluated, "train.max_steps=2")
    Trainer().train(task)
    assert [row["step"] for row in tiny.rows(tmp_path / "run") if "knn_top1" in row] == [0, 1, 2]
    assert task.named_hooks["plateau"].scale == pytest.approx(0.1)


def test_a_metric_that_no_row_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.train("simclr", tmp_path, "run", "hooks.plateau={metric: lose}", "train.max_steps=2")
    assert "hooks.plateau.metric=lose: no row has it so far" in caplog.text
    assert "did you mean 'loss'?" in caplog.text


@pytest.mark.parametrize(
    ("key", "rules"), [("schedule", "{}"), ("groups.1.schedule", "[{{lr: 2}}, {{schedule: {}}}]")]
)
def test_plateau_needs_schedules_that_move_at_steps(key: str, rules: str) -> None:
    section = rules.format("{name: cosine, update: epoch}")
    with pytest.raises(ConfigError, match=rf"optimizer\.{key}\.update is 'epoch'"):
        load_config("simclr/digits", [PLATEAU, f"optimizer.{key.partition('.')[0]}={section}"])


def test_frozen_for_good_computes_no_gradients(tmp_path: Path) -> None:
    rule = "optimizer.groups=[{match: backbone, freeze: true}]"
    task = tiny.train("simclr", tmp_path, "run", rule, "train.max_steps=2")
    names = {n for n, p in task.base_model.named_parameters() if p.requires_grad}
    assert names
    assert all(name.startswith("head.") for name in names)
    trained = {id(p) for group in task.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in task.base_model.head.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("name", "setting", "option", "expected"),
    [
        ("adamw", "betas: [0.5, 0.6]", "betas", (0.5, 0.6)),
        ("sgd", "sgd_momentum: 0.5", "momentum", 0.5),
        ("lars", "trust_coefficient: 0.5", "trust_coefficient", 0.5),
        ("torch:NAdam", "momentum_decay: 0.5", "momentum_decay", 0.5),
    ],
)
def test_options_of_the_config_replace_those_of_a_checkpoint(
    name: str, setting: str, option: str, expected: Any, tmp_path: Path
) -> None:
    """torch's own ``load_state_dict`` takes options from the checkpoint, too."""
    before = f"optimizer={{name: '{name}', lr: 0.01}}"
    first = tiny.train("simclr", tmp_path, "first", before, "train.stop_at=2")
    checkpoint = f"resume={first.out}/checkpoints/step_000000002.pt"
    changed = before.replace("}", f", {setting}}}")
    task = tiny.task("simclr", tmp_path, "second", changed, checkpoint)
    task.prepare()
    (group, *_) = task.optimizer.optimizer.param_groups
    assert task.steps_done == 2 and group[option] == expected
    task.close()


def test_the_table_is_in_the_run_folder(whole: Path) -> None:
    lines = (whole / "whole/groups.txt").read_text().splitlines()
    assert lines[0].split()[:3] == ["tensors", "parameters", "lr"]
    assert any("step 3" in line and "network.backbone.stem" in line for line in lines)


def test_nearest_name_of_a_rule_that_matches_nothing(tmp_path: Path) -> None:
    rule = "optimizer.groups=[{match: backbone.stam, lr: 0.1}]"
    with pytest.raises(UserError, match=r"groups\.0\.match='backbone\.stam'.*backbone\.stem"):
        tiny.train("simclr", tmp_path, "run", rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{lr: 0.1}", r"optimizer\.groups\.0: needs match .* or type"),
        ("{match: head}", r"optimizer\.groups\.0: sets nothing"),
        ("{match: head, lrs: 2}", r"unknown key 'optimizer\.groups\.0\.lrs'; did you mean"),
        ("{match: head, freeze: soon}", r"freeze='soon': not a duration"),
        ("{match: head, schedule: one_cycle}", r"groups\.0\.schedule\.warmup: 5%; one_cycle"),
    ],
)
def test_broken_rules(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("simclr/digits", [f"optimizer.groups=[{rule}]"])


def check(*more: Any) -> int:
    """On networks with GroupNorm for BatchNorm, as in ``selftask check``."""
    rules = RULES.replace("BatchNorm2d", "GroupNorm")
    return main(["check", "simclr", rules, "optimizer.layer_decay=0.75", *more])


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["manual", "ddp", "fsdp"])
def test_two_ranks_are_one(reduce: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also resumed by another number of ranks, while parameters are frozen."""
    assert check("--steps=5", f"parallel.reduce={reduce}") == 0, capsys.readouterr().out


def test_parameters_that_stay_frozen_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = "optimizer.groups=[{match: backbone.stem.0, freeze: 1 epoch}]"
    tiny.train("simclr", tmp_path, "short", rule, "train.max_steps=2")
    assert "the run ends before" in caplog.text
    assert "such as network.backbone.stem.0.weight" in caplog.text
    caplog.clear()
    tiny.train("simclr", tmp_path, "long", rule, "train.max_steps=6")
    assert "the run ends before" not in caplog.text
