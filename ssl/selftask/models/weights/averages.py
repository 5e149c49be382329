"""Averaged weights of a run: stored in a checkpoint, or the mean of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from selftask.errors import UserError, nearest
from selftask.models.weights.lora import merged_state
from selftask.models.weights.read import backbone_state


def kept_average(checkpoint: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Return the averaged backbone weights ``name``, such as ``ema``, from a checkpoint.

    Buffers that are not averaged are taken from the trained network. Adapters are merged.

    Raises:
        UserError: If there is no such average.
    """
    hooks = checkpoint.get("hooks") or {}
    kept = {key: state["weights"] for key, state in hooks.items() if state.get("weights")}
    if name not in kept:
        there = nearest(name, kept) if kept else "it has none, hooks.ema={} keeps one"
        raise UserError(f"the checkpoint has no averaged weights named {name!r}; {there}")
    prefix = "backbone."
    state = {**checkpoint["model"], **kept[name]}
    inner = {k.removeprefix(prefix): value for k, value in state.items() if k.startswith(prefix)}
    return merged_state(inner)


def mean_backbone(checkpoints: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the mean of the backbones of several checkpoints, summed in double precision.

    BatchNorm statistics are also averaged; integers are taken from the first checkpoint.
    """
    sums: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    number = 0
    for number, checkpoint in enumerate(checkpoints, start=1):  # noqa: B007
        state = backbone_state(checkpoint)
        first = first or state
        for name, value in state.items():
            if value.is_floating_point():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value
    return {
        name: (sums[name] / number).to(value.dtype) if name in sums else value
        for name, value in first.items()
    }
