"""Every optimizer against its formula or torch's own, and stopped and resumed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from selftask.config.load import load_config
from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.errors import ConfigError
from selftask.optim.build import build_optimizer
from selftask.optim.optimizers.lamb import LAMB
from selftask.optim.optimizers.lion import Lion
from selftask.optim.optimizers.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from selftask.registry import OPTIMIZERS
from selftask.task.loop import train_loop

STEPS, LR, DECAY, BETA1, BETA2, EPS = 6, 0.05, 0.1, 0.8, 0.95, 1e-6
LENGTH = RunLength(num_samples=STEPS, batch_size=1, epochs=1)
WEIGHT = [0.3, -1.2, 0.7]
Row = list[float]


def gradient(weight: Row, step: int) -> Row:
    return [math.sin(1 + w + step) for w in weight]


def lr_at(step: int) -> float:
    return LR * (1 + step % 3)


def norm(row: Row) -> float:
    return math.sqrt(sum(x * x for x in row))


def lamb(*, adapt: bool) -> list[Row]:
    """Algorithm 2 of arXiv:1904.00962, number by number."""
    w, m, v, path = WEIGHT, [0.0] * 3, [0.0] * 3, []
    for t in range(1, STEPS + 1):
        g = gradient(w, t - 1)
        m = [BETA1 * a + (1 - BETA1) * b for a, b in zip(m, g, strict=True)]
        v = [BETA2 * a + (1 - BETA2) * b * b for a, b in zip(v, g, strict=True)]
        r = [
            a / (1 - BETA1**t) / (math.sqrt(b / (1 - BETA2**t)) + EPS) + DECAY * x
            for a, b, x in zip(m, v, w, strict=True)
        ]
        ratio = norm(w) / norm(r) if adapt else 1.0
        w = [x - lr_at(t - 1) * ratio * y for x, y in zip(w, r, strict=True)]
        path.append(w)
    return path


def lion() -> list[Row]:
    """Algorithm 2 of arXiv:2302.06675."""
    w, m, path = WEIGHT, [0.0] * 3, []
    for t in range(STEPS):
        g = gradient(w, t)
        c = [BETA1 * a + (1 - BETA1) * b for a, b in zip(m, g, strict=True)]
        w = [x - lr_at(t) * (math.copysign(1, y) + DECAY * x) for x, y in zip(w, c, strict=True)]
        m = [BETA2 * a + (1 - BETA2) * b for a, b in zip(m, g, strict=True)]
        path.append(w)
    return path


def schedule_free(*, adam: bool) -> tuple[list[Row], list[Row]]:
    """Algorithm 1 of arXiv:2405.15682, and its SGD form, equations 3 to 5: all y and all x."""
    x, z, v = WEIGHT, WEIGHT, [0.0] * 3
    path, averages, squares = [], [], 0.0
    for t in range(1, STEPS + 1):
        y = [(1 - BETA1) * b + BETA1 * a for a, b in zip(x, z, strict=True)]
        if t > 1:
            path.append(y)
        g = gradient(y, t - 1)
        v = [BETA2 * a + (1 - BETA2) * b * b for a, b in zip(v, g, strict=True)]
        rate = lr_at(t - 1) * (math.sqrt(1 - BETA2**t) if adam else 1.0)
        d = [a / (math.sqrt(b) + EPS) for a, b in zip(g, v, strict=True)] if adam else g
        z = [a - rate * b - rate * DECAY * c for a, b, c in zip(z, d, y, strict=True)]
        squares += rate**2
        c = rate**2 / squares
        x = [(1 - c) * a + c * b for a, b in zip(x, z, strict=True)]
        averages.append(x)
    return path, averages


def run(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[list[Row], Any, Any]:
    parameter = nn.Parameter(torch.tensor(WEIGHT, dtype=torch.float64))
    group = {"params": [parameter], "adapt": options.pop("adapt", True)}
    optimizer, path = kind([group], lr=0.0, weight_decay=DECAY, **options), []
    for step in range(STEPS):
        parameter.grad = torch.tensor(gradient(parameter.tolist(), step), dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = lr_at(step)
        optimizer.step()
        path.append(parameter.tolist())
    return path, optimizer, parameter


def close(one: list[Row], other: list[Row]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a == pytest.approx(b, rel=1e-12, abs=1e-15) for a, b in pairs)


@pytest.mark.parametrize("adapt", [True, False])
def test_lamb_is_algorithm_2(adapt: bool) -> None:
    assert close(run(LAMB, betas=(BETA1, BETA2), eps=EPS, adapt=adapt)[0], lamb(adapt=adapt))


def test_lamb_moves_a_weight_of_zero() -> None:
    """Its trust ratio would be zero for ever; a bias or a new layer starts so."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    LAMB([parameter], lr=0.1).step()
    assert parameter.tolist() == pytest.approx([-0.1] * 3, rel=1e-4)


def test_lion_is_algorithm_2() -> None:
    assert close(run(Lion, betas=(BETA1, BETA2))[0], lion())


