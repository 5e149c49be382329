"""LARS and LARC against their definitions, number by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.optim.build import build_optimizer
from selftask.optim.optimizers.lamb import LAMB
from selftask.optim.optimizers.larc import LARC
from selftask.optim.optimizers.lars import LARS
from selftask.optim.optimizers.lion import Lion

STEPS = 6
MOMENTUM, DECAY, TRUST = 0.9, 0.1, 0.02


def norm(row: list[float]) -> float:
    return math.sqrt(sum(x * x for x in row))


def lr_at(step: int) -> float:
    return 0.5 * (step + 1)


def gradient(weight: list[float], step: int) -> list[float]:
    return [math.sin(1 + w + step) for w in weight]


def train(
    rule: Callable[..., tuple[list[float], list[float]]], weight: list[float]
) -> list[list[float]]:
    """The weights after each step of ``rule``."""
    velocity, path = [0.0] * len(weight), []
    for step in range(STEPS):
        grad = gradient(weight, step)
        weight, velocity = rule(weight, grad, velocity, lr_at(step))
        path.append(weight)
    return path


def larc(w: list[float], g: list[float], v: list[float], lr: float) -> Any:
    """apex.parallel.LARC(SGD, trust_coefficient=TRUST, clip=False), as it is documented."""
    if norm(w) != 0 and norm(g) != 0:
        local_lr = TRUST * norm(w) / (norm(g) + norm(w) * DECAY + 1e-8)
        g = [local_lr * (a + DECAY * b) for a, b in zip(g, w, strict=True)]
    v = [MOMENTUM * a + b for a, b in zip(v, g, strict=True)]
    return [a - lr * b for a, b in zip(w, v, strict=True)], v


def lars(w: list[float], g: list[float], v: list[float], lr: float, *, classic: bool) -> Any:
    """SimCLR's (classic momentum) and BYOL's (lr outside) rule for a weight that is adapted."""
    g = [a + DECAY * b for a, b in zip(g, w, strict=True)]
    ratio = TRUST * norm(w) / norm(g) if norm(w) > 0 and norm(g) > 0 else 1.0
    if classic:
        v = [MOMENTUM * a + lr * ratio * b for a, b in zip(v, g, strict=True)]
        return [a - b for a, b in zip(w, v, strict=True)], v
    v = [MOMENTUM * a + ratio * b for a, b in zip(v, g, strict=True)]
    return [a - lr * b for a, b in zip(w, v, strict=True)], v


def solo_learns(w: list[float], g: list[float], v: list[float], lr: float) -> Any:
    """Lightning Bolts' LARS, as in solo-learn: equation 6 of the paper, clipped, without eps."""
    rate = TRUST * norm(w) / (norm(g) + DECAY * norm(w))
    rate = min(rate / lr, 1.0)
    v = [MOMENTUM * a + rate * (b + DECAY * c) for a, b, c in zip(v, g, w, strict=True)]
    return [a - lr * b for a, b in zip(w, v, strict=True)], v


