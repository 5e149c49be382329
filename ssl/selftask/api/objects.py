"""Python objects in place of names in a config.

A config is text. Data sets, backbones and transforms become attributes of this module, and the
config refers to them as ``custom`` with their import path. Other classes and functions are
registered under their own names.

Import paths are the same in every session, since a resumed run needs them. So a later object of the
same class and key has the same path. Each thread sees its own objects, and a task keeps those of
its config.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from selftask.config.compose.overrides import format_value
from selftask.config.keys import Key, dotted, is_pipeline, is_source
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.registry import METHODS, REGISTRIES, TASKS, TRAIN_STEPS, TRANSFORMS, Registry

_REGISTRIES: dict[Key, Registry] = {
    ("method",): METHODS,
    ("task",): TASKS,
    ("train", "step"): TRAIN_STEPS,
    **{(kind,): REGISTRIES[kind] for kind in ("hooks", "meters")},
    ("eval", "evaluations"): REGISTRIES["evaluations"],
}


_LATEST: dict[str, Any] = {}  # by name
_OF_THREAD = threading.local()  # the same for the current thread, as its attributes


def __getattr__(name: str) -> Any:
    """Return the current thread's object, or else the latest one of any thread."""
    objects = vars(_OF_THREAD) if name in vars(_OF_THREAD) else _LATEST
    if name not in objects:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return objects[name]


def restore(objects: Mapping[str, Any]) -> None:
    """Make objects importable, under their names, for this thread and those that have no others."""
    _LATEST.update(objects)
    vars(_OF_THREAD).update(objects)


def objects_in(words: Iterable[str]) -> dict[str, Any]:
    """Return the objects to which config overrides refer, by name, for ``restore``."""
    names = re.findall(rf"\b{re.escape(__name__)}:(\w+)", " ".join(words))
    return {name: __getattr__(name) for name in names}


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as ``key=value``, with names in place of objects.

    The objects are registered, or become attributes of this module.

    Args:
        settings: Values by dotted key, or nested dicts. These objects are accepted: a module as
            ``backbone``; a map-style data set, also a list of images, as ``data``, ``data.val`` or
            one of ``data.val_sets``; an instance or class as ``method``; a class of torch.optim as
            the optimizer's name; a class, function or instance of a dataclass as a task, train
            step, hook, meter or evaluation. A transform may be an instance of a registered class,
            or any callable that ``name: custom`` accepts.

    Raises:
        UserError: If another object is given.
    """
    return [
        f"{key}={format_value(_plain(value, tuple(key.split('.'))))}"
        for key, value in settings.items()
    ]


def _plain(value: Any, key: Key) -> Any:
    """Return the config value for an object at ``key``."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, (*key, str(name))) for name, item in value.items()}
    if key == ("backbone",) and isinstance(value, nn.Module):
        return {"name": "custom", "model": _address("backbone", value)}
    in_pipeline = any(is_pipeline(key[:length]) for length in (2, 3))
    if in_pipeline and (callable(value) or _known_name(TRANSFORMS, type(value))):
        return _transform(value, key)
    if isinstance(value, np.ndarray) and not is_source(key):
        value = value.tolist()
    if isinstance(value, list | tuple) and not (is_source(key) and _has_images(value)):
        return [_plain(item, (*key, str(index))) for index, item in enumerate(value)]
    if is_source(key) and hasattr(type(value), "__getitem__"):
        address = _address("_".join(key), value)
        return {"name": "custom", "dataset": address, "channels": getattr(value, "channels", 3)}
    if isinstance(value, Method):
        return {"name": _name(METHODS, type(value)), **dataclasses.asdict(value.config)}
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
        return f"torch:{value.__name__}"
    registry = _registry(key)
    if registry is not None and hasattr(value, "__name__"):
        return _name(registry, value)
    if registry is not None and dataclasses.is_dataclass(value):
        return {"name": _name(registry, type(value)), **_plain(_fields(value), key)}
    type_name = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    hint = ""
    if key == ("backbone",):
        hint = "; give a module: an object, not its class or a function"
    elif is_source(key):
        hint = "; give a data set with __len__ and __getitem__ (create_task has batches=LOADER)"
    raise UserError(f"{dotted(key)}: {type_name} is no value of a config{hint}")


def _has_images(items: Iterable[Any]) -> bool:
    """Return True if a list is a data set; others consist of names, numbers and sections."""
    return not all(isinstance(item, str | Path | Mapping | int | float) for item in items)


def _transform(value: Any, key: Key) -> Any:
    """Return the config value of a transform object.

    A registered transform becomes a section with its fields. Another callable becomes a section
    ``{name: custom, transform: ADDRESS}``, or only the address if ``key`` is that of the field
    ``transform``. At the key of a whole pipeline, the result is a list with this one section.
    """
    if is_pipeline(key):
        return [_transform(value, (*key, "0"))]
    if registered := _known_name(TRANSFORMS, type(value)):
        return {"name": registered, **_plain(_fields(value), key)}
    module, name = getattr(value, "__module__", ""), getattr(value, "__name__", "")
    if module != "__main__" and getattr(sys.modules.get(module), name or "-", None) is value:
        address = f"{module}:{name}"  # the command can import it, too
    else:
        attribute = re.sub(r"\W", "_", f"{'_'.join(key)}_{name or type(value).__name__}")
        restore({attribute: value})
        address = f"{__name__}:{attribute}"
    return address if key[-1] == "transform" else {"name": "custom", "transform": address}


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance by name, without copying them."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _registry(key: Key) -> Registry | None:
    """Return the registry of the component at a key, such as ``method`` or ``hooks.x``, or None.

    The key may also be that of its name: ``method.name``.
    """
    places = (key, key[:-1], key[:-2]) if key[-1] == "name" else (key, key[:-1])
    return next((_REGISTRIES[place] for place in places if place in _REGISTRIES), None)


def _address(prefix: str, value: Any) -> str:
    """Make an object importable under the returned address, ``package.module:name``.

    An ``nn.Module`` is imported as a copy, which may get other weights; the module that a task
    trains is passed to the task directly.
    """
    name = f"{prefix}_{type(value).__name__}"
    restore({name: lambda: deepcopy(value) if isinstance(value, nn.Module) else value})
    return f"{__name__}:{name}"


def _name(registry: Registry, value: Any) -> str:
    """Return the registered name of a class or function; register it by ``__name__`` if needed."""
    name = _known_name(registry, value) or str(value.__name__)
    if registry.imported(name) is not value:
        registry.register(name)(value)
    return name


def _known_name(registry: Registry, value: Any) -> str | None:
    """Return the name under which a class or function is registered, or None."""
    return next((name for name in registry.names() if registry.imported(name) is value), None)
