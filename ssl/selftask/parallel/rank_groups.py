"""Groups of ranks that work together: those of a node, or a given number."""

from __future__ import annotations

import socket

from selftask.distributed.collectives import gather_objects, world_size
from selftask.errors import UserError


def rank_groups(which: str | int, key: str) -> list[list[int]]:
    """Divide all ranks into groups. Every rank must call this function.

    Args:
        which: ``all`` ranks, those of one ``node``, or a number of consecutive ranks.
        key: The config key, for error messages.

    Returns:
        The groups, each as a list of its ranks.

    Raises:
        UserError: If the ranks cannot be divided into groups of that size.
    """
    ranks = range(world_size())
    if which == "all":
        return [list(ranks)]
    if which == "node":
        hosts = gather_objects(socket.gethostname())
        return [[r for r in ranks if hosts[r] == host] for host in dict.fromkeys(hosts)]
    size = int(which)
    if len(ranks) % size:
        raise UserError(
            f"{key}={size}: {len(ranks)} processes cannot be divided into "
            f"groups of {size}; use a divisor, 'all' or 'node'"
        )
    return [list(ranks[first : first + size]) for first in ranks[::size]]
