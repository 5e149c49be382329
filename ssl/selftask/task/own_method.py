"""Build a method and its network, and find common mistakes in a user's own method."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from torch import nn

from selftask.config.extensions.user_code import check_takes, module_initialized, source_of
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.hooks.base import Task
from selftask.logs import get_logger
from selftask.methods.base import Method
from selftask.registry import METHODS

log = get_logger(__name__)

_CALLED = [
    name
    for name, value in vars(Method).items()
    if inspect.isfunction(value) and not name.startswith("_")
]


def build_method(component: Component) -> Any:
    """Build the method of a config; warn of misspelled names of functions in a user's own one.

    Raises:
        UserError: If its ``__init__`` or, in a user's own method, another function does not take
            the arguments that it is called with, or ``__init__`` does not call that of ``Method``.
    """
    kind = METHODS[component.name]
    check_takes(kind, ["config"], f"the method {kind.__name__}")
    with module_initialized("super().__init__(config)"):
        method = kind(kind.Config(**component.args))
    if "pending" not in vars(method):
        raise UserError(
            f"{source_of(kind)}: {kind.__name__}.__init__ must call super().__init__(config)"
        )
    if not METHODS.is_shipped(component.name):
        _check_calls(method)
        for name, meant in _misspelled(kind):
            log.warning(
                "%s: nothing calls %s.%s; did you mean %s?",
                *(source_of(getattr(kind, name)), kind.__name__, name, meant),
            )
    return method


def _check_calls(method: Method) -> None:
    """Raise UserError if the class overrides a function of ``Method`` with other arguments."""
    for name in _CALLED:
        base, override = getattr(Method, name), getattr(method, name)
        if inspect.ismethod(override) and override.__func__ is not base:
            _, *parameters = inspect.signature(base).parameters.values()
            required = [p.name for p in parameters if p.default is p.empty or name == "meter_input"]
            check_takes(override, required, f"{type(method).__name__}.{name}")


def _misspelled(kind: type[Method]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names: a function of the class, and a similar one that it inherits."""
    inherited = [name for name in _CALLED if getattr(kind, name) is getattr(Method, name)]
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and name not in _CALLED:
            for meant in get_close_matches(name, inherited, n=1, cutoff=0.85):
                yield name, meant


def build_network(method: Any, backbone: nn.Module, task: Task) -> nn.Module:
    """Return the network of a method; raise UserError if it is no module with a ``backbone``."""
    with module_initialized("super().__init__()"):
        network = method.build_network(backbone, task)
    if not isinstance(network, nn.Module) or not hasattr(network, "backbone"):
        raise UserError(
            f"{source_of(method.build_network)}: build_network returned a "
            f"{type(network).__name__}; a module with the attribute `backbone` is expected, such "
            "as selftask.models.network.Network or a subclass with its own forward pass"
        )
    return network
