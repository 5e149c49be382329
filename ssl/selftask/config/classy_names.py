"""Names of Classy Vision's own hooks, meters, optimizers and schedules in a config."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from selftask.config.library_names import split_address
from selftask.config.torch_names import is_torch_name
from selftask.errors import close_name, nearest

CLASSY_KINDS = {"hook": "hooks", "meter": "meters", "optimizer": "optim", "schedule": "optim"}


def classy_has(kind: str, name: str) -> bool:
    """Return whether Classy Vision has a component of this kind and name.

    Classy Vision is searched only for ``classy:NAME``, or if a user's module has already imported
    the subpackage of this kind, so that a misspelled name does not import Classy Vision.
    """
    loaded = kind in CLASSY_KINDS and f"classy_vision.{CLASSY_KINDS[kind]}" in sys.modules
    if not loaded and not name.startswith("classy:"):
        return False
    from selftask import classy

    return classy.has(kind, name)


def guest_problem(kind: str, name: str, registered: Iterable[str]) -> str | None:
    """Return the problem of a name that selftask does not register, or None if it is valid.

    The name ``torch:NAME`` of an optimizer is not checked here. Names of Classy Vision are valid,
    except those of parts that do not work here or need a missing package.

    Args:
        kind: Kind of the component, such as hook.
        name: Its name.
        registered: All registered names of this kind.
    """
    if is_torch_name(kind, name):
        return None
    if classy_has(kind, name):
        from selftask import classy

        return classy.refusal(kind, name)
    if kind == "backbone" and ":" in name:
        library, model = split_address(name)
        return (
            f"no backbone named {name!r}; write it as two keys: "
            f"backbone.name={library or 'custom'} backbone.model={model}"
        )
    hint = nearest(name, registered)
    if close_name(name, registered) is None:
        hint += f"; your own needs import=[ITS_MODULE], with @register_{kind}({name!r}) in it"
    if kind in CLASSY_KINDS:
        hint += "; Classy Vision's are written classy:NAME"
    if kind == "optimizer":
        hint += ", torch.optim's torch:NAME"
    return f"no {kind} named {name!r}; {hint}"
