"""Check and convert values by the type and the limits of a field.

Scalars follow OmegaConf's typed nodes: ``3`` is a valid float and ``"3"`` a valid int, but ``3.5``
is not. OmegaConf has no nodes for Literal, unions, tuples and nested containers; they are
implemented here.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode
from omegaconf.errors import ValidationError

from selftask.config.values.duration import parse_duration
from selftask.errors import UserError, close_name

_NODES: dict[type, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

# Limits far from overflow: of 64 bits in products with sizes (int), and of float32 (float).
_LARGEST: dict[type, float] = {int: 10**15, float: 1e30}


LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "max": ("at most", operator.le),
}
"""Limits in the metadata of a field: name -> words for messages, and the comparison."""


class Mismatch(Exception):
    """Raised for a value of the wrong type; the message names the expected type."""


def convert(value: Any, annotation: Any) -> Any:
    """Return ``value`` as an instance of ``annotation``.

    Raises:
        Mismatch: If the value does not fit.
        UserError: If this annotation is not supported for config fields.
    """
    if annotation is Any:
        return value
    if annotation in _NODES:
        return _scalar(value, annotation)
    if annotation is None or annotation is type(None):
        if value is None:
            return None
        raise Mismatch("expected null")
    origin = get_origin(annotation) or annotation
    if origin in (Union, types.UnionType):
        return _first_of(value, annotation)
    if origin in (list, tuple, dict):
        return _container(value, annotation)
    if origin is Literal:
        return _choice(value, get_args(annotation))
    raise UserError(f"a config field may not be annotated with {annotation!r}")


def describe(annotation: Any, show: Callable[[Any], str] = repr) -> str:
    """Return an annotation in words: ``a whole number``, ``'sum' or 'mean'``.

    Args:
        annotation: The type of a config field.
        show: Formats the values of a Literal.
    """
    if annotation in _WORDS:
        return _WORDS[annotation]
    if annotation is None or annotation is type(None):
        return "null"
    if is_dataclass(annotation):
        return "a section"
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Literal:
        return " or ".join(map(show, inner))
    if origin in (Union, types.UnionType):
        options = [option for option in inner if not (option is int and float in inner)]
        return " or ".join(describe(option, show) for option in options)
    if origin in (list, dict) and any(map(is_dataclass, inner)):
        return "a list of sections" if origin is list else "sections by name"
    if origin is list or (origin is tuple and inner[1:] == (Ellipsis,)):
        return f"a list, each {describe(inner[0], show)}" if inner else "a list"
    if origin is tuple:
        return f"a list of {len(inner)}: " + ", ".join(describe(item, show) for item in inner)
    return "key: value pairs" if origin is dict else "anything"


def check_limits(value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError if the limits in the metadata of a field forbid ``value``.

    Limits apply to each item of a list or tuple. null and booleans have no limits.
    """
    if isinstance(value, list | tuple):
        if metadata.get("nonempty") and not value:
            raise ValueError("one or more are expected")
        for item in value:
            check_limits(item, metadata)
        if metadata.get("rising") and list(value) != sorted(value):
            raise ValueError("the first number must not be above the second")
        return
    if value is None or isinstance(value, bool):
        return
    if metadata.get("duration"):
        _check_duration(value, metadata)
    elif isinstance(value, int | float):
        for name, (words, holds) in LIMITS.items():
            if name in metadata and not holds(value, metadata[name]):
                raise ValueError(f"must be {words} {metadata[name]}")


def _check_duration(value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid duration, or one in a dict of time -> interval from then."""
    if isinstance(value, dict):
        for time, interval in value.items():
            parse_duration(time)
            check_limits(interval, metadata)
        return
    length = parse_duration(value)
    too_short = length.value < metadata.get("min", 0)
    if too_short and (length.unit == "step" or not length.value):  # half an epoch is allowed
        raise ValueError("must be above 0")


def _scalar(value: Any, kind: type) -> Any:
    """Convert a scalar with OmegaConf's node, but never between bools and numbers."""
    odd = isinstance(value, bool) != (kind is bool) and not isinstance(value, str)
    if value is None or odd or isinstance(value, list | dict | tuple):
        raise Mismatch(f"expected {_WORDS[kind]}")
    try:
        converted = _NODES[kind](value, is_optional=False)._value()
    except (ValidationError, OverflowError):
        raise Mismatch(f"expected {_WORDS[kind]}") from None
    limit = _LARGEST.get(kind)
    if limit is not None and not abs(converted) <= limit:  # also true for NaN
        raise Mismatch(f"expected {_WORDS[kind]} between {-limit:.0e} and {limit:.0e}")
    return converted


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if value is False and "no" in choices:  # yaml reads the word as false
        return "no"
    if value in ("no", "off") and any(choice is False for choice in choices):  # as yaml
        return False
    for choice in choices:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    wanted = "one of " + ", ".join(map(str, choices))
    close = close_name(str(value), map(str, choices))
    raise Mismatch(f"did you mean {close!r}? {wanted}" if close else wanted)


def _first_of(value: Any, annotation: Any) -> Any:
    """Convert to the value's own type (3 stays an int in int | float), or the first that fits."""
    options = get_args(annotation)
    exact = [option for option in options if option is type(value)]
    hint = None
    for option in [*exact, *options]:
        try:
            return convert(value, option)
        except Mismatch as mismatch:
            if "did you mean" in str(mismatch):
                hint = str(mismatch).partition(" one of ")[0]
    raise Mismatch(f"expected {describe(annotation)}" + (f"; {hint}" if hint else ""))


def _container(value: Any, annotation: Any) -> Any:
    """Convert a list, tuple or dict and its items."""
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    is_fixed = kind is tuple and inner and inner[-1] is not Ellipsis
    fits = isinstance(value, dict if kind is dict else list | tuple)
    if not fits or (is_fixed and len(value) != len(inner)):
        one = kind is not dict and not is_fixed and isinstance(value, int | float)
        raise Mismatch(f"expected {describe(annotation)}" + (f"; write [{value}]" if one else ""))
    if kind is dict:
        of_key, of_item = inner or (Any, Any)
        return {convert(key, of_key): convert(item, of_item) for key, item in value.items()}
    kinds = inner if is_fixed else [inner[0] if inner else Any] * len(value)
    return kind(map(convert, value, kinds))
