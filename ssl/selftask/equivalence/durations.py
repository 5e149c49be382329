"""Shorten durations, so that the few steps of a check include all that begins or ends later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from selftask.config.config_class import config_class
from selftask.config.run_length import RunLength
from selftask.config.schema import Config, OptimizerConfig
from selftask.config.values.duration import parse_duration, steps_in
from selftask.registry import HOOKS, METHODS, SCHEDULES, Registry


def shorten_durations(config: Config) -> Config:
    """Return the config with the durations of method, optimizer and hooks set to one step.

    From the second step on, warm-ups and freezing are over, and delayed terms of the loss are
    active. Durations of 0 and values from the command line are kept.
    """
    method, optimizer = config.method, config.optimizer
    shortened = _shorten_fields(vars(optimizer), OptimizerConfig, config, "optimizer")
    names = [field.name for field in fields(OptimizerConfig) if field.name in shortened]
    hooks = {
        key: replace(hook, args=_shorten_named(HOOKS, hook.name, hook.args, config, f"hooks.{key}"))
        for key, hook in config.hooks.items()
    }
    return replace(
        config,
        method=replace(
            method, args=_shorten_named(METHODS, method.name, method.args, config, "method")
        ),
        optimizer=replace(optimizer, **{name: shortened[name] for name in names}),
        hooks=hooks,
    )


def not_reached(config: Config, steps: int, length: RunLength) -> Iterator[str]:
    """Yield a description of each duration of the method that is not over after ``steps`` steps.

    Such a value is from the command line, since ``shorten_durations`` shortens all others.

    Args:
        config: The config that was checked.
        steps: Number of steps of the check.
        length: Length of its training.
    """
    schema = config_class(METHODS, config.method.name)
    for field in fields(schema) if schema else ():
        value = config.method.args.get(field.name)
        if field.metadata.get("duration") and value is not None:
            end = steps_in(value, length)
            if end >= steps:
                yield f"method.{field.name}={value} (--steps {end + 1})"


def _shorten_named(
    registry: Registry, name: str, args: dict[str, Any], config: Config, key: str
) -> dict[str, Any]:
    schema = config_class(registry, name) if name in registry else None
    return _shorten_fields(args, schema, config, key)


def _shorten_fields(
    args: dict[str, Any], schema: type | None, config: Config, key: str
) -> dict[str, Any]:
    """Return arguments with their durations, and those of their schedules, set to one step.

    Durations of 0 and values from the command line are kept.
    """
    shortened = dict(args)
    for field in fields(schema) if schema else ():
        value, inner = args.get(field.name), f"{key}.{field.name}"
        if value is None or config.place(inner).startswith("command line"):
            continue
        if field.metadata.get("duration") and not isinstance(value, bool):
            shortened[field.name] = 1 if parse_duration(value).value else value
        elif field.metadata.get("of") == "schedules" and isinstance(value, dict):
            name = value.get("name", "constant")
            shortened[field.name] = _shorten_named(SCHEDULES, name, value, config, inner)
    return shortened
