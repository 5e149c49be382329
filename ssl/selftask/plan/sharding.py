"""Units of a network that FSDP shards and gathers: its blocks and the remaining parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import nn

from selftask.config.schema import Config
from selftask.parallel.blocks import find_blocks
from selftask.parallel.sync_batch_norm import has_batch_norm
from selftask.plan.fake_task import FakeTask

FULL, HALF = 4, 2  # bytes per element


@dataclass(frozen=True)
class Unit:
    """Sizes in bytes of parameters that are gathered together.

    Args:
        shard: Shard of one rank.
        trained_shard: Trained parameters in the shard of one rank.
        gathered: All parameters with padding, in the precision in which they are gathered.
        trained: Trained parameters in float32.
    """

    shard: int
    trained_shard: int
    gathered: int
    trained: int


@dataclass(frozen=True)
class Units:
    """Units of a network.

    Args:
        blocks: One unit for each block.
        root: All other parameters, which stay gathered during a pass.
        is_low: Whether all units are gathered in low precision, so that autocast makes no copies.
    """

    blocks: list[Unit]
    root: Unit
    is_low: bool

    def all(self) -> list[Unit]:
        return [*self.blocks, self.root]

    @property
    def largest(self) -> int:
        """Bytes of the largest all-gather."""
        return max(unit.gathered for unit in self.all())

    def in_a_pass(self, ahead: int) -> int:
        """Return the maximum bytes of gathered parameters during a pass.

        Args:
            ahead: Number of blocks that are gathered in addition to the current one.
        """
        sizes = sorted((unit.gathered for unit in self.blocks), reverse=True)
        return self.root.gathered + sum(sizes[: 1 + ahead])


def shard_size(config: Config) -> int:
    """Return the number of ranks that together hold one copy of the network."""
    over = config.parallel.shard_over
    if over == "all":
        return config.launch.world_size
    return config.launch.processes if over == "node" else int(over)


def units_of(network: nn.Module, config: Config, task: FakeTask) -> Units:
    """Return the units of a network that FSDP gathers, divided as ``parallel.fsdp`` does.

    Args:
        network: The network or a teacher.
        config: Config of the run, which sets the number of shards.
        task: The fake task, for its autocast precision.
    """
    ranks, low = shard_size(config), task.low_precision is not None
    blocks = find_blocks(network)
    inside = {p for block in blocks for p in block.parameters()}
    rest = [p for p in network.parameters() if p not in inside]
    is_low = low and not has_batch_norm(network)
    return Units(
        [_unit(b.parameters(), ranks, low and not has_batch_norm(b)) for b in blocks],
        _unit(rest, ranks, is_low),
        is_low,
    )


def _unit(parameters: Iterable[nn.Parameter], ranks: int, low: bool) -> Unit:
    of_all = list(dict.fromkeys(parameters))
    trained = [p for p in of_all if p.requires_grad]
    numel = sum(_padded(p, ranks) for p in of_all)
    return Unit(
        shard=FULL * numel // ranks,
        trained_shard=FULL * sum(_padded(p, ranks) for p in trained) // ranks,
        gathered=(HALF if low else FULL) * numel,
        trained=FULL * sum(p.numel() for p in trained),
    )


def _padded(parameter: nn.Parameter, ranks: int) -> int:
    """Return the number of elements after padding the first dimension to a multiple of ranks."""
    rows, *others = parameter.shape or (1,)
    return -(-rows // ranks) * ranks * prod(others)
