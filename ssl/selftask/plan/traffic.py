"""Bytes that one rank sends in a step."""

from __future__ import annotations

from selftask.config.schema import Config
from selftask.plan.fake_task import FakeTask
from selftask.plan.sharding import FULL, HALF, shard_size, units_of
from selftask.plan.simulation import StepCost


def traffic(config: Config, task: FakeTask, cost: StepCost) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by purpose; it receives the same number.

    A single rank sends nothing, and the dict is empty. Ring algorithms are assumed: for N bytes on
    W ranks, an all-reduce sends 2 N (W - 1) / W bytes, an all-gather or a reduce-scatter
    N (W - 1) / W.

    Args:
        config: Config of the run, which selects the reduction; ``task.config`` is simplified.
        task: The fake task.
        cost: Cost of its simulated step.
    """
    ranks = config.launch.world_size
    if ranks == 1:
        return {}
    sent = _sharded(config, task, cost) if config.parallel.reduce == "fsdp" else {}
    inside = set(task.base_model.parameters()) if sent else set()
    item = FULL if config.parallel.grad_compression == "none" or sent else HALF
    plain = item * sum(p.numel() for p in task.trained_parameters if p not in inside)
    sent["gradients (all-reduce)"] = _ring(2 * plain, ranks)
    batches = config.train.accumulate / task.config.train.accumulate
    for name, size in cost.sent.items():
        sent[f"loss and statistics ({name.replace('_', '-')})"] = round(size * batches)
    return {name: size for name, size in sent.items() if size}


def _sharded(config: Config, task: FakeTask, cost: StepCost) -> dict[str, int]:
    """Return the bytes that FSDP sends: parameters for each pass, and gradients."""
    ranks, shards = config.launch.world_size, shard_size(config)
    batches = config.train.accumulate / task.config.train.accumulate
    network = units_of(task.base_model, config, task)
    teachers = [units_of(module, config, task) for module in task.teachers]
    blocks, root = sum(unit.gathered for unit in network.blocks), network.root.gathered
    # Parameters are gathered for the forward pass and again for the backward pass.
    in_pass = 2 * (cost.passes * blocks + task.config.train.accumulate * root)
    of_teachers = sum(
        cost.teacher_passes * sum(unit.gathered for unit in units.blocks)
        + task.config.train.accumulate * units.root.gathered
        for units in teachers
    )
    last = cost.passes / task.config.train.accumulate  # only the last batch reduces gradients
    trained = last * sum(unit.trained for unit in network.blocks) + network.root.trained
    copies = ranks // shards
    return {
        "parameters (all-gather)": _ring(in_pass * batches, shards),
        "teacher's parameters (all-gather)": _ring(of_teachers * batches, shards),
        "gradients (reduce-scatter)": _ring(trained, shards),
        "gradients between copies (all-reduce)": _ring(2 * trained / shards, copies),
    }


def _ring(size: float, ranks: int) -> int:
    return round(size * (ranks - 1) / ranks)
