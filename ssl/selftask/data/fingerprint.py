"""Fingerprints of a source (number, names, labels, classes, contents of some images).

They are compared between runs and between ranks.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from selftask.data.source import Source
from selftask.distributed.collectives import gather_objects, world_size
from selftask.errors import BadImage, UserError, plural
from selftask.random.splitmix import hash_words

_SHOWN = 3  # maximum number of classes or images named in a message
SAMPLED = 256  # images whose content is compared
_THREADS = 16  # a network file system answers many requests at once


def fingerprint(source: Source) -> dict[str, Any]:
    """Return the fingerprint of a source as plain values.

    Returns:
        ``count``: number of images; ``names``: hash of their names, in order; ``labels``: hash of
        their labels, None if unknown before reading; ``classes``: names of the classes by number,
        None or empty if they have none.
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


def sampled(count: int) -> list[int]:
    """Return the sorted indices of the images whose content is compared.

    They depend only on ``count``, the number of images: at most SAMPLED of them.
    """
    if count <= SAMPLED:
        return list(range(count))
    return sorted({hash_words(number) % count for number in range(SAMPLED)})


def sample_contents(source: Source) -> list[str | None]:
    """Return a hash of the stored bytes of each image of ``sampled``, without decoding any.

    An entry is None if the image cannot be read or if reading its stored bytes is expensive. If
    the first entry is None, no other image is read, and all entries are None.
    """
    indices = sampled(len(source))
    if not indices or _content(source, indices[0]) is None:  # sources that decode or download
        return [None] * len(indices)
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        return list(pool.map(lambda index: _content(source, index), indices))


def _content(source: Source, index: int) -> str | None:
    try:
        stored = source.stored_bytes(index)
    except BadImage:  # reported when it is decoded
        return None
    return None if stored is None else hashlib.blake2b(stored, digest_size=8).hexdigest()


def differences(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    path: Callable[[int], str] = "image {}".format,
    when: tuple[str, str] = ("before", "now"),
) -> list[str]:
    """Return how two fingerprints differ, one phrase per difference; empty if there is none.

    If the counts or the names differ, only the classes are compared further.

    Args:
        before: Earlier fingerprint, perhaps of an older version of selftask. Contents are compared
            only if both fingerprints have them.
        now: The other fingerprint.
        path: Returns the name of an image by index, for messages.
        when: Words for ``before`` and ``now`` in messages.
    """
    if before["count"] != now["count"]:
        number = f"{before['count']:,} {plural('image', before['count'])}"
        return [f"{number} {when[0]}, {now['count']:,} {when[1]}", *_classes(before, now)]
    classes = list(_classes(before, now))
    if before["names"] != now["names"]:
        return [f"as many images ({now['count']:,}), but not the same names or order", *classes]
    if before["labels"] != now["labels"] and not classes:
        return ["other labels", *_contents(before, now, path)]
    if before.get("tokenizer") != now.get("tokenizer"):
        words = (each.get("tokenizer") or "none" for each in (before, now))
        classes.append("tokens: {} {when[0]}, {} {when[1]}".format(*words, when=when))
    return [*classes, *_contents(before, now, path)]


def _contents(
    before: Mapping[str, Any], now: Mapping[str, Any], path: Callable[[int], str]
) -> list[str]:
    """Return a phrase about images of the same name whose content differs, if there are any."""
    pairs = zip(before.get("contents") or (), now.get("contents") or (), strict=False)
    changed = [number for number, (old, new) in enumerate(pairs) if old and new and old != new]
    if not changed:
        return []
    indices = sampled(now["count"])
    names = ", ".join(path(indices[number]) for number in changed[:_SHOWN])
    more = ", ..." if changed[_SHOWN:] else ""
    of = f"{len(changed)} of {len(indices)} compared"
    return [f"other images under the same names ({of}: {names}{more})"]


def _classes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = (list(each["classes"] or ()) for each in (before, now))
    for word, names in (("gone", set(old) - set(new)), ("new", set(new) - set(old))):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:_SHOWN]))
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{'class' if len(names) == 1 else 'classes'} {word}: {shown}{more}"
    if old != new and set(old) == set(new):
        yield "classes numbered differently"


def check_same_on_all_ranks(source: Source | None, key: str) -> None:
    """Raise UserError on every rank if ranks have opened different images. Collective call.

    Otherwise ranks would train on different images than they report, or take different numbers of
    steps and hang at the end of an epoch.

    Args:
        source: Source that this rank has opened, or None.
        key: Config key of the source, for the error message.
    """
    if world_size() == 1:
        return
    here: dict[str, Any] = {"count": 0, "classes": None}
    if source is not None:
        here = {**fingerprint(source), "contents": sample_contents(source)}
    prints = gather_objects((socket.gethostname(), here))
    first_host, first = prints[0]
    for rank, (host, other) in enumerate(prints):
        path = "image {}".format if source is None else source.path
        when = "on rank 0", f"on rank {rank}"
        if other != first and (problems := differences(first, other, path, when)):
            raise UserError(
                f"{key}: rank {rank} on {host} sees other data than rank 0 on {first_host}: "
                f"{'; '.join(problems)}; every rank must see the same files, in the same order"
            )
