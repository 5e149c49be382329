"""Checks of the ``optimizer`` section: schedules are complete and fit the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from selftask.config.checks.components import iter_problems
from selftask.config.keys import Key, dotted
from selftask.config.schema import Component, Config
from selftask.config.schema.optimizer import GroupRule
from selftask.errors import UserError
from selftask.registry import SCHEDULES

_OF_LR = ("schedule", "warmup", "warmup_shape", "start_lr", "end_lr")
_BY_LR = {"start": "lr", "end": "end_lr", "warmup": "warmup", "warmup_start": "start_lr"}


def problems(config: Config) -> Iterator[tuple[Key, str]]:
    """Yield key and text of each problem of the section."""
    optimizer = config.optimizer
    yield from _of_lr(config)
    if isinstance(optimizer.weight_decay, dict):
        yield from _of_schedule(optimizer.weight_decay, ("optimizer", "weight_decay"), config)
    for index, rule in enumerate(optimizer.groups):
        yield from _of_rule(rule, ("optimizer", "groups", str(index)), config)


def _of_lr(config: Config) -> Iterator[tuple[Key, str]]:
    optimizer = config.optimizer
    if isinstance(optimizer.lr, dict):
        yield from _of_schedule(optimizer.lr, ("optimizer", "lr"), config)
        for name in _OF_LR:
            if config.place(f"optimizer.{name}").startswith("command line"):
                text = "has no effect: optimizer.lr is a complete schedule; set this there"
                yield ("optimizer", name), f"optimizer.{name} {text}"
        return
    key = ("optimizer", "schedule")
    keys = optimizer.schedule if isinstance(optimizer.schedule, dict) else {}
    for name in keys.keys() & _BY_LR.keys():
        text = f"optimizer.schedule.{name}: set by optimizer.{_BY_LR[name]}; give it there"
        yield (*key, name), text
    section = optimizer.lr_section(batch=1)
    if section["name"] not in SCHEDULES:
        text = f"optimizer.schedule={section['name']!r}: Classy Vision's schedules give the values"
        yield key, f"{text} themselves; write optimizer.lr={{name: {section['name']}, ...}}"
        return
    yield from _of_schedule(section, key, config)


def _of_rule(rule: GroupRule, key: Key, config: Config) -> Iterator[tuple[Key, str]]:
    if rule.match is None and rule.type is None:
        yield key, f"{dotted(key)}: needs match (a pattern of names) or type (a class of modules)"
    if not rule.given:
        yield key, f"{dotted(key)}: sets nothing; give lr, weight_decay, schedule or freeze"
    if isinstance(rule.weight_decay, dict):
        yield from _of_schedule(rule.weight_decay, (*key, "weight_decay"), config)
    if "schedule" in rule.given:
        section = config.optimizer.lr_section(batch=1, instead=rule.given["schedule"])
        yield from _of_schedule(section, (*key, "schedule"), config)


def _of_schedule(section: dict[str, Any], key: Key, config: Config) -> Iterator[tuple[Key, str]]:
    """Yield problems of one schedule; schedules of Classy Vision are built to check them."""
    args = {name: value for name, value in section.items() if name != "name"}
    if section["name"] in SCHEDULES:
        component = Component(name=section["name"], args=args)
        for place, text in iter_problems(component, SCHEDULES, key, config.to_dict()):
            yield place, text if text.startswith(dotted(key)) else f"{dotted(key)}: {text}"
        return
    from selftask import classy  # imports torch, so only if needed

    epochs = math.ceil(config.train.epochs or 10**6)
    try:
        classy.build_schedule(section["name"], args, num_epochs=epochs)
    except UserError as error:
        yield key, f"{dotted(key)}: {error}"
