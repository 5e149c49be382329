"""Optimizers of several weights, of steps without a move, and with the defaults of their papers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.errors import UserError
from selftask.optim.build import ScheduledOptimizer, build_optimizer
from selftask.optim.optimizers.lamb import LAMB
from selftask.optim.optimizers.lion import Lion
from selftask.optim.optimizers.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from selftask.registry import OPTIMIZERS

LR, DECAY, BETA1, BETA2, EPS = 0.05, 0.1, 0.8, 0.95, 1e-6
Row = list[float]


def norm(row: Row) -> float:
    return math.sqrt(math.fsum(x * x for x in row))


def gradient(weight: Row, step: int) -> Row:
    return [math.sin(1 + len(weight) * w + step) for w in weight]


def lamb(w: Row, first: int, last: int) -> Row:
    """Algorithm 2 of arXiv:1904.00962, with gradients in the steps from ``first`` to ``last``."""
    m = v = [0.0] * len(w)
    for t, step in enumerate(range(first, last), start=1):
        g = gradient(w, step)
        m = [BETA1 * a + (1 - BETA1) * b for a, b in zip(m, g, strict=True)]
        v = [BETA2 * a + (1 - BETA2) * b * b for a, b in zip(v, g, strict=True)]
        r = [
            a / (1 - BETA1**t) / (math.sqrt(b / (1 - BETA2**t)) + EPS) + DECAY * x
            for a, b, x in zip(m, v, w, strict=True)
        ]
        w = [x - LR * norm(w) / norm(r) * y for x, y in zip(w, r, strict=True)]
    return w


def test_weights_of_a_group_have_their_own_steps_and_ratios_in_lamb() -> None:
    """Two weights of different length, the second of which has no gradient at first."""
    rows, firsts = ([0.3, -1.2, 0.7], [5.0, 4.0]), (0, 2)
    parameters = [nn.Parameter(torch.tensor(row, dtype=torch.float64)) for row in rows]
    optimizer = LAMB(parameters, LR, (BETA1, BETA2), EPS, DECAY)
    for step in range(6):
        for parameter, first in zip(parameters, firsts, strict=True):
            if step >= first:
                values = gradient(parameter.tolist(), step)
                parameter.grad = torch.tensor(values, dtype=torch.float64)
        optimizer.step()
    for parameter, row, first in zip(parameters, rows, firsts, strict=True):
        assert parameter.tolist() == pytest.approx(lamb(row, first, 6), rel=1e-12)


def test_lamb_without_gradient_and_weight_decay_makes_no_move() -> None:
    """The trust ratio would be infinite, and the weight NaN."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    LAMB([parameter], lr=0.1).step()
    assert parameter.tolist() == [1.0] * 3


def _sgd_path(lrs: list[float], weight: Row) -> list[Row]:
    parameter, path = nn.Parameter(torch.tensor(weight, dtype=torch.float64)), []
    optimizer = ScheduleFreeSGD([parameter], interpolation=0.9)
    for step, lr in enumerate(lrs):
        parameter.grad = torch.tensor(gradient(weight, step), dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        path.append(parameter.tolist())
    return path


def test_steps_with_a_learning_rate_of_zero_do_not_count_in_schedule_free() -> None:
    """As at the start of a warm-up; algorithm 1 has 0 / 0 there."""
    weight, lr = [0.3, -1.2], 1e-4
    still, moved, again = _sgd_path([0.0, lr, lr], weight)
    assert still == weight
    first, second = gradient(weight, 1), gradient(weight, 2)
    z = [w - lr * g for w, g in zip(weight, first, strict=True)]  # and x, whose weight of z is 1
    assert moved == pytest.approx(z, rel=1e-14)
    later = [a - lr * g for a, g in zip(z, second, strict=True)]
    average = [(a + b) / 2 for a, b in zip(z, later, strict=True)]
    expected = [0.1 * a + 0.9 * b for a, b in zip(later, average, strict=True)]
    assert again == pytest.approx(expected, rel=1e-14)


def test_a_checkpoint_of_averages_continues_where_gradients_are_taken() -> None:
    """A checkpoint has x as weights, and the next step begins at y."""
    optimizers: list[Any] = []
    for _ in range(2):
        weight = nn.Parameter(torch.tensor([0.3, -1.2]))
        optimizers.append(ScheduleFreeAdamW([weight], interpolation=0.9, beta2=BETA2, eps=EPS))

    def step(optimizer: Any, number: int) -> Tensor:
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.tensor(gradient([0.5, number], number))
        optimizer.step()
        return parameter.detach().clone()

    first, second = optimizers
    for number in range(3):
        at_y = step(first, number)
    first.eval()
    (source,), (target,) = (each.param_groups[0]["params"] for each in optimizers)
    assert not torch.equal(source, at_y)
    with torch.no_grad():
        target.copy_(source)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(target, at_y)
    first.train()
    assert torch.equal(step(first, 3), step(second, 3))


def test_lamb_gives_biases_the_plain_update_of_adam() -> None:
    network = nn.Linear(2, 2).double()
    with torch.no_grad():
        network.weight.fill_(2.0), network.bias.fill_(3.0)
    config = OptimizerConfig(
        name="lamb", args=vars(OPTIMIZERS["lamb"]()), lr=LR, weight_decay=0.0, schedule="constant"
    )
    length = RunLength(num_samples=4, batch_size=1, epochs=1)
    optimizer: Any = build_optimizer(config, [("network", network)], length, batch=1)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(where=0.0)
    # r is 1 for each number: the weight has norm 4, its update norm 2
    assert network.weight.flatten().tolist() == pytest.approx([2 - LR * 2] * 4, rel=1e-5)
    assert network.bias.tolist() == pytest.approx([3 - LR] * 2, rel=1e-5)


PUBLISHED: dict[str, dict[str, Any]] = {
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6},  # arXiv:1904.00962
    "lion": {"betas": (0.9, 0.99)},  # arXiv:2302.06675, algorithm 2
    "schedule_free_adamw": {"interpolation": 0.9, "beta2": 0.999, "eps": 1e-8},  # authors' code
    "schedule_free_sgd": {"interpolation": 0.9},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    assert vars(OPTIMIZERS[name]()) == PUBLISHED[name]


def test_optimizers_by_themselves_have_the_defaults_of_the_config() -> None:
    weight = nn.Parameter(torch.zeros(1))
    lamb, lion = LAMB([weight]), Lion([weight])
    assert lamb.defaults["betas"] == PUBLISHED["lamb"]["betas"]
    assert lamb.eps == PUBLISHED["lamb"]["eps"]
    assert lion.defaults["betas"] == PUBLISHED["lion"]["betas"]


class Returns:
    def __init__(self, made: Any) -> None:
        self.made = made

    def build(self, groups: Any) -> Any:
        return self.made


class Takes(Returns):
    def build(self, model: Any, lr: float) -> Any:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Returns(None), "an optimizer's build returned None, not a torch.optim.Optimizer"),
        (Returns([0] * 99), r"an optimizer's build returned \[0, 0, [0, ]{73}, not a torch"),
        (
            Returns(torch.optim.SGD([torch.zeros(1)])),
            "an optimizer's build returned one with 1 parameter groups instead of the 0 of its",
        ),
        (Takes(None), r"an optimizer's build is called with \(groups\), and takes \(model"),
    ],
)
def test_a_build_that_makes_no_optimizer_is_named(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"test_optimizer_edges.py:\d+: {message}"):
        ScheduledOptimizer(options.build, [], constant_options=True).prepare([])
