"""Methods on two and four ranks that each have an imagined device, with every hook.

As on GPUs, a collective refuses tensors of the CPU, and runs on a stream of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from imagined_device import NAME, ImaginedDevice, MixedDevices
from imagined_ranks import run_ranks
from selftask.registry import METHODS

HOOKS = (
    "hooks.timing={}",
    "hooks.ema={}",
    "hooks.swa={start: 1, every: 1}",
    "hooks.gradient_norms={}",
    "hooks.histograms={every: 1000 steps}",
    "hooks.activations={}",
    "hooks.precise_bn={batches: 2, batch_size: 4}",
)
OF_LABELS = ("hooks.train_meters={}", "hooks.mixup={}")
CLIPPING = (
    "{mode: norm}",
    "{mode: per_parameter}",
    "{mode: value, max_value: 1.0}",
    "{mode: adaptive}",
)
PRECISIONS = ("float16", "bfloat16", "float32")
REDUCTIONS = ("manual", "ddp", "fsdp")
COMMON = (
    *("train.epochs=1", "train.log_every=1000", "hooks.progress=null", "train.device=auto"),
    "parallel.sync_batch_norm=all",
)
FIRST = 3  # step from 0; the first ones create constants, and DDP builds its buckets again
OVERFLOW = "in unscale_: if all_reduce_sum(overflow).item()"  # float16: a step may be skipped
GROUPS = 6  # of methods, each on ranks of its own


def trained(method: str, folder: Path, *more: str, steps: int = 5, plant: Any = None) -> list[str]:
    """Train; return where the host waited in steps that are not logged, and races."""
    waits = []
    with ImaginedDevice() as device, pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        task = tiny.task(method, folder, method, *COMMON, f"train.max_steps={steps}", *more)
        task.prepare()
        task.on_start()
        task.on_phase_start()
        for number in range(steps):
            device.waits.clear()
            is_between = number >= FIRST and not task.should_log
            task.step()
            waits += [w for w in device.waits if OVERFLOW not in w] if is_between else []
        with pytest.raises(StopIteration):
            task.step()
        task.on_phase_end()
        task.on_end()
        task.close()
    assert task.device.type == NAME
    return waits + device.races


def options_of(number: int) -> list[str]:
    """Return reduction, clipping and precision; each method has others."""
    reduce, clip = REDUCTIONS[number % 3], CLIPPING[number % 4]
    precision = PRECISIONS[number % 5 % 3]
    return [
        f"parallel.reduce={reduce}",
        f"hooks.clip_gradients={clip}",
        f"train.precision={precision}",
    ]


def group_trained(methods: list[str], folder: Path) -> dict[str, Any]:
    """Train several methods, one after the other; return waits and races, if any."""
    problems = {}
    for method in methods:
        number = METHODS.names().index(method)
        labels = OF_LABELS if method == "supervised" else ()
        options = options_of(number)
        problems[method] = trained(method, folder, *options, *HOOKS, *labels)
    return {method: waits for method, waits in problems.items() if waits}


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_methods_on_two_ranks(group: int, tmp_path: Path) -> None:
    assert run_ranks(group_trained, 2, METHODS.names()[group::GROUPS], tmp_path) == [{}, {}]
