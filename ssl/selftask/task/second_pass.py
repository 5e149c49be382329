"""A second forward pass in one step, without effect on logs and running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selftask.parallel.activation_checkpointing import keeping_statistics
from selftask.random.keyed import LAYER_DRAWS


@contextmanager
def second_pass(network: Any) -> Iterator[None]:
    """Context of a second pass; restores running statistics and ``network.embedding`` on exit.

    Dropout repeats the draws of the first pass.
    """
    embedding = getattr(network, "embedding", None)
    LAYER_DRAWS.enter((0,))
    LAYER_DRAWS.restart()
    with keeping_statistics(network):
        yield
    network.embedding = embedding
