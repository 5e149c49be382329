"""What the tests of this folder share."""

from __future__ import annotations

from typing import Any

import pytest
from together import everything

from ranks import run_ranks


@pytest.fixture(scope="session")
def told() -> list[dict[str, Any]]:
    """What each of two ranks has to tell, by the name of the function it ran."""
    return run_ranks(everything, 2)
