"""Which images a source holds, in a few words that two processes, or two runs, can compare."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Any

import numpy as np

from selftask.collectives import gather_objects
from selftask.data.source import Source
from selftask.errors import UserError, plural

MAX_NAMES = 50_000  # of larger sources so many are hashed, evenly spaced: 0.1 s


def identity(source: Source) -> dict[str, Any]:
    """Number of images, and hashes of their names and labels in order. Reads no image.

    A file added or removed changes the number and shifts the names after it.
    """
    number = len(source)
    picked = np.unique(np.linspace(0, number - 1, min(number, MAX_NAMES)).astype(np.int64))
    names = hashlib.blake2b(digest_size=12)
    for index in picked.tolist():
        names.update(os.fsencode(source.path(index)) + b"\0")
    labels = np.asarray([] if source.labels is None else source.labels, dtype=np.int64)
    return {
        "images": number,
        "names": names.hexdigest(),
        "labels": hashlib.blake2b(labels.tobytes(), digest_size=12).hexdigest(),
    }


def check_same_on_all_ranks(source: Source | None, key: str) -> None:
    """Raise UserError on every rank if two of them have opened different images; all ranks call.

    They would make different numbers of steps, and wait for each other at the end of an epoch.
    """
    own = {} if source is None else identity(source)
    found = gather_objects((socket.gethostname(), own))
    first_host, first = found[0]
    for rank, (host, other) in enumerate(found):
        if other != first:
            raise UserError(
                f"{key}: rank {rank} on {host} {_difference(other, first)} rank 0 on "
                f"{first_host}; every rank must see the same files, in the same order"
            )


def _difference(other: dict[str, Any], first: dict[str, Any]) -> str:
    counts = [f"{d.get('images', 0)} {plural('image', d.get('images', 0))}" for d in (other, first)]
    if counts[0] != counts[1]:
        return f"has {counts[0]}, not the {counts[1]} of"
    what = "names" if other["names"] != first["names"] else "labels"
    return f"has {counts[0]} with other {what} than"
