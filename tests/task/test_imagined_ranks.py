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

import imagined_device
import tiny
from imagined_device import NAME, ImaginedDevice, MixedDevices, in_process
from imagined_ranks import run_ranks
from selftask.data.loading import workers
from selftask.distributed import accelerator
from selftask.distributed.process_group import join_world
from selftask.distributed.world import read_world
from selftask.hooks.averages.weight_average import WeightAverage
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
# one of each way of exchange; together they have all options
ON_TWO_RANKS = ("simclr", "moco", "dino", "swav", "vicreg", "supervised")


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


def group_trained(folder: Path) -> dict[str, Any]:
    """Train methods, one after the other; return waits and races, if any."""
    problems = {}
    for number, method in enumerate(ON_TWO_RANKS):
        labels = OF_LABELS if method == "supervised" else ()
        problems[method] = trained(method, folder, *options_of(number), *HOOKS, *labels)
    return {method: waits for method, waits in problems.items() if waits}


@pytest.mark.slow
def test_methods_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(group_trained, 2, tmp_path) == [{}, {}]


ON_FOUR_RANKS = {
    "moco": ("parallel.reduce=fsdp", "parallel.shard_over=2", "train.precision=float16"),
    "simclr": ("parallel.reduce=manual", "train.precision=bfloat16"),
    "swav": ("parallel.reduce=ddp", "method.queue_size=32", "method.queue_start=0"),
}


def reductions_trained(folder: Path) -> list[str]:
    """Train with each kind of reduction; return waits and races."""
    options = ON_FOUR_RANKS.items()
    return [wait for method, words in options for wait in trained(method, folder, *words)]


@pytest.mark.slow
def test_reductions_on_four_ranks(tmp_path: Path) -> None:
    """Shards within two groups, buckets by hand, DDP with a queue; all with gathers."""
    assert run_ranks(reductions_trained, 4, tmp_path) == [[]] * 4


# -- planted faults ----------------------------------------------------------------------------


def planted(fault: str, folder: Path, *more: str) -> list[str]:
    """Train with a fault of ``FAULTS``."""
    options = ("hooks.ema={}", *more)
    return trained("moco", folder, *options, plant=FAULTS[fault])


def _ema_reads_a_value(patch: pytest.MonkeyPatch) -> None:
    original = WeightAverage.update

    def update(self: Any, weight: float) -> None:
        assert next(iter(self.weights.values())).sum().item() < 1e9
        original(self, weight)

    patch.setattr(WeightAverage, "update", update)


def _loss_then(patch: pytest.MonkeyPatch, extra: Any) -> None:
    """Patch the loss; ``extra`` reads the output."""
    original = METHODS["moco"].forward

    def forward(self: Any, output: Any, batch: Any) -> Any:
        extra(output)
        return original(self, output, batch)

    patch.setattr(METHODS["moco"], "forward", forward)


def _prints(patch: pytest.MonkeyPatch) -> None:
    _loss_then(patch, lambda output: print(output))


def _factorizes(patch: pytest.MonkeyPatch) -> None:
    def factorize(output: Tensor) -> None:
        x = output.detach().float().flatten(0, -2)  # of both views
        torch.linalg.eigh(x.T @ x)

    _loss_then(patch, factorize)


def _copies_pageable_memory(patch: pytest.MonkeyPatch) -> None:
    numbers = torch.zeros(256, 256)
    _loss_then(patch, lambda output: numbers.to(output.device, non_blocking=True))


def _stages_little(patch: pytest.MonkeyPatch) -> None:
    """Images of the test are small enough for CUDA to copy them without waiting."""
    patch.setattr(imagined_device, "_STAGED", 1024)


def _does_not_pin(patch: pytest.MonkeyPatch) -> None:
    _stages_little(patch)
    patch.setattr(accelerator, "_PINNED", ())
    patch.setattr(workers, "pins_memory", lambda device: False)


FAULTS = {
    "none": _stages_little,
    "ema": _ema_reads_a_value,
    "print": _prints,
    "eigh": _factorizes,
    "pageable": _copies_pageable_memory,
    "not pinned": _does_not_pin,
}
LINES = {
    "ema": ".sum().item()",
    "print": "print(output)",
    "eigh": "torch.linalg.eigh",
    "pageable": "numbers.to(output.device",
    "not pinned": "to(device, non_blocking=True)",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_waits_are_seen(fault: str, tmp_path: Path) -> None:
    waits = in_process(planted, fault, tmp_path)
    assert bool(waits) == (fault != "none")
    assert all(LINES[fault] in wait for wait in waits)


def exchanged() -> list[str]:
    """Races of a reduction that is waited for and of one that is not, values, and an error."""
    numbers = []
    join_world(read_world(), torch.device(NAME, 0))
    for wait in (True, False):
        with ImaginedDevice() as device:
            x = torch.ones(3, device=NAME)
            work = dist.all_reduce(x, async_op=True)
            if wait:
                work.wait()
            x += 1
        numbers.append(" ".join(device.races))
    with pytest.raises(MixedDevices) as error:
        dist.all_reduce(torch.ones(3))
    return [*numbers, str(x.values.tolist()), str(error.value)]


@pytest.mark.slow
def test_collectives_refuse_the_cpu_and_have_a_stream() -> None:
    for fine, race, values, error in run_ranks(exchanged, 2):
        assert (fine, values) == ("", "[3.0, 3.0, 3.0]")
        assert race.endswith("no wait_event") and "x += 1" in race
        assert "dist.all_reduce(torch.ones(3))" in error and "on the CPU" in error
