"""Clipping against torch's and timm's functions, norms by part, and the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn

import tiny
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.hooks.base import function_hook
from selftask.hooks.gradients.gradient_noise import GradientNoise, estimate
from selftask.optim.gradients import (
    clip_adaptively,
    clip_norm,
    clip_value,
    gradients,
    total_norm,
    whole_norms,
)
from selftask.task import Task
from selftask.task.frozen import FrozenParameters
from selftask.task.loop import train_loop

SHAPES = [(4, 3), (2, 3, 2, 2), (4,), (), (3, 2)]


def parameters(scale: float = 3.0) -> list[nn.Parameter]:
    """Weights and gradients of all ranks; the last one has no gradient."""
    draws = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=draws, dtype=torch.float64) for s in (*SHAPES, *SHAPES)]
    chosen = [nn.Parameter(weight) for weight in made[: len(SHAPES)]]
    for parameter, grad in zip(chosen[:-1], made[len(SHAPES) :], strict=False):
        parameter.grad = scale * grad
    return chosen


def same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [2.0, 1e6])
def test_a_common_norm_is_torchs(p: float, max_norm: float) -> None:
    ours, theirs = parameters(), parameters()
    total = total_norm(gradients(ours), p)
    norm = clip_norm(gradients(ours), max_norm, p=p)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=p)
    assert total.item() == norm.item() == pytest.approx(expected.item(), rel=1e-12)
    same(ours, theirs)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_each_gradient_has_a_norm_of_its_own(p: float) -> None:
    """As in DINO's code: a loop over the parameters."""
    ours, theirs = parameters(), parameters()
    norm = clip_norm(gradients(ours), 2.0, p=p, each=True)
    assert norm.item() == pytest.approx(nn.utils.get_total_norm(gradients(theirs), p).item())
    for parameter in theirs:
        nn.utils.clip_grad_norm_([parameter], 2.0, norm_type=p)
    same(ours, theirs)


def test_values_are_clamped_as_by_torch() -> None:
    ours, theirs = parameters(), parameters()
    clip_value(gradients(ours), 0.7)
    nn.utils.clip_grad_value_(theirs, 0.7)
    same(ours, theirs)


@pytest.mark.parametrize("scale", [3.0, 1e-3])
def test_adaptive_clipping_is_timms(scale: float) -> None:
    ours, theirs = parameters(scale), parameters(scale)
    for chosen in (ours, theirs):
        chosen[0].data[1] = 0.0  # a unit of zero weights: eps counts
    clip_adaptively(ours, 0.02)
    adaptive_clip_grad(theirs, clip_factor=0.02)
    same(ours, theirs)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_norm([], 1.0).item() == total_norm([]).item() == 0.0
    clip_value([], 1.0)


def test_an_empty_shard_counts_as_zero() -> None:
    assert whole_norms([torch.zeros(0, 3), torch.ones(2)], math.inf).tolist() == [0.0, 1.0]


MODES: dict[str, tuple[str, Callable[[list[nn.Parameter]], Any]]] = {
    "norm": ("max_norm: 0.1", lambda all_: nn.utils.clip_grad_norm_(all_, 0.1)),
    "value": (
        "mode: value, max_value: 0.01",
        lambda all_: nn.utils.clip_grad_value_(all_, 0.01),
    ),
    "adaptive": (
        "mode: adaptive, max_ratio: 0.01",
        lambda all_: adaptive_clip_grad(all_, clip_factor=0.01),
    ),
    "per_parameter": (
        "mode: per_parameter, max_norm: 0.1",
        lambda all_: [nn.utils.clip_grad_norm_([one], 0.1) for one in all_],
    ),
    "largest": (
        "norm_type: max, max_norm: 0.01",
        lambda all_: nn.utils.clip_grad_norm_(all_, 0.01, norm_type=math.inf),
    ),
}


def copies(task: Task) -> list[nn.Parameter]:
    """The trained weights with their gradients."""
    made = []
    for parameter in (p for group in task.optimizer.param_groups for p in group["params"]):
        made.append(nn.Parameter(parameter.detach().clone()))
        made[-1].grad = parameter.grad.clone()
    return made


