"""Build the optimizer of the ``optimizer:`` section, with schedules over the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selftask import classy
from selftask.classy import ClassyOptimizer, UpdateInterval
from selftask.config.extensions.user_code import check_takes, source_of
from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.config.schema.optimizer import GroupRule
from selftask.config.torch_names import is_torch_name, torch_optimizer
from selftask.errors import UserError
from selftask.optim.curves import Curve, Scaled, Schedule
from selftask.optim.param_groups import Settings, assign_settings, merge_alike
from selftask.optim.schedules import build_schedule
from selftask.registry import OPTIMIZERS


class ScheduledOptimizer(ClassyOptimizer):  # type: ignore[misc]  # classy-vision ships no types
    """A torch optimizer with Classy's interface: ``step(where=...)`` first evaluates schedules.

    Args:
        build: Builds the torch optimizer of parameter groups.
        settings: Settings of each parameter, in the order of the groups.
        constant_options: Whether the optimizer itself changes no option of its groups. Options of
            the config without a schedule then replace those of a checkpoint.
    """

    def __init__(
        self,
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        settings: Sequence[Settings],
        *,
        constant_options: bool,
    ) -> None:
        super().__init__()
        self.build = build
        self.settings = settings
        self.constant_options = constant_options

    def prepare(self, param_groups: list[dict[str, Any]]) -> None:
        check_takes(self.build, ["groups"], "an optimizer's build")
        self.optimizer = self.build(param_groups)
        wrong = None
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            wrong = f"{self.optimizer!r:.80}, not a torch.optim.Optimizer"
        elif (made := len(self.optimizer.param_groups)) != len(param_groups):
            wrong = (
                f"one with {made} parameter groups instead of the {len(param_groups)} of its "
                "argument, which have their own learning rates and weight decays; pass `groups`"
            )
        if wrong is not None:
            raise UserError(f"{source_of(self.build)}: an optimizer's build returned {wrong}")
        self._list_moving()

    def _list_moving(self) -> None:
        """Collect the schedules that change at every step, with the group options that each sets.

        A schedule shared by several groups is thus evaluated once per step.
        """
        moving: dict[int, tuple[Schedule, list[tuple[int, str, float | None]]]] = {}
        for number, group in enumerate(self._param_group_schedulers):
            for key, value in group.items():
                if getattr(value, "update_interval", None) == UpdateInterval.STEP:
                    is_scaled = isinstance(value, Scaled)
                    base, factor = (value.schedule, value.factor) if is_scaled else (value, None)
                    moving.setdefault(id(base), (base, []))[1].append((number, key, factor))
        self._moving = list(moving.values())

    def step(self, *args: Any, closure: Callable[[], Any] | None = None, where: float) -> None:
        """Run one optimizer step at progress ``where`` in [0, 1).

        Unlike Classy's own method, it does not build and compare all groups at every step.
        Constants and values that change per epoch are set by ``on_epoch``.
        """
        groups = self.optimizer.param_groups
        for schedule, targets in self._moving:
            value = schedule(where)
            for number, key, factor in targets:
                groups[number][key] = value if factor is None else value * factor
        self.optimizer.step(closure)

    def multiply_lr(self, factor: Callable[[], float]) -> None:
        """Multiply the learning rates of all groups by ``factor()``, evaluated at every step."""
        for group in self._param_group_schedulers:
            group["lr"] = Curve(partial(_times, group["lr"], factor))
        self._list_moving()

    def get_classy_state(self) -> dict[str, Any]:
        """Return the state with the names of the parameters; torch's own state has only indices."""
        return {**super().get_classy_state(), "names": self._names}

    def set_classy_state(self, state: dict[str, Any]) -> None:
        """Restore the state.

        Options of the groups that neither a schedule nor the optimizer changes keep the values of
        the config.

        Raises:
            ValueError: If the parameters are others or in another order.
        """
        for before, now in zip(state["names"], self._names, strict=True):
            if before != now:
                raise ValueError(
                    f"optimizer.groups or optimizer.layer_decay put {now!r} where the checkpoint "
                    f"has {before!r}; keep them, or start from its weights by init.backbone"
                )
        constants = self._constants
        super().set_classy_state(state)
        for group, options in zip(self.optimizer.param_groups, constants, strict=True):
            group.update(options)
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[name] = _in_memory_format_of(parameter, value)

    @property
    def _constants(self) -> list[dict[str, Any]]:
        """Options of each group that neither a schedule nor the optimizer changes, by name."""
        if not self.constant_options:
            return [{} for _ in self.optimizer.param_groups]
        groups = zip(self.optimizer.param_groups, self._param_group_schedulers, strict=True)
        return [
            {name: value for name, value in group.items() if name not in {"params", *scheduled}}
            for group, scheduled in groups
        ]

    @property
    def _names(self) -> list[str]:
        return [setting.parameter.name for setting in self.settings]

    def zero_grad(self) -> None:
        """Set all gradients to None.

        torch's own method also enters a profiler range and guards against torch.compile; this takes
        longer than the forward pass of a small layer.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _in_memory_format_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Return state with the strides of its parameter, which fused kernels require.

    It may have been saved on a device with another memory format.
    """
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _times(schedule: Schedule, factor: Callable[[], float], where: float) -> float:
    return float(schedule(where) * factor())


