"""Declare fields of config classes with defaults and limits.

Every key of a config is a field of a dataclass: a section of ``config.schema`` or the ``Config`` of
a method, hook, transform, ... ``setting`` declares properties that a plain default cannot express.
Does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def setting(
    default: Any = dataclasses.MISSING,
    *,
    min: float | None = None,
    above: float | None = None,
    below: float | None = None,
    max: float | None = None,
    rising: bool = False,
    nonempty: bool = False,
    duration: bool = False,
    path: bool = False,
    of: str | None = None,
    flat: bool = False,
    shared: Sequence[str] = (),
    missing: str | None = None,
    also: Sequence[str] = (),
    tiny: Any = None,
    auto: bool = False,
) -> Any:
    """Declare a field of a config class, as ``dataclasses.field`` does, with its limits.

    Limits of a list apply to each number in it.

    Args:
        default: Default value; without it, the key is required. A list or dict is copied.
        min: Smallest allowed value; of a duration, in steps.
        above: Exclusive lower limit.
        below: Exclusive upper limit.
        max: Largest allowed value.
        rising: Whether the value is a range, whose first number must not be above the second.
        nonempty: Whether a list must have at least one item.
        duration: Whether the value is a length of training, such as ``10 epochs``.
        path: Whether the value is a path, so that ``~`` is expanded.
        of: Name of the registry of the component or components in this field, such as
            ``transforms``.
        flat: Whether the fields of the component are keys of the section itself.
        shared: Fields of this section that the component's section may set as well.
        missing: Hint for the message if the value is missing; null then counts as missing.
        also: Names of this field in other frameworks, for "did you mean".
        tiny: Value for the tiny recipes of ``selftask check`` and of tests, or a function of the
            batch size that returns it.
        auto: Whether the key also takes ``auto``, and has it by default. It is resolved before the
            section is read; ``default`` is for sections made in Python.
    """
    optional: dict[str, Any] = {"min": min, "above": above, "below": below, "max": max}
    optional |= {"of": of, "missing": missing, "tiny": tiny}
    metadata = {k: value for k, value in optional.items() if value is not None}
    metadata |= {"duration": duration, "rising": rising}
    metadata |= {"path": path, "flat": flat, "nonempty": nonempty, "auto": auto}
    metadata |= {"also": tuple(also), "shared": tuple(shared)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has a default."""
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a field, or None; lists and dicts are new copies."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default if has_default(field) else None
