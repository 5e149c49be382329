"""A second forward pass in one step, without effect on logs and running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selftask.parallel.activation_checkpointing import keeping_statistics


@contextmanager
def second_pass(network: Any) -> Iterator[None]:
    """Context that restores running statistics and ``network.embedding`` on exit."""
    embedding = getattr(network, "embedding", None)
    with keeping_statistics(network):
        yield
    network.embedding = embedding
