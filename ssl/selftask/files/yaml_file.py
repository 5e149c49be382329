"""Read untrusted yaml files as plain values, without resolving references."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from selftask.files.received import UnreadableFile, read_bytes

MAX_VALUES = 100_000  # per file, with every anchor expanded
MAX_LEVELS = 50
_TOO_LARGE = f"holds more than {MAX_VALUES:,} values, anchors written out, or {MAX_LEVELS} levels"
_FEW_SECTIONS = 2000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # in the name of a file that is no UTF-8


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a yaml file as plain values, with strings as keys.

    References such as ``${oc.env:HOME}`` are not resolved.

    Raises:
        UnreadableFile: If it is no yaml, not a mapping, exceeds the limits on size and nesting, or
            is not a regular file.
        OSError: If it is missing or cannot be opened.
    """
    return parse_yaml(read_bytes(path), path)


def parse_yaml(text: bytes, path: str | Path) -> dict[str, Any]:
    """Parse the content of a yaml file as ``read_yaml`` does; ``path`` is used in messages.

    Raises:
        UnreadableFile: If it is not a yaml mapping, or exceeds the limits on size and nesting.
    """
    try:
        # PyYAML writes lone surrogates, but only its parser in Python reads them.
        kind = yaml.SafeLoader if _SURROGATE.search(text) else _LOADER
        _check_levels(text, kind)
        loader = kind(text)
        try:
            node = loader.get_single_node()
            check_size(node)
            content = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        if not isinstance(content, dict):
            raise UnreadableFile(path, "is no yaml mapping")
        return {str(name): _plain(item) for name, item in content.items()}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnreadableFile(path, f"is no yaml ({' '.join(str(error).split())})") from error


def _check_levels(content: bytes, loader: Any) -> None:
    """Raise ValueError if sections nest too deeply for the parser in C, which would crash."""
    if sum(map(content.count, (b"[", b"{", b"-", b"?", b":"))) < _FEW_SECTIONS:
        return  # each section needs one of these, so that nothing must be parsed twice
    levels = 0
    for event in yaml.parse(content, Loader=loader):
        levels += isinstance(event, yaml.CollectionStartEvent)
        levels -= isinstance(event, yaml.CollectionEndEvent)
        if levels > MAX_LEVELS:
            raise ValueError(_TOO_LARGE)


def check_size(document: yaml.Node | None) -> None:
    """Raise ValueError if anchors expand to too many values or sections nest too deeply."""
    sizes: dict[int, tuple[float, float]] = {}

    def measure(node: yaml.Node | None) -> tuple[float, float]:
        """Return the number of values and of levels."""
        if not isinstance(node, yaml.CollectionNode):
            return 1, 1
        if id(node) not in sizes:
            sizes[id(node)] = (math.inf, math.inf)  # in case the node contains itself
            pairs = isinstance(node, yaml.MappingNode)
            inner = [item for pair in node.value for item in pair] if pairs else node.value
            values, levels = zip((0, 0), *map(measure, inner), strict=True)
            sizes[id(node)] = (1 + sum(values), 1 + max(levels))
        return sizes[id(node)]

    values, levels = measure(document)
    if values > MAX_VALUES or levels > MAX_LEVELS:
        raise ValueError(_TOO_LARGE)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; integers above 64 bits and values of other types, such as
    dates, become strings.
    """
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 64:  # Python prints 4,300 digits at most
        return hex(value)[:80]
    return value if isinstance(value, int | float | str | type(None)) else str(value)
