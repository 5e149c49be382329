"""Seed the global generators of this process; save and restore their states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from selftask.distributed import accelerator


def seed_all(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch, differently on each rank."""
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def rng_state() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy, torch and the accelerator.

    They are tensors and plain Python values.
    """
    version, key, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": {"version": version, "key": list(key), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        **accelerator.rng_state(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states returned by ``rng_state``."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["key"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    accelerator.set_rng_state(state)


@contextmanager
def restored_rng() -> Iterator[None]:
    """Context that restores the generators of ``rng_state`` at exit."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
