"""Averaged weights beside the formulas of their papers, in double precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

import tiny
from selftask.cli.main import main
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.evaluate.offline import evaluate_backbone
from selftask.evaluate.online import evaluate_task
from selftask.hooks.averages.ema import ExponentialAverage
from selftask.hooks.base import Hook
from selftask.models.weights.model_source import open_model
from selftask.registry import register_hook
from selftask.task import Task

EMA = "hooks.ema={decay: 0.8, every: 2, buffers: average}"
SWA = "hooks.swa={start: 40%, every: 2 steps, device: cpu}"
KNN = "eval.evaluations={knn: {k: [3]}}"
SEEN: list[dict[str, Tensor]] = []  # the network at the start and after each update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("averaging")


def train(folder: Path, out: str, *more: str, method: str = "byol") -> Task:
    """Ten steps of a tiny run with k-NN, every 5 steps and at both ends."""
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 430)}"
    every = "eval.every='5 steps'"
    task = tiny.task(method, folder, out, val, KNN, every, "train.epochs=2", *more)
    return tiny.loop_evaluated(task, evaluate_task)


def test_averages_are_those_of_the_papers(folder: Path) -> None:
    @register_hook("weights_seen")
    class WeightsSeen(Hook):
        def on_start(self, task: Task) -> None:
            SEEN[:] = [self.network(task)]
            self.copied: list[int] = []

        def on_update(self, task: Task) -> None:
            SEEN.append(self.network(task))
            late = task.averages["late"].weights
            if all(torch.equal(value.double(), SEEN[-1][name]) for name, value in late.items()):
                self.copied.append(task.steps_done + 1)

        def network(self, task: Task) -> dict[str, Tensor]:
            return {k: v.double().clone() for k, v in task.base_model.state_dict().items()}

    late = "hooks.late={name: ema, decay: 0.6, warmup: false, start: 40%}"
    rising = "hooks.rising={name: ema, decay: 0.42, start: 40%}"
    task = train(folder, "formulas", EMA, SWA, late, rising, "hooks.weights_seen={}")
    assert len(SEEN) == 11
    assert task.named_hooks["weights_seen"].copied == [1, 2, 3, 4], "until the start"
    for name, got in task.averages["late"].weights.items():
        mean = SEEN[4][name]
        for seen in SEEN[5:]:
            mean = 0.6 * mean + 0.4 * seen[name]
        torch.testing.assert_close(got.double(), mean, rtol=1e-5, atol=1e-6)
    for name, got in task.averages["rising"].weights.items():  # steps count from the start
        mean = SEEN[4][name]
        for kept, seen in zip((2 / 11, 3 / 12, 4 / 13, 5 / 14, 0.4, 0.42), SEEN[5:], strict=True):
            mean = kept * mean + (1 - kept) * seen[name]
        torch.testing.assert_close(got.double(), mean, rtol=1e-5, atol=1e-6)

    share = [1.0]  # of each of the weights seen in the exponential average
    for step in range(1, 11):
        share.append(0.0)
        if step % 2 == 0:
            kept = min(0.8, (1 + step) / (10 + step)) ** 2
            share = [kept * part for part in share[:-1]] + [1 - kept]
    ema, swa = task.averages["ema"].weights, task.averages["swa"].weights
    theirs = AveragedModel(nn.ParameterDict(), avg_fn=get_swa_avg_fn())
    for name, got in ema.items():
        mean = sum(part * seen[name] for part, seen in zip(share, SEEN, strict=True))
        torch.testing.assert_close(got.double(), mean, rtol=1e-5, atol=1e-6)
    assert any("running_var" in name for name in ema)
    assert not any("running_var" in name for name in swa)
    assert task.averages["swa"].updates == 4
    for name, got in swa.items():
        counted = [SEEN[step][name] for step in (4, 6, 8, 10)]
        mean = counted[0].clone()
        for number, value in enumerate(counted):
            mean = theirs.avg_fn(mean, value, number)  # type: ignore[misc]
        torch.testing.assert_close(got.double(), mean, rtol=1e-5, atol=1e-6)


def test_half_life_counts_images_and_start_lies_in_the_run(folder: Path) -> None:
    twice = ("train.step=accumulate", "train.accumulate=2")
    task = train(folder, "half", "hooks.ema={half_life: 64}", "train.max_steps=1", *twice)
    assert task.averages["ema"].decay_of_step ** 2 == pytest.approx(0.5)  # 2 x 16 images a step
    assert task.averages["ema"].updates == 1, "of a step, not of each batch"
    late = ("hooks.ema={start: 2 epochs}", "train.max_steps=1")
    with pytest.raises(UserError, match=r"hooks.ema.start=2 epochs: is step 10, after the last on"):
        train(folder, "late", *late)


def test_alpha_gives_the_decay_of_pycls(folder: Path) -> None:
    """Theirs: 0.9967232 for 1e-5, 1024 images, 100 epochs and an update every 32 steps."""
    alpha = 1e-5 * (1024 * 32 / 100) / (16 * 2 / 0.4)  # for 2 of the 5 steps of an epoch
    ema = f"hooks.ema={{alpha: {alpha}, every: 2}}"
    task = train(folder, "alpha", ema, "train.max_steps=2")
    assert task.averages["ema"].decay_of_step ** 2 == pytest.approx(0.9967232, abs=1e-9)


@pytest.mark.parametrize("method", ["byol", "dino"])  # dino exports its teacher
def test_evaluated_and_exported_beside_the_weights(
    method: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plain = folder / f"{method}_both", folder / f"{method}_plain"
    train(folder, run.name, EMA.replace("}", ", export: true}"), "eval.loss=true", method=method)
    train(folder, plain.name, "eval.loss=true", method=method)
    rows = tiny.rows(run)
    assert rows[0]["ema_val_loss"] == pytest.approx(rows[0]["val_loss"], rel=1e-6)
    assert rows[-1]["ema_val_loss"] != pytest.approx(rows[-1]["val_loss"], rel=1e-4)
    without = [{k: v for k, v in row.items() if not k.startswith("ema_")} for row in rows]
    assert without == tiny.rows(plain)  # the run itself does not change
    own = ("config", "metrics_bytes", "hooks", "history")
    assert not tiny.differences(tiny.last_state(run, own), tiny.last_state(plain, own))

    assert main(["export", str(run), "--weights", "ema", "--out", str(run / "again")]) == 0
    exported = torch.load(run / "export/backbone.pt")
    assert not tiny.differences(exported, torch.load(run / "again/backbone.pt"))
    kept = tiny.last_state(run)["hooks"]["ema"]["weights"]
    assert all(torch.equal(exported[k[9:]], v) for k, v in kept.items() if k[:9] == "backbone.")
    assert json.loads((run / "export/backbone.json").read_text())["weights"] == "ema"
    raw = torch.load(plain / "export/backbone.pt")
    assert any(not torch.equal(raw[name], exported[name]) for name in raw)
    if method == "byol":
        trained = tiny.last_state(plain)["model"]
        assert all(torch.equal(value, trained[f"backbone.{name}"]) for name, value in raw.items())

    config = tiny.config(method, folder, run.name, f"data.val={folder / 'val.npz'}", KNN)
    backbone, _ = open_model(str(run))
    got = evaluate_backbone(backbone, config, open_data(config.data), device=torch.device("cpu"))
    assert got["knn_top1"] == pytest.approx(rows[-1]["ema_knn_top1"], abs=1e-8)
    assert main(["export", str(plain), "--weights", "ema"]) == 2
    assert "no averaged weights named 'ema'" in capsys.readouterr().err


def test_resumed_bit_for_bit(folder: Path) -> None:
    whole = train(folder, "whole", EMA, SWA).out
    for stop in (3, 7):  # before the first weights of swa, and after
        train(folder, "parts", EMA, SWA, f"train.stop_at={stop}")
    parts = train(folder, "parts", EMA, SWA).out
    assert tiny.rows(whole) == tiny.rows(parts)
    assert {"ema_knn_top1", "swa_knn_top1"} <= tiny.rows(whole)[-1].keys()
    assert tiny.differences(tiny.last_state(whole), tiny.last_state(parts)) == []


def test_mean_of_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "several"
    every = ("train.checkpoint_every='2 steps'", "train.keep_checkpoints=4")
    train(folder, run.name, *every)
    assert main(["export", str(run), "--average", "3", "--out", str(run / "mean")]) == 0
    assert "BatchNorm's statistics are not those of" in capsys.readouterr().err
    states: list[Any] = [
        torch.load(run / f"checkpoints/step_{n:09d}.pt")["model"] for n in (6, 8, 10)
    ]
    got = torch.load(run / "mean/backbone.pt")
    for name, value in got.items():
        if value.is_floating_point():
            mean = sum(state[f"backbone.{name}"].double() for state in states) / 3
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)

    text = (run / "config.yaml").read_text().replace("hooks:\n", "hooks:\n  precise_bn: {}\n")
    (run / "config.yaml").write_text(text)
    assert main(["export", str(run), "--average", "3", "--out", str(run / "precise")]) == 0
    precise = torch.load(run / "precise/backbone.pt")
    same = {name for name in got if torch.equal(got[name], precise[name])}
    assert {name for name in got if "running" not in name and "num" not in name} <= same
    assert not any("running" in name for name in same)

    assert main(["export", str(run), "--average", "5"]) == 2
    assert "has 4 checkpoints; train.keep_checkpoints=5" in capsys.readouterr().err


def test_contradictions_are_told_before_training(folder: Path) -> None:
    ema = "hooks.ema={decay: 0.9, half_life: 100, alpha: 1e-5, export: true}"
    wrong = (ema, "hooks.swa={export: true}")
    with pytest.raises(ConfigError) as raised:
        tiny.config("byol", folder, "wrong", *wrong)
    assert "hooks.ema.half_life: decay is given too" in str(raised.value)
    assert "hooks.ema.alpha: decay is given too" in str(raised.value)
    assert "hooks.ema.export: only one average can be exported" in str(raised.value)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_buffers_may_be_another_at_a_resume(folder: Path, buffers: str) -> None:
    before = {"copy": "average", "average": "copy"}[buffers]
    out = f"another_{buffers}"
    train(folder, out, f"hooks.ema.buffers={before}", "train.stop_at=5")
    resumed = train(folder, out, f"hooks.ema.buffers={buffers}")
    average = resumed.named_hooks["ema"]
    assert average.updates == resumed.length.total_steps
    assert any("running_mean" in name for name in average.weights) == (buffers == "average")


def test_swa_does_not_miss_a_skipped_step(folder: Path) -> None:
    """Its only point is at the last step, which is skipped: the weights are those before it."""
    last = "hooks.swa={start: 100%, export: true}"
    fault = "hooks.fault_injection={kind: nan_gradient, at: 10}"
    task = train(folder, "skipped", last, fault, "train.on_nan=skip")
    assert task.clock.skipped == 1
    assert task.named_hooks["swa"].updates == 1
    for name, value in task.base_model.named_parameters():
        assert torch.equal(task.named_hooks["swa"].weights[name], value), name


def test_weights_are_restored_after_an_error(folder: Path) -> None:
    task = train(folder, "raised", EMA, "train.max_steps=2")
    before = {name: value.clone() for name, value in task.base_model.state_dict().items()}

    def fail() -> None:
        assert tiny.differences(before, task.base_model.state_dict())
        raise RuntimeError("evaluation")

    with pytest.raises(RuntimeError, match="evaluation"), task.averages["ema"].in_place(task):
        fail()
    assert not tiny.differences(before, task.base_model.state_dict())


def test_a_loaded_average_is_saved_again_before_the_start() -> None:
    """An error between a resume and ``on_start`` must not lose it."""
    saved = {"updates": 3, "weights": {"head.weight": torch.ones(2)}}
    hook = ExponentialAverage()
    hook.load_state_dict(saved)
    assert hook.state_dict() == saved
