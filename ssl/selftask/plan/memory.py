"""Memory of one rank at the peak of a step."""

from __future__ import annotations

from dataclasses import dataclass

from selftask.config.schema import Config
from selftask.hooks.averages.weight_average import WeightAverage
from selftask.plan.fake_task import FakeTask
from selftask.plan.sharding import FULL, HALF, Units, units_of
from selftask.plan.simulation import GRADIENTS, INPUTS, MEMORY, STATE, TEACHER, WEIGHTS, StepCost
from selftask.plan.step_tracker import ACTIVATIONS, CASTS
from selftask.registry import HOOKS

AVERAGES, GATHERED, BUCKETS = "weight averages", "gathered", "compressed gradients"
USABLE = 0.95  # usable share of a device's memory; the rest is lost to fragmentation
_ORDER = (
    *(WEIGHTS, TEACHER, AVERAGES, GRADIENTS, BUCKETS, STATE, MEMORY, INPUTS, CASTS),
    *(GATHERED, ACTIVATIONS),
)


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank at the peak of a step, in bytes.

    Args:
        of: Bytes of device memory by kind; kinds without any are left out.
        largest_gather: Bytes of the largest all-gather of parameters; 0 without FSDP.
        on_host: Bytes that ``parallel.cpu_offload`` keeps in host memory.
    """

    of: dict[str, int]
    largest_gather: int = 0
    on_host: int = 0

    @property
    def total(self) -> int:
        return sum(self.of.values())

    def fits(self, memory: float) -> bool:
        """Return whether the total is at most 95 % of a device's ``memory`` bytes."""
        return self.total <= USABLE * memory


def rank_memory(config: Config, task: FakeTask, cost: StepCost) -> RankMemory:
    """Return the memory of a rank at the peak of a step.

    Args:
        config: Config of the run, which selects the reduction; ``task.config`` is simplified.
        task: The fake task.
        cost: Cost of its simulated step.
    """
    if config.parallel.reduce == "fsdp" and config.launch.world_size > 1:
        return _sharded(config, task, cost)
    kinds = dict(cost.at_peak)
    weights = FULL * sum(p.numel() for p in task.base_model.parameters())
    kinds[AVERAGES] = _averages(config) * weights
    if config.launch.world_size > 1 and config.parallel.grad_compression != "none":
        kinds[BUCKETS] = HALF * sum(p.numel() for p in task.trained_parameters)
    return RankMemory(_in_order(kinds))


def _sharded(config: Config, task: FakeTask, cost: StepCost) -> RankMemory:
    """Return the memory of a rank with FSDP, which keeps shards and gathers block by block."""
    network = units_of(task.base_model, config, task)
    teachers = [units_of(module, config, task) for module in task.teachers]
    inside = set(task.base_model.parameters())
    of_method = FULL * sum(p.numel() for p in task.trained_parameters if p not in inside)
    trained = sum(unit.trained_shard for unit in network.all())
    of_all = sum(unit.trained for unit in network.all()) + of_method
    kept = {
        WEIGHTS: sum(unit.shard for unit in network.all()) + of_method,
        TEACHER: sum(unit.shard for units in teachers for unit in units.all()),
        AVERAGES: _averages(config) * sum(unit.shard for unit in network.all()),
        GRADIENTS: trained + of_method,
        STATE: cost.at_peak.get(STATE, 0) * (trained + of_method) // max(1, of_all),
    }
    gathered = max(
        _of_backward(network, config.parallel.prefetch),
        *(units.in_a_pass(max(1, config.parallel.prefetch)) for units in [*teachers, network]),
    )
    kinds = {
        **(dict.fromkeys(kept, 0) if config.parallel.cpu_offload else kept),
        MEMORY: cost.at_peak.get(MEMORY, 0),
        INPUTS: cost.at_peak.get(INPUTS, 0),
        CASTS: 0 if network.is_low else cost.at_peak.get(CASTS, 0),
        GATHERED: gathered,
        ACTIVATIONS: cost.activations,
    }
    on_host = sum(kept.values()) if config.parallel.cpu_offload else 0
    return RankMemory(_in_order(kinds), network.largest, on_host)


def _of_backward(units: Units, prefetch: int) -> int:
    """Return the bytes that a backward pass needs for gathered parameters and their gradients.

    Only one block has such gradients at a time, and the largest one counts. They have the precision
    of the gathered parameters, and are copied to float32 for the reduction.
    """
    largest = max(units.all(), key=lambda unit: unit.gathered)
    return units.in_a_pass(max(1, prefetch)) + largest.gathered + largest.trained


def _averages(config: Config) -> int:
    """Return the number of weight averages that hooks keep on the device."""
    return sum(
        issubclass(HOOKS[hook.name], WeightAverage) and hook.args.get("device", "same") == "same"
        for hook in config.hooks.values()
        if hook.name in HOOKS and isinstance(HOOKS[hook.name], type)
    )


def _in_order(sizes: dict[str, int]) -> dict[str, int]:
    return {kind: sizes[kind] for kind in sorted(sizes, key=_ORDER.index) if sizes[kind]}