@pytest.mark.parametrize("adam", [True, False])
def test_schedule_free_is_algorithm_1(adam: bool) -> None:
    kind: Any = ScheduleFreeAdamW if adam else ScheduleFreeSGD
    options = {"beta2": BETA2, "eps": EPS} if adam else {}
    path, optimizer, parameter = run(kind, interpolation=BETA1, **options)
    expected, averages = schedule_free(adam=adam)
    assert close(path[:-1], expected)
    before = parameter.detach().clone()
    optimizer.eval()
    assert close([parameter.tolist()], averages[-1:])
    optimizer.train()
    assert torch.equal(parameter, before)


# -- through the config ------------------------------------------------------------------------


class Net(nn.Module):
    """Parameters of all kinds: matrix, convolution, norm, bias; and one that waits at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4, 6)
        self.late = nn.Linear(6, 2, bias=False)


def build(net: nn.Module, name: str, **args: Any) -> Any:
    free = name.startswith("schedule_free")
    config = OptimizerConfig(
        name=name,
        args={**_defaults(name), **args},
        lr=0.02,
        weight_decay=0.1,
        schedule="constant" if free else "cosine",
    )
    return build_optimizer(config, [("network", net)], LENGTH, batch=1)


def _defaults(name: str) -> dict[str, Any]:
    return vars(OPTIMIZERS[name]()) if name in OPTIMIZERS else {}


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        for name, parameter in net.named_parameters():
            waits = name.startswith("late") and step < 2
            grad = torch.randn(parameter.shape, generator=draws)
            parameter.grad = None if waits else grad
        optimizer.step(where=step / STEPS)


NAMES = [*OPTIMIZERS.names(), "torch:NAdam", "torch:RAdam", "torch:Adafactor"]


@pytest.mark.parametrize("name", NAMES)
def test_stopped_and_resumed_is_never_stopped(name: str) -> None:
    whole, half, rest = Net(), Net(), Net()
    train(whole, build(whole, name), range(STEPS))
    stopped = build(half, name)
    train(half, stopped, range(3))
    state = copy.deepcopy(stopped.get_classy_state())
    rest.load_state_dict(half.state_dict())
    resumed = build(rest, name)
    resumed.set_classy_state(state)
    train(rest, resumed, range(3, STEPS))
    start = dict(Net().named_parameters())
    for (key, a), b in zip(whole.named_parameters(), rest.parameters(), strict=True):
        assert torch.equal(a, b), key
        assert not torch.equal(a, start[key]), key


THEIRS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, foreach=False, fused=False),
    "adam": lambda groups: torch.optim.Adam(groups),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "torch:NAdam": lambda groups: torch.optim.NAdam(groups, momentum_decay=0.01),
    "torch:Adagrad": lambda groups: torch.optim.Adagrad(groups),
}
ARGS: dict[str, dict[str, Any]] = {
    "rmsprop": {"sgd_momentum": 0.9, "centered": True},
    "torch:NAdam": {"momentum_decay": 0.01},
}


@pytest.mark.parametrize("name", THEIRS)
def test_torchs_own_give_torchs_weights(name: str) -> None:
    ours, theirs = Net(), Net()
    train(ours, build(ours, name, **ARGS.get(name, {})), range(STEPS))
    compare(ours, theirs, [(THEIRS[name], lambda p: True)])


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest() -> None:
    ours, theirs = Net(), Net()
    train(ours, build(ours, "muon"), range(STEPS))
    kinds: Any = [
        (lambda g: torch.optim.Muon(g, adjust_lr_fn="match_rms_adamw"), lambda p: p.ndim == 2),
        (lambda g: torch.optim.AdamW(g), lambda p: p.ndim != 2),
    ]
    compare(ours, theirs, kinds)


def compare(ours: nn.Module, theirs: nn.Module, kinds: list[tuple[Any, Any]]) -> None:
    """Train with torch's optimizers, each on its parameters, at the same lr and decay."""
    parts: list[torch.optim.Optimizer] = []
    for kind, wanted in kinds:
        chosen = [p for p in theirs.parameters() if wanted(p)]
        groups = [
            {"params": [p for p in chosen if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in chosen if p.ndim == 1], "weight_decay": 0.0},
        ]
        parts.append(kind([group for group in groups if group["params"]]))

    class Both:
        def step(self, where: float) -> None:
            for part in parts:
                for group in part.param_groups:
                    group["lr"] = 0.02 * 0.5 * (1 + math.cos(math.pi * where))
                part.step()

    train(theirs, Both(), range(STEPS))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


MISTAKES = {
    "{name: 'torch:NAdm', lr: 0.1}": "torch.optim has no optimizer 'NAdm'; did you mean 'NAdam'",
    "{name: 'torch:LBFGS', lr: 0.1}": "LBFGS does not work here: it evaluates the loss several",
    "{name: 'torch:NAdam', lr: 0.1, momentun_decay: 1}": "no such argument; did you mean "
    "'momentum_decay'",
    "{name: 'torch:NAdam', lr: 0.1, betas: [0.9, 2]}": "refuses .*beta parameter at index 1: 2",
    "{name: 'torch:SGD', lr: 0.1, nesterov: 3}": "optimizer.nesterov=3: expected true or false",
    "{name: sgd, lr: 0.1, nesterov: true, sgd_momentum: 0}": "nesterov: true; needs momentum",
    "{name: 'torch:Rprop', lr: 0.1}": "weight_decay=0.0001: torch.optim.Rprop has no weight decay",
    "{name: nadam, lr: 0.1}": "torch.optim's torch:NAME",
    "{name: schedule_free_sgd, lr: 0.1}": "schedule='cosine': .*set optimizer.schedule=constant",
}


