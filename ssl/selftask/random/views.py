"""The generators behind all random draws for images, one stream for each (epoch, sample, view)."""

from __future__ import annotations

from typing import Any

import numpy as np

STREAM = 0x76696577  # "view": keeps these draws apart from other uses of the same seed
MASK = (1 << 64) - 1


def draw_rng(seed: int, epoch: int, index: int, view: int) -> np.random.Generator:
    """The generator of all draws for one view of one sample: a counter-based stream of its own."""
    return ViewDraws(seed).at(epoch, index, view)


class ViewDraws:
    """``draw_rng`` for many views: one generator whose counter is moved, not made anew."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        key = np.array([seed & MASK, STREAM], dtype=np.uint64)
        self._philox = np.random.Philox(key=key)
        self._generator = np.random.Generator(self._philox)
        self._state: Any = dict(self._philox.state)
        self._state["state"] = {"counter": np.zeros(4, dtype=np.uint64), "key": key}

    def at(self, epoch: int, index: int, view: int) -> np.random.Generator:
        """The generator at the start of a view's stream; the next call moves it away."""
        self._state["state"]["counter"][:] = (0, view, index, epoch)
        self._philox.state = self._state
        return self._generator
