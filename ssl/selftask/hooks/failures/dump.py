"""Dump of one step for ``selftask replay``: state before the step, batch and random state.

``failures/step_N/`` contains ``config.yaml``, the state as a checkpoint, including the generators
of all ranks, ``rank_R.pt`` with the batch of each rank, and ``failure.json`` with the reason.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from selftask.batch import Batch, Draws, Extras
from selftask.checkpoint import store
from selftask.distributed.collectives import barrier, gather_objects, is_primary, rank, world_size
from selftask.hooks.base import Task
from selftask.logs import write_json

_HOST = torch.device("cpu")
_FIELDS = ("views", "labels", "index", "key", "number", "epoch")


def dump(task: Task, text: str, rng: dict[str, Any]) -> Path:
    """Write the state, batch and random state of the current step; return the folder.

    The step must not have changed the state yet. Every rank must call this function.

    Args:
        task: The task, in a step whose loss has been computed.
        text: The problem, for ``failure.json``.
        rng: States of this rank's generators before the step.
    """
    batch = task.last_batch
    folder = task.out / "failures" / f"step_{task.steps_done + 1}"
    folder.mkdir(parents=True, exist_ok=True)
    state = task.state_dict() | {"rng": gather_objects(rng)}
    facts = {"step": task.steps_done + 1, "ranks": world_size(), "problem": text}
    if is_primary():
        state = {"format": store.FORMAT, "config": task.config_text, **state}
        store.write(state, folder, task.steps_done)
        (folder / "config.yaml").write_text(task.config_text, encoding="utf-8")
        write_json(folder / "failure.json", facts)
    torch.save(
        {**facts, "loss": float(batch.local_loss.detach()), "batch": pack(batch)},
        folder / f"rank_{rank()}.pt",
    )
    barrier()  # the folder is complete
    return folder


def pack(batch: Batch) -> dict[str, Any]:
    """Return a batch of the loader as tensors on the CPU and plain Python objects."""
    packed = {name: _to(getattr(batch, name), _HOST) for name in _FIELDS}
    packed["extras"] = _to(dict(batch.extras), _HOST)
    packed["draws"] = {
        name: [_to(asdict(draws), _HOST) for draws in views] for name, views in batch.draws.items()
    }
    return packed


def unpack(parts: list[dict[str, Any]], device: torch.device) -> Batch:
    """Return the global batch on ``device`` from the packed batches of all ranks, in rank order."""
    fields = _joined(parts)
    key, draws, extras = (fields.pop(name) for name in ("key", "draws", "extras"))
    return Batch(
        key=key,
        extras=Extras(_to(extras, device)),
        draws={
            name: [Draws(**_to(view, device)) for view in views] for name, views in draws.items()
        },
        **_to(fields, device),
    )


def _joined(values: list[Any]) -> Any:
    """Concatenate nested values of ranks along the batch; take numbers from the first rank."""
    return tree_map(
        lambda *of: torch.cat(of) if isinstance(of[0], torch.Tensor) else of[0], *values
    )


def _to(value: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