@pytest.mark.parametrize("mode", MODES)
def test_modes_by_the_config(mode: str, tmp_path: Path) -> None:
    """Gradients before and after the hook beside torch's and timm's; the norm before is logged."""
    config, clip = MODES[mode]
    words = ["train.max_steps=1", f"hooks.clip_gradients={{{config}}}"]
    task = tiny.task("simclr", tmp_path, "run", *words)
    seen: list[list[nn.Parameter]] = []
    for priority in (19, 21):  # beside that of the hook
        see = function_hook(on_backward=lambda task: seen.append(copies(task)), priority=priority)
        task.add_hook(see)
    train_loop(task)
    theirs, ours = seen
    order = math.inf if mode == "largest" else 2.0
    norm = nn.utils.get_total_norm([p.grad for p in theirs], order)
    assert tiny.rows(task.out)[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    before = [p.grad.clone() for p in theirs]
    clip(theirs)
    same(ours, theirs)
    assert any(not torch.equal(p.grad, grad) for p, grad in zip(ours, before, strict=True))


@pytest.mark.parametrize("step", [(), ("train.step=accumulate", "train.accumulate=2")])
def test_clipped_after_unscaling(step: tuple[str, ...], tmp_path: Path) -> None:
    """In float16: the first update of SGD is lr times a gradient of the norm that is allowed."""
    words = [
        *("train.precision=float16", "train.grad_scaler.init_scale=1024", "train.max_steps=1"),
        "optimizer={name: sgd, lr: 0.5, schedule: constant, warmup: 0, weight_decay: 0}",
        "hooks.clip_gradients={max_norm: 0.01}",
    ]
    task = tiny.task("simclr", tmp_path, "run", *words, *step)
    seen: list[list[nn.Parameter]] = []
    task.add_hook(function_hook(on_backward=lambda task: seen.append(copies(task))))
    train_loop(task)
    trained = [p for group in task.optimizer.param_groups for p in group["params"]]
    moved = [after.detach() - before for before, after in zip(seen[0], trained, strict=True)]
    assert tiny.rows(task.out)[0]["grad_norm"] > 0.01
    assert nn.utils.get_total_norm(moved).item() == pytest.approx(0.5 * 0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("{mode: value}", "mode 'value' needs it; set hooks.clip_gradients.max_value"),
        ("{max_value: 1}", "max_value: has no effect with mode 'norm'; set mode: value"),
        ("{max_ratio: 0.1}", "max_ratio: has no effect with mode 'norm'; set mode: adaptive"),
        ("{per_parameter: true}", r"unknown key 'hooks.clip_gradients.per_parameter'.*mode"),
    ],
)
def test_contradictions(hook: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config("simclr", [f"hooks.clip_gradients={hook}"])


def test_norms_by_part_of_the_model(tmp_path: Path) -> None:
    """The first step of plain SGD changes the weights by lr times the gradient before clipping."""
    words = [
        "hooks.gradient_norms={}",
        "hooks.clip_gradients={max_norm: 1e9}",
        "optimizer={name: sgd, lr: 0.5, schedule: constant, warmup: 0, weight_decay: 0}",
        "train.max_steps=3",
        "train.log_every=2",
    ]
    task = tiny.train("simclr", tmp_path, "run", *words)
    last = tiny.rows(tmp_path / "run")[-2]
    parts = {key.partition("/")[2] for key in last if key.startswith("grad_norm/")}
    assert parts == {"network.backbone", "network.head"}
    squares = sum(last[f"grad_norm/{part}"] ** 2 for part in parts)
    assert last["grad_norm"] ** 2 == pytest.approx(squares, rel=1e-5)

    words[-2:] = ["train.max_steps=1", "train.log_every=1"]
    task = tiny.train("simclr", tmp_path, "one", *words)
    row = tiny.rows(tmp_path / "one")[0]
    for part in parts:
        change = row[f"update_ratio/{part}"] * row[f"weight_norm/{part}"]
        assert change == pytest.approx(0.5 * row[f"grad_norm/{part}"], rel=1e-4)
    assert not task.named_hooks["gradient_norms"].before

    frozen = "optimizer.groups=[{match: network.backbone, freeze: 2}]"
    tiny.train("simclr", tmp_path, "frozen", *words, frozen)
    norm = tiny.rows(tmp_path / "frozen")[0]["grad_norm"]
    assert norm == pytest.approx(row["grad_norm/network.head"], rel=1e-5)


def test_noise_of_known_gradients() -> None:
    """Means over many parts: the trace of the covariance, and the squared norm of the mean."""
    draws = torch.Generator().manual_seed(0)
    mean, spread = torch.linspace(0.1, 1, 10), torch.linspace(2, 0.5, 10)
    samples = mean + spread * torch.randn(4000, 2, 8, 10, generator=draws)  # steps, parts, samples
    small = samples.mean(2).square().sum(-1).mean().item()
    big = samples.mean((1, 2)).square().sum(-1).mean().item()
    noise, signal = estimate(small, big, 8, 16)
    assert noise == pytest.approx(spread.square().sum().item(), rel=0.05)
    assert signal == pytest.approx(mean.square().sum().item(), rel=0.05)


def test_the_noise_hook_takes_the_norms_of_the_parts() -> None:
    """Two accumulated batches under a loss scale of 8, beside gradients taken one by one."""
    layer, frozen = nn.Linear(3, 2).double(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]
    logged: dict[str, float] = {}
    task: Any = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(accumulate=2)),
        should_log=True,
        batches_left=5,
        device=torch.device("cpu"),
        optimizer=SimpleNamespace(param_groups=[{"params": [*layer.parameters(), frozen]}]),
        frozen=FrozenParameters([(10, frozen)]),  # has gradients in the parts, not in the step
        steps_done=0,
        grad_scaler=SimpleNamespace(get_scale=lambda: 8.0),
        length=SimpleNamespace(batch_size=4),
        log=logged.__setitem__,
    )
    hook = GradientNoise(decay=0.25)
    hook.load_state_dict({"means": [2.0, 0.4]})
    hook.on_start(task)
    hook.before_step(task)
    for batch in batches:
        (8.0 * 0.5 * (layer(batch) * frozen).square().mean()).backward()
    task.frozen.drop_gradients(0)
    for parameter in layer.parameters():
        parameter.grad /= 8.0  # unscaled
    hook.on_backward(task)

    each = [flat_gradient(layer, [batch]) for batch in batches]
    small = sum(float(g.square().sum()) for g in each) / 2
    big = float(flat_gradient(layer, batches).square().sum())
    noise = (small - big) / (1 / 4 - 1 / 8)
    signal = (8 * big - 4 * small) / 4
    noise, signal = 0.25 * 2.0 + 0.75 * noise, 0.25 * 0.4 + 0.75 * signal
    assert logged["gradient_noise_scale"] == pytest.approx(noise / signal, rel=1e-5)
    assert not hook.handles
    assert hook.state_dict() == {"means": pytest.approx([noise, signal], rel=1e-5)}


def flat_gradient(layer: nn.Module, batches: list[Tensor]) -> Tensor:
    loss = torch.stack([layer(batch).square().mean() for batch in batches]).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(layer.parameters()))])
