"""Whether all ranks have opened the same images."""

from __future__ import annotations

import socket
from typing import Any

from selftask.data.fingerprint import fingerprint
from selftask.data.source import Source
from selftask.distributed.collectives import gather_objects, world_size
from selftask.errors import UserError, plural


def check_same_on_all_ranks(source: Source | None, key: str) -> None:
    """Raise UserError on every rank if two of them have opened different images; all ranks call.

    They would make different numbers of steps, and wait for each other at the end of an epoch.
    """
    if world_size() == 1:
        return
    own = {} if source is None else fingerprint(source)
    found = gather_objects((socket.gethostname(), own))
    first_host, first = found[0]
    for rank, (host, other) in enumerate(found):
        if other != first:
            raise UserError(
                f"{key}: rank {rank} on {host} {_difference(other, first)} rank 0 on "
                f"{first_host}; every rank must see the same files, in the same order"
            )


def _difference(other: dict[str, Any], first: dict[str, Any]) -> str:
    counts = [f"{d.get('count', 0)} {plural('image', d.get('count', 0))}" for d in (other, first)]
    if counts[0] != counts[1]:
        return f"has {counts[0]}, not the {counts[1]} of"
    what = "names" if other["names"] != first["names"] else "labels"
    return f"has {counts[0]} with other {what} than"
