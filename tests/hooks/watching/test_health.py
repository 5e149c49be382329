"""What the hook ``health`` measures and warns of, and the progress bar."""

from __future__ import annotations

import io
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiny
from selftask.hooks.failures.non_finite import NonFiniteLoss
from selftask.hooks.watching.health import Health, effective_rank, embedding_std, mean_cosine
from selftask.hooks.watching.progress import ProgressBar
from selftask.models.backbones.small_resnet import SmallResNet


def test_statistics_by_their_definitions() -> None:
    rows = np.random.default_rng(0).normal(size=(12, 5)) + 1.0
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    pairs = [unit[i] @ unit[j] for i in range(12) for j in range(12) if i != j]
    singular = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    share = singular / singular.sum()
    given = torch.from_numpy(rows)
    assert float(mean_cosine(given)) == pytest.approx(np.mean(pairs), rel=1e-9)
    expected = unit.std(axis=0, ddof=1).mean() * math.sqrt(5)
    assert float(embedding_std(given)) == pytest.approx(expected, rel=1e-9)
    expected = math.exp(-(share * np.log(share)).sum())
    assert float(effective_rank(given)) == pytest.approx(expected, rel=1e-6)


def test_statistics_of_collapsed_embeddings() -> None:
    same = torch.ones(8, 4) + 1e-6 * torch.randn(8, 4)
    assert float(embedding_std(same)) < 1e-4
    assert float(mean_cosine(same)) == pytest.approx(1.0)
    line = torch.randn(512, 1) * torch.randn(512) + torch.randn(512)  # in float32
    assert float(effective_rank(line)) == pytest.approx(1.0, abs=1e-3)
    assert math.isnan(float(effective_rank(torch.full((8, 4), math.nan))))


def warnings(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]


def train(folder: Path, method: str, steps: int, *more: str) -> None:
    tiny.train(method, folder, "run", "train.epochs=12", f"train.max_steps={steps}", *more)


def test_dino_without_a_learning_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, "dino", 40, "optimizer.lr=0", "train.log_every=20")
    (message,) = [text for text in warnings(caplog.records) if "weight moves" in text]
    assert message.startswith("step 20: no weight moves, and the loss stays at ")
    assert "raise optimizer.lr" in message


def test_a_learning_rate_that_is_lost_in_rounding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, "simclr", 40, "optimizer.lr=1e-30", "train.log_every=20")
    (message,) = [text for text in warnings(caplog.records) if "weight moves" in text]
    assert "so it is far too small or no gradient arrives: raise optimizer.lr" in message


@pytest.mark.parametrize("lr", ["1e18", "1e30"])  # squares of the weights overflow float32
def test_weights_that_overflow_are_not_called_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lr: str
) -> None:
    """NaN has a message of its own; a higher learning rate would be wrong advice."""
    words = ("optimizer=sgd", f"optimizer.lr={lr}", "optimizer.warmup=0", "train.log_every=12")
    with pytest.raises(NonFiniteLoss):
        train(tmp_path, "simclr", 12, *words)
    assert not [text for text in warnings(caplog.records) if "weight moves" in text]


def test_a_layer_that_a_forward_pass_creates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SmallResNet.forward

    def creating(self: SmallResNet, x: torch.Tensor) -> torch.Tensor:
        features = forward(self, x)
        self.scale = torch.nn.Parameter(torch.ones(()))
        return features * self.scale

    monkeypatch.setattr(SmallResNet, "forward", creating)
    train(tmp_path, "simclr", 4, "train.log_every=2")
    (message,) = [text for text in warnings(caplog.records) if "created" in text]
    assert message.startswith("step 2: a forward pass has created network.backbone.scale: not")


