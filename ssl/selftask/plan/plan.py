"""A plan: the cost of a run, computed from its config and a step on fake tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from selftask.config.run_length import RunLength
from selftask.config.schema import Config
from selftask.distributed.device import pick_device
from selftask.distributed.world import World
from selftask.plan.assumptions import Assumptions
from selftask.plan.checkpoints import CheckpointPlan, checkpoint_size, plan_checkpoints
from selftask.plan.data import plan_data
from selftask.plan.fake_data import FakeData
from selftask.plan.measure import measure
from selftask.plan.memory import RankMemory, rank_memory
from selftask.plan.model import Part, parts_of
from selftask.plan.simulation import StepCost, fake_task, simulate
from selftask.plan.traffic import traffic
from selftask.task.numerics import settle_precision


@dataclass(frozen=True)
class Plan:
    """Cost of a run.

    Args:
        config: Config of the run.
        assumptions: Assumptions that are not in the config.
        data: Fake data with the numbers of the real or assumed data.
        length: Number of steps and epochs.
        parts: Number of parameters by part.
        step: Cost of the simulated step.
        memory: Memory of one rank.
        traffic: Bytes that one rank sends in a step, by purpose.
        checkpoints: Size and best interval of checkpoints.
    """

    config: Config
    assumptions: Assumptions
    data: FakeData
    length: RunLength
    parts: list[Part]
    step: StepCost
    memory: RankMemory
    traffic: dict[str, int]
    checkpoints: CheckpointPlan

    @property
    def flops(self) -> float:
        """FLOPs of the whole run; a multiply-add counts as two."""
        samples = self.length.total_batches * self.length.batch_size
        return sum(self.step.flops.values()) * samples

    @property
    def seconds(self) -> float | None:
        """Time of all steps at ``images_per_s``, in seconds; None if the throughput is unknown."""
        if self.assumptions.images_per_s is None:
            return None
        return self.length.total_batches * self.length.batch_size / self.assumptions.images_per_s

    @property
    def price(self) -> float | None:
        """Price of all ranks for the whole run, in the currency of ``price_per_hour``.

        None if time or hourly price is unknown.
        """
        if self.seconds is None or self.assumptions.price_per_hour is None:
            return None
        ranks = self.config.launch.world_size
        return self.seconds / 3600 * ranks * self.assumptions.price_per_hour

    def to_dict(self) -> dict[str, Any]:
        """Return all results as values for JSON, in bytes, seconds and FLOPs; unknown ones None."""
        launch, length, memory = self.config.launch, self.length, self.assumptions.memory
        return {
            "recipe": self.config.recipe,
            "ranks": launch.world_size,
            "samples": length.num_samples,
            "batch_size": length.batch_size,
            "batch_size_of_a_rank": length.batch_size // launch.world_size,
            "accumulate": length.accumulate,
            "samples_per_step": self.length.samples_per_step,
            "steps": length.total_steps,
            "epochs": length.total_steps / length.steps_per_epoch,
            "parameters": [dataclasses.asdict(part) for part in self.parts],
            "flops_of_an_image": self.step.flops,
            "flops": self.flops,
            "memory": {**self.memory.of, "total": self.memory.total},
            "memory_on_host": self.memory.on_host,
            "largest_all_gather": self.memory.largest_gather,
            "fits": None if memory is None else self.memory.fits(memory),
            "sent_in_a_step": {**self.traffic, "total": sum(self.traffic.values())},
            "checkpoint": dataclasses.asdict(self.checkpoints),
            "seconds": self.seconds,
            "price": self.price,
        }


def make_plan(config: Config, assumptions: Assumptions, *, measured: bool = False) -> Plan:
    """Plan a run from a simulated step; no process group is needed.

    Args:
        config: Config of the run.
        assumptions: Assumptions that are not in the config.
        measured: Whether to measure the throughput with some real steps on this machine, and to
            use it instead of the assumed one.

    Raises:
        UserError: If config, data or model do not fit together, or if a step needs the values of
            tensors.
    """
    is_auto = config.train.device == "auto"  # another machine's accelerator is not seen here
    config = settle_precision(config, pick_device("auto" if is_auto else "cpu", World()))
    data = plan_data(config, assumptions)
    per_rank = config.train.batch_size // config.launch.world_size
    with fake_task(config, data) as task:
        parts = parts_of(task)
        step = simulate(task, per_rank)
        memory, sent = rank_memory(config, task, step), traffic(config, task, step)
        size = checkpoint_size(task)
    if measured:
        of_rank, device = measure(config, data)
        rate = of_rank * config.launch.world_size
        assumptions = replace(assumptions, images_per_s=rate, measured_on=str(device))
    return Plan(
        config,
        assumptions,
        data,
        RunLength.of(config.train, data.num_samples),
        parts,
        step,
        memory,
        sent,
        plan_checkpoints(size, config, mtbf_s=assumptions.mtbf, speed=assumptions.write_speed),
    )
