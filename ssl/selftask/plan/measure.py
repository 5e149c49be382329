"""Measure the throughput of one rank with real steps on this machine."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from selftask.config.schema import Config
from selftask.distributed.accelerator import wait_for
from selftask.distributed.device import pick_device
from selftask.distributed.simulated import SIMULATED
from selftask.distributed.world import World
from selftask.plan.fake_data import FakeData
from selftask.plan.fake_task import FakeTask
from selftask.task.numerics import numerics

_BLOCKS, _SECONDS = 3, 20.0  # minimum number of timed blocks; no block begins after 20 s
_BLOCK_SECONDS, _MOST_STEPS = 0.5, 20  # target length of a block; maximum number of its steps


def measure(config: Config, data: FakeData) -> tuple[float, torch.device]:
    """Time one rank on its share of the batch; return its images per second and its device.

    An image counts once, whatever its number of views. The views are random and already on the
    device, so loading and communication are not measured. The first step does not count. As in a
    run, the host waits for the device only after several steps.
    """
    device = pick_device(config.train.device, World())
    per_rank = config.train.batch_size // config.launch.world_size
    alone = replace(
        config,
        train=replace(config.train, batch_size=per_rank),
        launch=replace(config.launch, nodes=1, processes=1),
    )
    times: list[float] = []
    images: list[int] = []
    steps = 1
    with SIMULATED.of(1), numerics(alone.train, device):
        task = FakeTask(alone, replace(data, config=alone), None, device)
        begun = time.perf_counter()
        while len(times) <= _BLOCKS or time.perf_counter() - begun < _SECONDS / 4:
            images.append(per_rank * len(task.read(per_rank, steps)))
            wait_for(device)
            start = time.perf_counter()
            for _ in range(steps):
                task.train_step_function(task)
            wait_for(device)
            times.append(time.perf_counter() - start)
            if len(times) > 1 and time.perf_counter() - begun > _SECONDS:
                break
            steps = max(1, min(_MOST_STEPS, int(_BLOCK_SECONDS * steps / times[-1])))
    return sum(images[1:]) / sum(times[1:]), device
