"""What the tests of this folder share."""

from __future__ import annotations

from typing import Any

import pytest
from together import everything

from ranks import run_ranks


@pytest.fixture(scope="session")
def rank_results() -> list[dict[str, Any]]:
    """Results of each of two ranks, by the name of the function that it ran."""
    return run_ranks(everything, 2)
