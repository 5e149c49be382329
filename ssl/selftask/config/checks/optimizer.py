"""Checks of optimizers: their schedules, their rules, and the train step that steps them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from selftask.config.keys import Key, dotted
from selftask.config.schema import Config, OptimizerConfig
from selftask.config.torch_names import is_torch_name, torch_problems
from selftask.errors import UserError
from selftask.registry import SCHEDULES, TRAIN_STEPS

_OF_LR = ("schedule", "warmup", "warmup_shape", "start_lr", "end_lr")
_BY_LR = {"start": "lr", "end": "end_lr", "warmup": "warmup", "warmup_start": "start_lr"}


def optimizer_problems(config: Config) -> Iterator[tuple[Key, str]]:
    """Yield key and text of each problem of ``optimizer`` and ``optimizers``."""
    for key, optimizer in config.all_optimizers.items():
        yield from _problems(config, optimizer, key)
        if is_torch_name("optimizer", optimizer.name):
            yield from torch_problems(optimizer, key, config.parallel.reduce)
    yield from _named_problems(config)


def _problems(config: Config, optimizer: OptimizerConfig, key: Key) -> Iterator[tuple[Key, str]]:
    """Yield the problems of the section at ``key``."""
    where = dotted(key)
    if isinstance(optimizer.lr, dict):
        for name in _OF_LR:
            if config.place(f"{where}.{name}").startswith("command line"):
                text = f"has no effect: {where}.lr is a complete schedule; set this there"
                yield (*key, name), f"{where}.{name} {text}"
    else:
        keys = optimizer.schedule if isinstance(optimizer.schedule, dict) else {}
        for name in keys.keys() & _BY_LR.keys():
            text = f"{where}.schedule.{name}: set by {where}.{_BY_LR[name]}; give it there"
            yield (*key, "schedule", name), text
        schedule = optimizer.lr_section(batch=1)["name"]
        if schedule not in SCHEDULES:
            text = f"{where}.schedule={schedule!r}: Classy Vision's schedules give the values"
            text = f"{text} themselves; write {where}.lr={{name: {schedule}, ...}}"
            yield (*key, "schedule"), text
    for index, rule in enumerate(optimizer.groups):
        of_rule = (*key, "groups", str(index))
        if rule.match is None and rule.type is None:
            wanted = "needs match (a pattern of names) or type (a class of modules)"
            yield of_rule, f"{dotted(of_rule)}: {wanted}"
        if not rule.given:
            wanted = "sets nothing; give lr, weight_decay, schedule or freeze"
            yield of_rule, f"{dotted(of_rule)}: {wanted}"
    for inner, section in optimizer.schedules(key).items():
        theirs = section["name"] not in SCHEDULES and inner != (*key, "schedule")
        if theirs and (refusal := _refusal(section, config.train.epochs)):
            yield inner, f"{dotted(inner)}: {refusal}"


def _named_problems(config: Config) -> Iterator[tuple[Key, str]]:
    """Yield conflicts of ``optimizers`` with the train step and ``parallel.reduce``."""
    step = config.train.step.name
    stepped = TRAIN_STEPS.declared(step, "optimizers", ())
    for name in config.optimizers:
        if name not in stepped:
            steps = ", ".join(["optimizer", *(f"optimizers.{one}" for one in stepped)])
            text = f"optimizers.{name}: train.step={step!r} steps only {steps}"
            yield ("optimizers", name), f"{text}; see docs/train-steps.md for a step of your own"
    for name in stepped:
        if name not in config.optimizers:
            text = f"train.step={step!r} steps optimizers.{name}, which is missing"
            yield ("train", "step"), f"{text}; give its name, lr and match"
    if config.optimizers and config.parallel.reduce != "manual":
        text = f"parallel.reduce={config.parallel.reduce!r} reduces all gradients together"
        yield ("parallel", "reduce"), f"{text}; use manual with several optimizers"


def _refusal(section: dict[str, Any], epochs: float | None) -> str | None:
    """Return why Classy Vision refuses one of its schedules, or None."""
    from selftask import classy  # imports torch, so only if needed

    args = {name: value for name, value in section.items() if name != "name"}
    try:
        classy.build_schedule(section["name"], args, num_epochs=math.ceil(epochs or 10**6))
    except UserError as error:
        return str(error)
    return None
