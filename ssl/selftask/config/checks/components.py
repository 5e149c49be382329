"""Problems that the components of a config (methods, hooks, transforms, ...) report themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from selftask.config.config_class import config_class, config_object
from selftask.config.keys import Key, Problem, dotted
from selftask.config.schema import Component, Config, FrozenModule, OptimizerConfig
from selftask.config.schema.component import Section, named_in
from selftask.config.values.section_schema import schema_of
from selftask.registry import HOOKS, OPTIMIZERS, REGISTRIES, SCHEDULES, Registry


def component_problems(config: Config) -> Iterator[Problem]:
    """Yield key and text of each problem that components other than hooks report."""
    plain_config = _plain(config)
    for component, registry, key in _in_sections(config):
        if registry is not HOOKS:
            yield from iter_problems(component, registry, key, plain_config)
    for key, optimizer in config.all_optimizers.items():
        yield from _of_optimizer(optimizer, key, plain_config)


def hook_problems(config: Config) -> Iterator[Problem]:
    """Yield key and text of each problem that hooks report, such as a missing package.

    They matter only where a run trains, not where it is read.
    """
    plain_config = _plain(config)
    for name, hook in config.hooks.items():
        yield from iter_problems(hook, HOOKS, ("hooks", name), plain_config)


def _plain(config: Config) -> dict[str, Any]:
    plain_config = config.to_dict()
    plain_config["train"]["step"] = config.train.step.to_dict()  # not its short form
    return plain_config


def _in_sections(value: Any, key: Key = ()) -> Iterator[tuple[Component, Registry, Key]]:
    """Yield the components of a section and of the sections in it, except optimizers."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _in_sections(item, (*key, name))
    elif isinstance(value, Section) and not isinstance(value, OptimizerConfig):
        yield from _in_fields(type(value), vars(value), key)
        for name, item in vars(value).items():
            yield from _in_sections(item, (*key, name))


def _of_optimizer(
    optimizer: OptimizerConfig, key: Key, plain_config: dict[str, Any]
) -> Iterator[Problem]:
    """Yield the problems of an optimizer and its schedules.

    The optimizer's method ``problems`` reads its section at ``optimizer``, whatever ``key`` is.
    """
    component = Component(name=optimizer.name, args=optimizer.args)
    as_optimizer = {**plain_config, "optimizer": optimizer.to_dict()}
    for inner_key, text in iter_problems(component, OPTIMIZERS, key, as_optimizer):
        yield inner_key, text.replace("optimizer.", f"{dotted(key)}.")
    for inner, section in optimizer.schedules(key).items():
        schedule = Component.from_dict(section)
        for inner_key, text in iter_problems(schedule, SCHEDULES, inner, plain_config):
            yield inner_key, text if text.startswith(dotted(inner)) else f"{dotted(inner)}: {text}"


def iter_problems(
    component: Component, registry: Registry, key: Key, plain_config: dict[str, Any]
) -> Iterator[Problem]:
    """Yield key and text of each problem of a component and of the components in its arguments.

    Args:
        component: The component, with complete arguments.
        registry: The registry of its name.
        key: Its key in the config.
        plain_config: The whole config as plain values.
    """
    if component.name not in registry:  # of Classy Vision, or torch.optim
        return
    if not registry.is_shipped(component.name):
        wrong = list(schema_of(registry, component.name).default_problems())
        if wrong:  # its own checks are not made for such values
            yield from ((key, text) for text in wrong)
            return
    config = config_class(registry, component.name)
    made = None
    if config is not None and hasattr(config, "problems"):
        made = config_object(config, component.args)
    for nested, its_registry, inner_key in _in_fields(config, component.args, key):
        yield from iter_problems(nested, its_registry, inner_key, plain_config)
    for inner_key, frozen in _frozen_modules(component.args, key):
        for text in frozen.problems(dotted(inner_key)):
            yield tuple(text.partition(":")[0].split(".")), text
    for message in made.problems(plain_config) if made else ():
        name, _, rest = message.partition(":")
        path = tuple(name.split("."))
        if path[0] in component.args:
            yield (*key, *path), f"{dotted((*key, *path))}:{rest}"
        else:
            yield path if path[0] in plain_config else key, message


def _frozen_modules(value: Any, key: Key) -> Iterator[tuple[Key, FrozenModule]]:
    """Yield the frozen modules in the arguments of a component, and their keys."""
    if isinstance(value, FrozenModule):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _frozen_modules(item, (*key, name))


def inner_components(
    component: Component, registry: Registry, key: Key
) -> Iterator[tuple[Component, Registry, Key]]:
    """Yield the components in the arguments of a component, one level deep.

    Args:
        component: The component, with complete arguments.
        registry: The registry of its name.
        key: Its key in the config.

    Yields:
        A component, the registry of its name, and its key.
    """
    config = config_class(registry, component.name) if component.name in registry else None
    yield from _in_fields(config, component.args, key)


def _in_fields(
    config: Any, values: Mapping[str, Any], key: Key
) -> Iterator[tuple[Component, Registry, Key]]:
    """Yield the components in ``values``, as declared by the fields of a config class."""
    for field in dataclasses.fields(config) if config else ():
        if "of" in field.metadata:
            inner = key if field.metadata["flat"] else (*key, field.name)
            for nested, inner_key in named_in(values.get(field.name), inner):
                yield nested, REGISTRIES[field.metadata["of"]], inner_key
