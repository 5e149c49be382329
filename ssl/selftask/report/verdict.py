"""The verdict on a run in words, from its rows, events and status alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selftask.hooks.watching.limits import COLLAPSED, MIN_RANK


def collapse_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return emb_std and effective_rank below which the embeddings of a run have collapsed."""
    hooks = config.get("hooks")
    health = hooks.get("health") if isinstance(hooks, dict) else None
    own = health if isinstance(health, dict) else {}
    return float(own.get("collapsed", COLLAPSED)), float(own.get("min_rank", MIN_RANK))
