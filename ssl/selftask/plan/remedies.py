"""Config changes that make a run fit into a device's memory, the least intrusive first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from selftask.config.checks.config_problems import config_problems
from selftask.config.schema import Component, Config
from selftask.errors import UserError
from selftask.plan.memory import RankMemory, rank_memory
from selftask.plan.plan import Plan
from selftask.plan.simulation import fake_task, simulate

_SPLITS = (2, 4, 8, 16, 32, 64)  # divisors of the batch size


@dataclass(frozen=True)
class Remedy:
    """A change of the config.

    Args:
        words: The change, as ``key=value`` words.
        effect: Side effects of the change.
        memory: Memory of a rank with the change.
    """

    words: str
    effect: str
    memory: RankMemory


def remedies(plan: Plan) -> list[Remedy]:
    """Return config changes, each of which by itself makes the run fit into memory.

    Of each kind of change, only the first that fits is returned, such as the largest batch. The
    list is empty if the run fits already, no change helps, or the memory of a device is unknown.
    """
    memory = plan.assumptions.memory
    if memory is None or plan.memory.fits(memory):
        return []
    fitting: list[Remedy] = []
    for change in (_precision, _recompute, _shard, _recompute_and_shard, _accumulate, _smaller):
        if change is _recompute_and_shard and any("parallel." in one.words for one in fitting):
            continue  # one of the two alone is enough
        for config, words, effect in change(plan.config):
            planned = _memory(plan, config)
            if planned is not None and planned.fits(memory):
                fitting.append(Remedy(words, effect, planned))
                break
    return fitting


_Change = Iterator[tuple[Config, str, str]]


def _precision(config: Config) -> _Change:
    if config.train.precision == "float32":
        changed = replace(config, train=replace(config.train, precision="bfloat16"))
        yield changed, "train.precision=bfloat16", "faster, results differ by rounding"


def _recompute(config: Config) -> _Change:
    if config.parallel.activation_checkpointing == "none":
        parallel = replace(config.parallel, activation_checkpointing="blocks")
        yield (
            replace(config, parallel=parallel),
            "parallel.activation_checkpointing=blocks",
            "the same result; a second forward pass of each block",
        )


def _shard(config: Config) -> _Change:
    if config.parallel.reduce != "fsdp" and config.launch.world_size > 1:
        changed = replace(config, parallel=replace(config.parallel, reduce="fsdp"))
        yield changed, "parallel.reduce=fsdp", "the same result to rounding; more communication"


def _recompute_and_shard(config: Config) -> _Change:
    for half, first, effect in _recompute(config):
        for changed, second, _ in _shard(half):
            yield changed, f"{first} {second}", effect


def _accumulate(config: Config) -> _Change:
    """Yield smaller batches that are accumulated, with the same number of samples in a step."""
    train = config.train
    if train.step.name not in ("standard", "accumulate", "manual", "compiled"):
        return
    for changed, size in _divided(config):
        number = train.accumulate * train.batch_size // size
        step = Component(name="accumulate")
        yield (
            replace(changed, train=replace(changed.train, accumulate=number, step=step)),
            f"train.batch_size={size} train.accumulate={number} train.step=accumulate",
            "as many samples a step; losses and BatchNorm see the smaller batch",
        )


def _smaller(config: Config) -> _Change:
    for changed, size in _divided(config):
        yield changed, f"train.batch_size={size}", "another learning rate may be needed"


def _divided(config: Config) -> Iterator[tuple[Config, int]]:
    train, ranks = config.train, config.launch.world_size
    for parts in _SPLITS:
        size = train.batch_size // parts
        if train.batch_size % parts == 0 and size % ranks == 0 and size // ranks > 1:
            yield replace(config, train=replace(train, batch_size=size)), size


def _memory(plan: Plan, config: Config) -> RankMemory | None:
    """Return the memory of a rank for a changed config, or None if the config is invalid."""
    if config_problems(config, is_trained=False):  # such as muon with parallel.reduce=fsdp
        return None
    data = replace(plan.data, config=config)
    per_rank = config.train.batch_size // config.launch.world_size
    try:
        with fake_task(config, data) as task:
            return rank_memory(config, task, simulate(task, per_rank))
    except UserError:  # for example, the network has no blocks to recompute
        return None
