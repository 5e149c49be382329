"""Names of Classy Vision's own hooks, meters, optimizers and schedules in a config."""

from __future__ import annotations

import sys

CLASSY_KINDS = {"hook": "hooks", "meter": "meters", "optimizer": "optim", "schedule": "optim"}


def classy_has(kind: str, name: str) -> bool:
    """Return whether Classy Vision has ``name``, without importing it for every typo.

    Classy Vision is only searched for ``classy:NAME``, or if a user's module has already imported
    its part that holds such names.
    """
    loaded = kind in CLASSY_KINDS and f"classy_vision.{CLASSY_KINDS[kind]}" in sys.modules
    if not loaded and not name.startswith("classy:"):
        return False
    from selftask import classy

    return classy.has(kind, name)


def classy_refusal(name: str) -> str | None:
    from selftask import classy

    return classy.refusal(name)
