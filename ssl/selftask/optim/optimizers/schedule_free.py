"""Schedule-free AdamW and SGD: averaged weights instead of a decaying learning rate.

Defazio et al., The Road Less Scheduled, arXiv:2405.15682. Gradients are taken at y, between the
base sequence z and its average x; x is evaluated, exported and saved. BatchNorm's running
statistics are those of y: ``hooks.precise_bn`` recomputes them for x.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.optim.per_group import PerGroup
from selftask.registry import register_optimizer


class ScheduleFree(PerGroup):
    """Base class of schedule-free optimizers, algorithm 1 of the paper::

        z <- z - rate * d - rate * weight_decay * y
        c = rate^2 / (sum of rate^2 over the steps so far)
        x <- (1 - c) * x + c * z
        y <- (1 - interpolation) * z + interpolation * x

    Subclasses define a step's direction d and rate. Parameters are y while training, and x after
    ``eval()``.
    """

    def __init__(self, params: Any, *, interpolation: float, **options: float) -> None:
        self.training = True
        super().__init__(
            params, {"lr": 1e-3, "weight_decay": 0.0, "interpolation": interpolation, **options}
        )

    @abstractmethod
    def direction(
        self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[Tensor, float]:
        """Return direction and rate of the step for one parameter.

        Args:
            grad: Gradient of the parameter, of any shape.
            state: State of the parameter, modified in place.
            group: The parameter group.
        """

    def update_group(self, weights: list[Tensor], grads: list[Tensor], group: Any) -> None:
        for y, grad in zip(weights, grads, strict=True):
            self._update(y, grad, group)

    def _update(self, y: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[y]
        if not state:
            state.update(z=y.clone(), x=y.clone(), rates=0.0)
        z, x = state["z"], state["x"]
        direction, rate = self.direction(grad, state, group)
        z.sub_(direction, alpha=rate).sub_(y, alpha=rate * group["weight_decay"])
        state["rates"] += rate**2
        x.lerp_(z, rate**2 / max(state["rates"], 1e-38))  # a rate of zero makes no step
        y.copy_(z.lerp(x, group["interpolation"]))

    def eval(self) -> None:
        """Set the parameters to the averages x."""
        self._show(training=False)

    def train(self) -> None:
        """Set the parameters to y; they are bit-identical to those before ``eval()``."""
        self._show(training=True)

    @torch.no_grad()
    def _show(self, *, training: bool) -> None:
        self.training = training
        for group in self.param_groups:
            share = group["interpolation"] if training else 1.0
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    parameter.copy_(state["z"].lerp(state["x"], share))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states, and set the parameters to y; a checkpoint has x as weights."""
        super().load_state_dict(state_dict)
        self.train()


class ScheduleFreeSGD(ScheduleFree):
    """Schedule-free SGD: the direction is the gradient, the rate is lr."""

    def direction(
        self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[Tensor, float]:
        return grad, group["lr"]


class ScheduleFreeAdamW(ScheduleFree):
    """Schedule-free AdamW: direction d and rate for a gradient g at step t::

        v <- beta2 * v + (1 - beta2) * g^2
        d = g / (sqrt(v) + eps)
        rate = lr * sqrt(1 - beta2^t)

    The second moment v starts at zero, and steps count from 1.
    """

    def direction(
        self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[Tensor, float]:
        if "square" not in state:
            state.update(step=0, square=torch.zeros_like(grad))
        state["step"] += 1
        beta2 = group["beta2"]
        square = state["square"].lerp_(grad.square(), 1 - beta2)
        rate = group["lr"] * (1 - beta2 ** state["step"]) ** 0.5
        return grad / square.sqrt().add_(group["eps"]), rate


@dataclass(frozen=True, kw_only=True)
class _Config(FieldArguments):
    interpolation: float = setting(0.9, above=0, max=1)
    """Weight of the average x in the point y at which gradients are computed; beta1 of AdamW."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        """Yield a problem if the schedule is not constant, and if a hook also averages weights."""
        section = config["optimizer"]
        name = section["name"]
        key = "lr" if isinstance(section["lr"], dict) and "name" in section["lr"] else "schedule"
        schedule = section[key]["name"] if isinstance(section[key], dict) else section[key]
        if schedule != "constant":
            yield (
                f"optimizer.{key}={schedule!r}: {name} averages weights instead of lowering the "
                "lr; set optimizer.schedule=constant (a warm-up is fine)"
            )
        for hook, args in config["hooks"].items():
            if (args or {}).get("name", hook) in ("ema", "swa"):
                yield f"hooks.{hook}: {name} averages weights itself; take one of them out"


@register_optimizer("schedule_free_adamw")
@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamWConfig(_Config):
    """Schedule-free AdamW; needs ``schedule: constant`` and keeps three states per weight."""

    optimizer = ScheduleFreeAdamW

    beta2: float = setting(0.999, min=0, below=1)
    """Decay of the second moment."""
    eps: float = setting(1e-8, min=0)
    """Term added to the denominator for numerical stability."""


@register_optimizer("schedule_free_sgd")
@dataclass(frozen=True, kw_only=True)
class ScheduleFreeSGDConfig(_Config):
    """Schedule-free SGD; needs ``schedule: constant`` and keeps two states per weight."""

    optimizer = ScheduleFreeSGD