def test_weights_are_averaged_once() -> None:
    optimizer = "optimizer={name: schedule_free_sgd, lr: 0.1, schedule: constant}"
    with pytest.raises(ConfigError, match=r"hooks\.swa: schedule_free_sgd averages weights itself"):
        load_config("simclr", [optimizer, "hooks.swa={}"])


@pytest.mark.parametrize("name", ["muon", "torch:Adafactor"])
def test_what_needs_whole_tensors_is_refused_on_shards(name: str) -> None:
    optimizer = f"optimizer={{name: '{name}', lr: 0.1}}"
    with pytest.raises(ConfigError, match=r"reduce='fsdp': .* needs whole .*; use 'ddp' or 'man"):
        load_config("simclr", [optimizer, "parallel=fsdp"])


@pytest.mark.parametrize("optimizer", MISTAKES)
def test_mistakes_are_found_before_training(optimizer: str) -> None:
    with pytest.raises(ConfigError, match=MISTAKES[optimizer]):
        load_config("simclr", [f"optimizer={optimizer}"])


MINE = """
from dataclasses import dataclass

import torch

from selftask.registry import register_optimizer

@register_optimizer("sign_sgd")
@dataclass(frozen=True, kw_only=True)
class SignSGD:
    power: float = 0.0

    def build(self, groups):
        return Sign(groups, {"lr": 0.1, "weight_decay": 0.0, "power": self.power, "steps": 0})

class Sign(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign() * p.grad.abs() ** group["power"])
"""


def test_an_optimizer_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered one, in the user's module, with a key and a count of its own; resumed."""
    for attribute in ("_registered", "_addresses"):  # forgotten after this test
        monkeypatch.setattr(OPTIMIZERS, attribute, {**getattr(OPTIMIZERS, attribute)})
    (tmp_path / "mine_sign.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    more = ["import=[mine_sign]", "train.max_steps=2"]
    own = "optimizer={name: sign_sgd, power: 0.5, lr: 0.01, schedule: constant, warmup: 0}"
    tiny.train("simclr", tmp_path, "run", *more, own, "train.stop_at=1")
    group = tiny.train("simclr", tmp_path, "run", *more, own).optimizer.param_groups[0]
    assert group["power"] == 0.5 and group["steps"] == 2
    assert [row["lr"] for row in tiny.rows(tmp_path / "run") if "lr" in row] == [0.01, 0.01]


# -- schedule-free weights in a run ------------------------------------------------------------


def test_averaged_weights_are_evaluated_exported_and_saved(tmp_path: Path) -> None:
    """Stopped in the middle, and never stopped: the same weights; all that is shown is x."""
    words = [
        "optimizer={name: schedule_free_adamw, lr: 0.01, schedule: constant, weight_decay: 0.01}",
        "train.epochs=2",
    ]
    tiny.train("simclr", tmp_path, "whole", *words)
    tiny.train("simclr", tmp_path, "parts", *words, "train.stop_at=3")
    task = tiny.train("simclr", tmp_path, "parts", *words)
    whole, parts = (tiny.last_state(tmp_path / name) for name in ("whole", "parts"))
    assert tiny.differences(whole, parts) == []

    states = task.optimizer.optimizer.state
    exported = torch.load(tmp_path / "parts/export/backbone.pt", weights_only=True)
    saved = parts["model"]
    for name, parameter in task.base_model.backbone.named_parameters():
        average: Tensor = states[parameter]["x"]
        assert torch.equal(exported[name], average)
        assert torch.equal(saved[f"backbone.{name}"], average)
        assert torch.equal(task.export_backbone().get_parameter(name), average)
        assert not torch.equal(parameter, average)  # training goes on at y


def test_test_phases_see_averaged_weights(tmp_path: Path) -> None:
    tiny.digits_file(tmp_path, "val.npz", 400, 430)
    words = [
        "optimizer={name: schedule_free_sgd, lr: 0.1, schedule: constant, warmup: 0}",
        f"data.val={tmp_path / 'val.npz'}",
        "meters.accuracy={topk: [1]}",
        "train.epochs=2",
    ]
    task = tiny.task("supervised", tmp_path, "run", *words)
    seen: list[tuple[bool, bool]] = []

    def look(task: Any) -> None:
        weight = next(task.base_model.parameters())
        average = task.optimizer.optimizer.state[weight].get("x", weight)
        seen.append((task.train, torch.equal(weight, average)))

    task.prepare()
    task.calls.setdefault("on_phase_start", []).append(look)
    task.prepare = lambda: None  # type: ignore[method-assign, assignment]
    train_loop(task)
    assert seen == [(True, True), (False, True), (True, False), (False, True)]
