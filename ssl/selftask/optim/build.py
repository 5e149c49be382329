"""Build the optimizer of the ``optimizer:`` section, with schedules over the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from selftask import classy
from selftask.classy import ClassyOptimizer, UpdateInterval
from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.config.values.duration import steps_in
from selftask.optim.param_groups import merge_alike, split_decay
from selftask.optim.schedules import Schedule, build_schedule, classy_schedule
from selftask.registry import OPTIMIZERS


class ScheduledOptimizer(ClassyOptimizer):  # type: ignore[misc]  # classy-vision ships no types
    """A torch optimizer under Classy's contract: ``step(where=...)`` sets lr and decay first."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def prepare(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer: torch.optim.Optimizer = self.config.build(param_groups)
        self._moving: list[list[tuple[str, Schedule]]] = [
            [(key, value) for key, value in group.items() if _moves_each_step(value)]
            for group in self._param_group_schedulers
        ]

    def step(self, *args: Any, closure: Callable[[], Any] | None = None, where: float) -> None:
        """Do one optimizer step at progress ``where`` in [0, 1).

        Like Classy's own, but without building and comparing all groups at every step. Values that
        change per epoch, constants included, are set by ``on_epoch``.
        """
        for group, moving in zip(self.optimizer.param_groups, self._moving, strict=True):
            for key, schedule in moving:
                group[key] = schedule(where)
        self.optimizer.step(closure)

    def zero_grad(self) -> None:
        """Set all gradients to None.

        torch's own method also enters a profiler range and guards against torch.compile, which
        takes longer than a small layer's forward pass.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _moves_each_step(value: Any) -> bool:
    return getattr(value, "update_interval", None) == UpdateInterval.STEP


def build_optimizer(
    config: OptimizerConfig,
    modules: Iterable[tuple[str, nn.Module]],
    length: RunLength,
    *,
    batch: int,
    regroup: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
) -> Any:
    """Build the optimizer of named modules: one of selftask's or ``classy:NAME``.

    Args:
        config: The ``optimizer`` section.
        modules: Named modules whose parameters are trained.
        length: Length of the run, for schedules.
        batch: Number of samples per step.
        regroup: Applied to the final groups of parameters; see ``Reduction.regroup``.

    Returns:
        A Classy optimizer with ``step(where=...)``.
    """
    groups = split_decay(modules, decay_all=config.decay_1d, decay_tokens=config.decay_tokens)
    decay = weight_decay_schedule(config)
    for group in groups:
        group["weight_decay"] = decay if group.pop("decay") else 0.0
    if config.name in OPTIMIZERS:
        own = OPTIMIZERS[config.name](**config.args)
        optimizer = ScheduledOptimizer(own)
    else:
        own = None
        optimizer = classy.build("optimizer", config.name, {"num_epochs": 1, **config.args})
    if not getattr(own, "layerwise", False):
        groups = merge_alike([_without(group, "adapt") for group in groups])
    optimizer.set_param_groups(regroup(groups), lr=lr_schedule(config, length, batch=batch))
    return optimizer


def _without(group: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != key}


def lr_schedule(config: OptimizerConfig, length: RunLength, *, batch: int) -> Schedule:
    """Return the learning rate schedule: scaled with the batch, warmed up, then annealed."""
    if isinstance(config.lr, dict):
        return classy_schedule(config.lr)
    factor = {"none": 1.0, "linear": batch / 256, "sqrt": math.sqrt(batch / 256)}[config.lr_scale]
    warmup = steps_in(config.warmup, length)
    return build_schedule(
        config.schedule,
        config.lr * factor,
        config.end_lr * factor,
        warmup=warmup / length.total_steps,
        warmup_start=config.start_lr * factor,
    )


def weight_decay_schedule(config: OptimizerConfig) -> Schedule | float:
    """Return the weight decay: a number, or a cosine to ``end_weight_decay`` as in DINO."""
    if config.end_weight_decay is None:
        return config.weight_decay
    return build_schedule("cosine", config.weight_decay, config.end_weight_decay)
