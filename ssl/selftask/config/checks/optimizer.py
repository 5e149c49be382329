"""Checks of the ``optimizer`` section: schedules are complete and fit the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from selftask.config.keys import Key, dotted
from selftask.config.schema import Config
from selftask.errors import UserError
from selftask.registry import SCHEDULES

_OF_LR = ("schedule", "warmup", "warmup_shape", "start_lr", "end_lr")
_BY_LR = {"start": "lr", "end": "end_lr", "warmup": "warmup", "warmup_start": "start_lr"}


def optimizer_problems(config: Config) -> Iterator[tuple[Key, str]]:
    """Yield key and text of each problem of the section."""
    optimizer = config.optimizer
    if isinstance(optimizer.lr, dict):
        for name in _OF_LR:
            if config.place(f"optimizer.{name}").startswith("command line"):
                text = "has no effect: optimizer.lr is a complete schedule; set this there"
                yield ("optimizer", name), f"optimizer.{name} {text}"
    else:
        key: Key = ("optimizer", "schedule")
        keys = optimizer.schedule if isinstance(optimizer.schedule, dict) else {}
        for name in keys.keys() & _BY_LR.keys():
            text = f"optimizer.schedule.{name}: set by optimizer.{_BY_LR[name]}; give it there"
            yield (*key, name), text
        schedule = optimizer.lr_section(batch=1)["name"]
        if schedule not in SCHEDULES:
            text = f"optimizer.schedule={schedule!r}: Classy Vision's schedules give the values"
            yield key, f"{text} themselves; write optimizer.lr={{name: {schedule}, ...}}"
    for index, rule in enumerate(optimizer.groups):
        key = ("optimizer", "groups", str(index))
        if rule.match is None and rule.type is None:
            wanted = "needs match (a pattern of names) or type (a class of modules)"
            yield key, f"{dotted(key)}: {wanted}"
        if not rule.given:
            wanted = "sets nothing; give lr, weight_decay, schedule or freeze"
            yield key, f"{dotted(key)}: {wanted}"
    for key, section in optimizer.schedules().items():
        theirs = section["name"] not in SCHEDULES and key != ("optimizer", "schedule")
        if theirs and (refusal := _refusal(section, config.train.epochs)):
            yield key, f"{dotted(key)}: {refusal}"


def _refusal(section: dict[str, Any], epochs: float | None) -> str | None:
    """Return why Classy Vision refuses one of its schedules, or None."""
    from selftask import classy  # imports torch, so only if needed

    args = {name: value for name, value in section.items() if name != "name"}
    try:
        classy.build_schedule(section["name"], args, num_epochs=math.ceil(epochs or 10**6))
    except UserError as error:
        return str(error)
    return None
