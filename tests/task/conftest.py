"""What tests of the task share."""

from __future__ import annotations

import pytest
from spy import CALLS, Spy

from selftask.registry import HOOKS


@pytest.fixture
def spy(forget_names: None) -> str:
    HOOKS.register("spy")(Spy)
    CALLS.clear()
    return "hooks.spy={}"
