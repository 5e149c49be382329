"""What all tests share: a world that the tests before have left as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from selftask.registry import REGISTRIES


@pytest.fixture(autouse=True)
def _one_thread_and_seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def forget_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the test registers and imports from its own folder is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    known = {r: (dict(r._registered), dict(r._addresses)) for r in REGISTRIES.values()}
    yield
    for registry, (registered, addresses) in known.items():
        registry._registered, registry._addresses = registered, addresses
    for name in set(sys.modules) - modules:
        if "/pytest-" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
