"""Size of a checkpoint, and the checkpoint interval that loses the least time."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from selftask.config.schema import Config
from selftask.distributed.simulated import SIMULATED
from selftask.plan.fake_task import FakeTask
from selftask.random import process_state
from selftask.task import task_state


@dataclass(frozen=True)
class CheckpointPlan:
    """Size and interval of checkpoints.

    Args:
        size: Size of one checkpoint in bytes.
        write_s: Time to write a checkpoint, in seconds.
        mtbf_s: Mean time between failures of the whole job, in seconds.
        interval_s: Interval between checkpoints that loses the least time (Daly), in seconds.
        lost: Share of the time that is lost at this interval, 0 to 1: to writing checkpoints, to
            restarts, and to repeating steps after failures.
    """

    size: int
    write_s: float
    mtbf_s: float
    interval_s: float
    lost: float


def checkpoint_size(task: FakeTask) -> int:
    """Return the size of a checkpoint file of all ranks, in bytes.

    Nothing is written. The sizes of the file with empty tensors, of the tensors, and of the
    generator states of the other ranks are added.
    """
    with SIMULATED.of(1), task.mode:
        state = task_state.take(task)
    state["config"] = task.config_text
    empty: dict[int, Tensor] = {}  # storage -> empty tensor that replaces it
    size = 0

    def emptied(tensor: Tensor) -> Tensor:
        nonlocal size
        storage = tensor.untyped_storage()
        if storage._cdata not in empty:
            empty[storage._cdata] = torch.empty(0, dtype=tensor.dtype)
            size += storage.nbytes()
        return empty[storage._cdata]

    of_other_ranks = (task.world.size - 1) * _file_size(process_state.rng_state())
    return _file_size(tree_map_only(Tensor, emptied, state)) + size + of_other_ranks


def _file_size(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def plan_checkpoints(size: int, config: Config, *, mtbf_s: float, speed: float) -> CheckpointPlan:
    """Plan checkpoints at the interval that loses the least time for a failure rate.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    FGCS 22 (2006), eq. 37; its first term is Young's sqrt(2 * write * mtbf).

    Args:
        size: Size of a checkpoint in bytes.
        config: Config of the run.
        mtbf_s: Mean time between failures of one node, in seconds.
        speed: Speed of writing in bytes per second.
    """
    write, mtbf = size / speed, mtbf_s / config.launch.nodes
    interval = daly(write, mtbf)
    return CheckpointPlan(size, write, mtbf, interval, lost_share(interval, write, mtbf))


def daly(write: float, mtbf: float) -> float:
    """Return the checkpoint interval of Daly's eq. 37 in seconds; see ``plan_checkpoints``.

    Args:
        write: Time to write a checkpoint, in seconds.
        mtbf: Mean time between failures of the job, in seconds.
    """
    if write >= 2 * mtbf:
        return mtbf
    ratio = write / (2 * mtbf)
    return math.sqrt(2 * write * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write


def lost_share(interval: float, write: float, mtbf: float) -> float:
    """Return the share of lost time, 0 to 1, in Daly's model (eq. 20; see ``plan_checkpoints``).

    A restart is assumed to take as long as writing a checkpoint.

    Args:
        interval: Time between checkpoints, in seconds.
        write: Time to write a checkpoint, in seconds.
        mtbf: Mean time between failures of the job, in seconds.
    """
    exponent = (interval + write) / mtbf
    if exponent > 50:
        return 1.0
    wall = mtbf * math.exp(write / mtbf) * math.expm1(exponent) / interval
    return 1 - 1 / wall