def path(optimizer_type: type[LARS], weight: list[float], **args: Any) -> list[list[float]]:
    parameter = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    optimizer = optimizer_type(
        [parameter], lr=0.0, momentum=MOMENTUM, weight_decay=DECAY, trust_coefficient=TRUST, **args
    )
    results = []
    for step in range(STEPS):
        parameter.grad = torch.tensor(gradient(parameter.tolist(), step), dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = lr_at(step)
        optimizer.step()
        results.append(parameter.tolist())
    return results


@pytest.mark.parametrize("weight", [[0.3, -1.2, 0.7], [0.0, 0.0]])
def test_larc_is_apexs(weight: list[float]) -> None:
    """A weight of zero, such as a shift of BatchNorm at first, is not adapted."""
    for one, other in zip(path(LARC, weight), train(larc, weight), strict=True):
        assert one == pytest.approx(other, rel=1e-13)


@pytest.mark.parametrize("classic", [False, True])
def test_lars_with_the_lr_outside_and_inside_of_the_velocity(classic: bool) -> None:
    weight = [0.3, -1.2, 0.7]
    expected = train(lambda *state: lars(*state, classic=classic), weight)
    for one, other in zip(path(LARS, weight, classic_momentum=classic), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-13)


def test_lars_with_the_norms_of_gradient_and_weight_apart() -> None:
    weight = [0.3, -1.2, 0.7]
    ours = path(LARS, weight, separate_norms=True, clip_lr=True)
    for one, other in zip(ours, train(solo_learns, weight), strict=True):
        assert one == pytest.approx(other, rel=1e-13)


@pytest.mark.parametrize(("trust", "moved"), [(0.02, 3.9), (1.0, 3.0)])
def test_the_rate_of_a_weight_is_at_most_the_lr(trust: float, moved: float) -> None:
    """LARC's clip mode: |w| = 5 and |g| = 2, the rate is min(trust * 5 / 2, lr)."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.0, 2.0])
    LARS([weight], lr=0.5, trust_coefficient=trust, clip_lr=True).step()
    assert weight.tolist() == pytest.approx([3.0, moved])


def test_a_gradient_of_zero_does_not_decay_under_larc() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    LARC([parameter], lr=1.0, weight_decay=0.5).step()
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_larc_by_name_adapts_and_decays_norms_and_biases() -> None:
    """One step of the registered optimizer on a BatchNorm, as in SwAV's and DeepCluster's code."""
    config = OptimizerConfig(
        name="larc",
        args={"sgd_momentum": MOMENTUM, "trust_coefficient": TRUST},
        lr=1.0,
        weight_decay=DECAY,
        decay_1d=True,
    )
    norm_layer = torch.nn.BatchNorm1d(3).double()
    length = RunLength(num_samples=80, batch_size=8, epochs=2)
    optimizer = build_optimizer(config, [("network", norm_layer)], length, batch=8)
    norm_layer.weight.grad = torch.tensor([1.0, 2.0, 3.0]).double()
    expected, _ = larc([1.0] * 3, [1.0, 2.0, 3.0], [0.0] * 3, 1.0)
    optimizer.step(where=0.0)
    assert norm_layer.weight.tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(("name", "scale"), [("lars", 0.5), ("lamb", 1.0)])
def test_lars_and_lamb_by_name_adapt_weights_only(name: str, scale: float) -> None:
    """The first step without momentum: |step| is lr * scale * |w|; biases take a plain step."""
    args = {"sgd_momentum": 0.0, "trust_coefficient": scale} if name == "lars" else {"eps": 1e-12}
    config = OptimizerConfig(name=name, args=args, lr=0.1, schedule="constant", warmup=0)
    layer = torch.nn.Linear(2, 2).double()
    length = RunLength(num_samples=80, batch_size=8, epochs=2)
    optimizer = build_optimizer(config, [("network", layer)], length, batch=8)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    layer.weight.grad = torch.tensor([[3.0, -1.0], [0.5, 2.0]]).double()
    layer.bias.grad = torch.tensor([2.0, -0.5]).double()
    optimizer.step(where=0.5)
    moved = (layer.weight.detach() - weight).norm().item()
    assert moved == pytest.approx(0.1 * scale * weight.norm().item(), rel=1e-9)
    plain = [2.0, -0.5] if name == "lars" else [1.0, -1.0]
    assert ((bias - layer.bias.detach()) / 0.1).tolist() == pytest.approx(plain, rel=1e-9)


class Counter(TorchDispatchMode):
    """Number of operations, of which one of torch's foreach functions is one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [LARS, LARC, LAMB, Lion])
def test_a_step_has_as_many_operations_for_any_number_of_parameters(kind: Any) -> None:
    counts = []
    for number in (3, 30):
        parameters = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.ones(2, 3)
        optimizer = kind(parameters, lr=0.1, weight_decay=0.1)
        optimizer.step()  # makes the state
        with Counter() as counter:
            optimizer.step()
        counts.append(counter.count)
    assert counts[0] == counts[1] < 30