def build_optimizer(
    config: OptimizerConfig,
    modules: Iterable[tuple[str, nn.Module]],
    length: RunLength,
    *,
    batch: int,
    depths: Mapping[str, int] | None = None,
    of_method: Sequence[GroupRule] = (),
    regroup: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
    only: Container[nn.Parameter] | None = None,
    key: str = "optimizer",
) -> Any:
    """Build the optimizer of named modules: a registered one, ``torch:NAME`` or ``classy:NAME``.

    Args:
        config: The ``optimizer`` section.
        modules: Named modules whose parameters are trained.
        length: Length of the run, for schedules.
        batch: Number of samples per step, over all ranks.
        depths: Layer indices of the backbone's parameters by name, for ``layer_decay``; None: all
            parameters belong to one layer.
        of_method: Rules of the method, which apply after those of ``optimizer.groups``.
        regroup: Function applied to the final groups of parameters; see ``Reduction.regroup``.
        only: Parameters of this optimizer; None for all.
        key: Key of the section, for messages.

    Returns:
        A Classy optimizer with ``step(where=...)``; ``settings`` lists the settings of each
            parameter.

    Raises:
        UserError: If a rule matches no parameter, or ``build`` returns no torch optimizer.
    """
    settings = assign_settings(modules, config, length, depths or {}, of_method, only=only, key=key)
    groups = _groups(settings, config, length, batch)
    layerwise = False
    if config.name in OPTIMIZERS:
        kind = OPTIMIZERS[config.name]
        moving = _moving_settings(kind, config.args, length)
        first_values = {name: schedule(0.0) for name, schedule in moving.items()}
        options = kind(**{**config.args, **first_values})
        is_shipped = OPTIMIZERS.is_shipped(config.name)
        optimizer: Any = ScheduledOptimizer(options.build, settings, constant_options=is_shipped)
        layerwise = getattr(options, "layerwise", False)
        # torch's key; configs say sgd_momentum, since methods also have a momentum
        schedules = {name.removeprefix("sgd_"): schedule for name, schedule in moving.items()}
        groups = [{**group, **schedules} for group in groups]
    elif is_torch_name("optimizer", config.name):
        build = partial(torch_optimizer, config.name, config.args)
        optimizer = ScheduledOptimizer(build, settings, constant_options=True)
    else:
        optimizer = classy.build("optimizer", config.name, {"num_epochs": 1, **config.args})
        optimizer.settings = settings
    if not layerwise:
        groups = merge_alike([{k: v for k, v in group.items() if k != "adapt"} for group in groups])
    optimizer.set_param_groups(regroup(groups))
    return optimizer


def _groups(
    settings: Iterable[Settings], config: OptimizerConfig, length: RunLength, batch: int
) -> list[dict[str, Any]]:
    """Return a group for each combination of settings; LARS and LAMB adapt those with ``adapt``."""
    schedules: dict[str, Any] = {}  # one object for equal sections, so that groups can be merged

    def schedule_of(section: float | dict[str, Any]) -> Any:
        return schedules.setdefault(str(section), build_schedule(section, length))

    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for setting in settings:
        key = (setting.decays, setting.lr, str(setting.schedule), str(setting.weight_decay))
        if key not in groups:
            lr = schedule_of(config.lr_section(batch, setting.schedule))
            decay = setting.weight_decay
            groups[key] = {
                "params": [],
                "lr": lr if setting.lr == 1.0 else Scaled(lr, setting.lr),
                "weight_decay": schedule_of(decay) if isinstance(decay, dict) else decay,
                "adapt": setting.decays,
            }
        groups[key]["params"].append(setting.parameter.value)
    return list(groups.values())


def _moving_settings(kind: type, args: dict[str, Any], length: RunLength) -> dict[str, Any]:
    """Return the schedules of an optimizer's own settings, such as momentum or betas."""
    moving: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.metadata.get("of") != "schedules":
            continue
        value = args.get(field.name)
        if isinstance(value, dict):
            moving[field.name] = build_schedule(value, length)
        elif isinstance(value, tuple) and any(isinstance(item, dict) for item in value):
            moving[field.name] = _together([build_schedule(item, length) for item in value])
    return moving


def _together(schedules: list[Schedule]) -> Curve:
    return Curve(lambda where: tuple(schedule(where) for schedule in schedules))


def lr_schedule(config: OptimizerConfig, length: RunLength, *, batch: int) -> Any:
    """Return the schedule of ``optimizer.lr`` with its warm-up, scaled as configured.

    Args:
        config: The ``optimizer`` section.
        length: Length of the run.
        batch: Number of samples per step, over all ranks.

    Returns:
        A Classy scheduler: a function of progress in [0, 1), with ``update_interval``.
    """
    return build_schedule(config.lr_section(batch), length)
