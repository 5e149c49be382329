"""Fingerprints of a source (number, names, labels, classes), to compare runs and ranks."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from selftask.data.source import Source
from selftask.distributed.collectives import gather_objects, world_size
from selftask.errors import UserError, plural

_SHOWN = 3  # maximum number of classes named in a message


def fingerprint(source: Source) -> dict[str, Any]:
    """Return the fingerprint of a source as plain values.

    Returns:
        ``count``: number of images; ``names``: hash of their names, in order; ``labels``: hash of
        their labels, or None; ``classes``: names of the classes by number, or None.
    """
    names = hashlib.blake2b(digest_size=16)
    source.hash_names(names.update)
    labels = source.labels
    if labels is not None:
        numbers = np.ascontiguousarray(labels, dtype="<i8")
        labels = hashlib.blake2b(numbers.data, digest_size=16).hexdigest()
    return {
        "count": len(source),
        "names": names.hexdigest(),
        "labels": labels,
        "classes": source.class_names(),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how two fingerprints differ, one phrase per difference."""
    if before["count"] != now["count"]:
        number = f"{before['count']:,} {plural('image', before['count'])}"
        return [f"{number} before, {now['count']:,} now", *_classes(before, now)]
    classes = list(_classes(before, now))
    if before["names"] != now["names"]:
        return [f"as many images ({now['count']:,}), but not the same names or order", *classes]
    if before["labels"] != now["labels"] and not classes:
        return ["other labels"]
    if before.get("tokenizer") != now.get("tokenizer"):
        words = (known.get("tokenizer") or "none" for known in (before, now))
        classes.append("tokens: {} before, {} now".format(*words))
    return classes


def _classes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = (list(found["classes"] or ()) for found in (before, now))
    for word, names in (("gone", set(old) - set(new)), ("new", set(new) - set(old))):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:_SHOWN]))
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{'class' if len(names) == 1 else 'classes'} {word}: {shown}{more}"
    if old != new and set(old) == set(new):
        yield "classes numbered differently"


def check_same_on_all_ranks(source: Source | None, key: str) -> None:
    """Raise UserError on every rank if ranks have opened different images. Collective call.

    Such ranks would do different numbers of steps and hang at the end of an epoch.
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