def test_a_network_whose_output_is_detached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the head move, and decay moves those of the network."""
    forward = SmallResNet.forward
    monkeypatch.setattr(SmallResNet, "forward", lambda self, x: forward(self, x).detach())
    train(tmp_path, "simclr", 40, "train.log_every=20", "optimizer.weight_decay=0.1")
    (message,) = [text for text in warnings(caplog.records) if "gradient" in text]
    assert message.startswith("step 20: no gradient reaches the backbone, so only the layers")


def test_weights_that_stop_when_the_rate_is_zero(caplog: pytest.LogCaptureFixture) -> None:
    """Weights that have moved are not copied again, unless the learning rate is 0."""
    weight = torch.nn.Parameter(torch.ones(8))
    group = {"params": [weight], "lr": 0.1}
    optimizer = SimpleNamespace(param_groups=[group])
    loss = SimpleNamespace(chance_loss=None)
    task: Any = SimpleNamespace(
        optimizer=optimizer, loss=loss, base_model=None, should_log=True, where=0.5
    )
    health, copied = Health(), []
    health.is_reached = True
    for task.steps_done in range(20, 30):
        group["lr"] = 0.1 if task.steps_done < 26 else 0.0
        health.on_backward(task)
        copied.append(health.before is not None)
        weight.data -= group["lr"]
        health.on_update(task)
    assert copied == [True] + 5 * [False] + [True] + 3 * [False]  # warned of once
    resumed = Health()
    resumed.is_reached = True
    resumed.load_state_dict(health.state_dict())
    resumed.on_backward(task)
    assert resumed.before is None  # warned of already
    (message,) = warnings(caplog.records)
    assert message.startswith("step 27: no weight moves; the learning rate is 0 here")


def test_a_loss_that_stays_at_chance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At this temperature every pair looks alike."""
    train(tmp_path, "simclr", 60, "train.log_every=10", "method.temperature=1e6")
    (message,) = [text for text in warnings(caplog.records) if "uninformed" in text]
    assert message.startswith("step 50: the loss is that of an uninformed network or worse")
    assert "optimizer.lr" in message


class Constant(nn.Module):
    """Images -> 8 features that are the same, or differ in one direction only."""

    embed_dim = 8

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.spread = spread

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        brightness = images.mean(dim=(1, 2, 3))[:, None]
        brightness = brightness - brightness.mean()
        direction = torch.tensor([1.0, -1.0] * 4)
        return self.weight + self.spread * brightness * direction


@pytest.mark.parametrize(
    ("spread", "message"),
    [(0.0, "the embeddings of different images are almost the same"), (50.0, "in one direction")],
)
def test_two_kinds_of_collapse(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spread: float,
    message: str,
) -> None:
    monkeypatch.setattr("selftask.task.build.build_backbone", lambda *_: Constant(spread))
    task = tiny.task("simclr", tmp_path, "run", "train.max_steps=12")
    task.prepare()
    task.on_start()
    task.on_phase_start()
    task.step()
    (text,) = [text for text in warnings(caplog.records) if "collapse" in text]
    assert message in text
    assert "optimizer.lr" in text
    task.close()


@pytest.mark.parametrize("method", ["simclr", "mae"])
def test_nothing_in_healthy_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Tiny networks of a few steps; the digits recipes of all methods were tried by hand."""
    tiny.train(method, tmp_path, "run")
    messages = [text for text in warnings(caplog.records) if text.startswith("step ")]
    assert not messages
    row = tiny.rows(tmp_path / "run")[-1]
    assert -1 <= row["mean_cosine"] <= 1
    assert 0 < row["emb_std"] <= 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it shows steps, epoch and the newest row; it is closed at the end."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("selftask.logs.stages.REFRESHES_PER_S", 1000)
    task = tiny.train("simclr", tmp_path, "run")
    (bar,) = [hook for hook in task.hooks if isinstance(hook, ProgressBar)]
    assert bar.stage is None
    shown = screen.getvalue()
    assert f"{tiny.STEPS}/{tiny.STEPS}" in shown
    assert "epoch 3.0" in shown
    last = [row for row in tiny.rows(tmp_path / "run") if "loss" in row][-1]
    assert f"loss {last['loss']:.3f}" in shown


def test_no_progress_bar_without_a_terminal(tmp_path: Path, capsys: Any) -> None:
    task = tiny.train("simclr", tmp_path, "run", "train.max_steps=1")
    (bar,) = [hook for hook in task.hooks if isinstance(hook, ProgressBar)]
    assert bar.stage is None
    assert "epoch " not in capsys.readouterr().out.replace("epoch 0", "")


def test_progress_bar_after_a_resume_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.train("simclr", tmp_path, "run", "train.stop_at=7")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    task = tiny.task("simclr", tmp_path, "run")
    task.prepare()
    task.on_start()
    (bar,) = [hook for hook in task.hooks if isinstance(hook, ProgressBar)]
    assert bar.stage.line.completed == 7
    task.on_exception()
    assert bar.stage is None
    task.close()
