"""Check that all ranks have the same config, the same user code and the same images.

Ranks that differ would train different networks, or wait for one another in collectives of
different sizes.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selftask.config.extensions.plugin_files import plugin_files
from selftask.config.keys import PATH_FIELDS, Key, dotted
from selftask.config.schema import Config
from selftask.data.fingerprint import check_same_on_all_ranks
from selftask.data.loading.open_data import Sources, open_data
from selftask.distributed.collectives import gather_objects, world_size
from selftask.errors import UserError

_SHOWN = 3  # maximum number of keys or files in a message
_MISSING = "nothing"
_OF_A_NODE = {
    *("recipe", "out", "launch", "train.threads"),
    *(f"data.{name}" for name in ("num_workers", "cache", "stage_to")),
    *(f"data.{name}" for name in ("read_timeout_s", "read_retries")),
}
"""Sections and keys that may differ between ranks, as may paths of images."""


def open_same_data(config: Config, sources: Sources | None = None) -> Sources:
    """Return the sources, after checking that all ranks have the same config, code and images.

    If ``sources`` is None, ``config.data`` is opened. Every rank must call this function.

    Raises:
        UserError: On every rank, if ranks have different configs, code or images; on one rank, if
            it cannot open the data.
    """
    check_same_on_ranks(config)
    sources = sources or open_data(config.data)
    check_same_on_all_ranks(sources.train, "data")
    check_same_on_all_ranks(sources.val, "data.val")
    for name, source in sources.val_sets.items():
        check_same_on_all_ranks(source, f"data.val_sets.{name}")
    return sources


def check_same_on_ranks(config: Config) -> None:
    """Raise UserError on every rank if ranks have different configs or code. Collective call.

    ``recipe``, ``out``, ``launch``, paths of images, and settings of the machine (threads, workers,
    caches, time limits) may differ.
    """
    if world_size() == 1:
        return
    values, code = _compared(config.to_dict()), _digests(plugin_files(config))
    text = json.dumps([values, code], sort_keys=True)
    if len(set(gather_objects(hashlib.blake2b(text.encode()).hexdigest()))) == 1:
        return
    ranks = gather_objects((socket.gethostname(), values, code))
    first_host, first_values, first_code = ranks[0]
    for rank, (host, other_values, other_code) in enumerate(ranks):
        if keys := _other_keys(other_values, first_values):
            raise UserError(
                f"rank {rank} on {host} has {_first_of(keys)}; start every rank with the same "
                f"command, as rank 0 on {first_host}"
            )
        if files := _other_files(other_code, first_code):
            raise UserError(
                f"rank {rank} on {host} has imported another {_first_of(files, ', ')} than rank 0 "
                f"on {first_host}; copy the same code to every node"
            )


def _compared(values: Any, key: Key = ()) -> dict[str, Any]:
    """Return the values that must agree, by dotted key, converted to JSON types."""
    if dotted(key) in _OF_A_NODE or (key[:1] == ("data",) and key[-1] in PATH_FIELDS):
        return {}
    if isinstance(values, Mapping):
        items = [(str(name), item) for name, item in values.items()]
    elif isinstance(values, list | tuple) and any(isinstance(i, Mapping | list) for i in values):
        items = [(str(number), item) for number, item in enumerate(values)]
    else:
        # the name of an object's type is the same in every process
        text = json.dumps(values, default=lambda value: type(value).__qualname__)
        return {dotted(key): json.loads(text)}
    flat: dict[str, Any] = {}
    for name, item in items:
        flat |= _compared(item, (*key, name))
    return flat


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a hash of each file."""
    return {
        name: hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        for name, file in files.items()
        if file.exists()  # may have been removed after it was imported
    }


def _other_keys(values: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """Return a text for each key whose value is not that of the first rank."""
    return [
        f"{key} {_show(values.get(key, _MISSING))}, rank 0 has {_show(first.get(key, _MISSING))}"
        for key in {**first, **values}
        if values.get(key, _MISSING) != first.get(key, _MISSING)
    ]


def _other_files(digests: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    """Return the files that differ; a file that only one of the two ranks has does not count."""
    return sorted(name for name, digest in digests.items() if first.get(name, digest) != digest)


def _show(value: Any) -> str:
    return "null" if value is None else f"{value}"


def _first_of(texts: list[str], separator: str = "; ") -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return separator.join(texts[:_SHOWN]) + more
