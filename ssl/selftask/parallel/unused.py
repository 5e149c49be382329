"""Parameters without a gradient: count and describe them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from selftask.distributed.collectives import collective_device, world_size
from selftask.distributed.heartbeat import collective_activity

_MAX_NAMES = 12


def count_ranks(present: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return for each entry the number of ranks on which it is True.

    Every rank must call this function, with the same number of entries.

    Args:
        present: The entries of this rank.
        group: A ``host_group``. The default group (None) may make the host wait for the device.
    """
    device = collective_device() if group is None else torch.device("cpu")
    counts = torch.tensor(present, dtype=torch.int32, device=device)
    with collective_activity("all_reduce of which parameters have gradients"):
        dist.all_reduce(counts, group=group)
    return [int(count) for count in counts.tolist()]


def set_flags(flags: Tensor, absent: Iterable[int]) -> None:
    """Set flags (N,) to 0 at the indices ``absent`` and to 1 elsewhere, without a device sync."""
    flags.fill_(1)
    for index in absent:
        flags[index] = 0


def describe(names: Sequence[str], counts: Sequence[int]) -> str:
    """Return a message that lists parameters without a gradient on some rank, at most 12 by name.

    Args:
        names: Names of all parameters.
        counts: Number of ranks on which each parameter has a gradient.
    """
    size = world_size()
    missing = [(n, c) for n, c in zip(names, counts, strict=True) if c < size]
    lines = [
        f"  {name}" + (f" (has one on {count} of {size} ranks)" if count else "")
        for name, count in missing[:_MAX_NAMES]
    ]
    if len(missing) > _MAX_NAMES:
        lines.append(f"  and {len(missing) - _MAX_NAMES} more")
    which = "parameter" if len(missing) == 1 else f"{len(missing)} parameters"
    return f"{which} without a gradient in the first step:\n" + "\n".join(lines)
