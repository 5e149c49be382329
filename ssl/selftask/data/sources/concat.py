"""Concatenation of several sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.config.fields import setting
from selftask.config.schema import Component
from selftask.data.open_source import open_source
from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.source import Delegating, Source, channels_of, extras_of
from selftask.errors import BadImage, UserError
from selftask.registry import register_source


@register_source("concat")
class Concat(Delegating):
    """Concatenation of sources; an epoch can show the images of a source several times.

    With weights [1, 3], an epoch has each image of the first source once and each image of the
    second source three times, with different indices and independent random draws.
    Classes of the same name are merged. If only some sources have names, the numbers of the others
    count as names.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        sources: list[Any] = setting(of="sources")
        """Sources to concatenate, each written like the source in ``data``."""
        weights: list[int] = setting([], min=1)
        """How many times an epoch shows each image of each source; empty: once."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if not self.sources:
                yield "sources: there is none; at least one is needed"
            if self.weights and len(self.weights) != len(self.sources):
                yield f"weights: {len(self.weights)} numbers for {len(self.sources)} sources"

    def __init__(self, config: Config) -> None:
        self.sources = [open_source(Component.from_dict(section)) for section in config.sources]
        self.channels = channels_of(self.sources[0])
        for number, source in enumerate(self.sources):
            if channels_of(source) != self.channels:
                raise UserError(
                    f"data.sources.{number}: its images have {channels_of(source)} channels, "
                    f"those of the first source {self.channels}"
                )
        self.extras = {
            name: kind
            for name, kind in extras_of(self.sources[0]).items()
            if all(extras_of(source).get(name) == kind for source in self.sources)
        }
        times = config.weights or [1] * len(self.sources)
        lengths = [len(source) * n for source, n in zip(self.sources, times, strict=True)]
        self.ends = np.cumsum(lengths)
        names = [source.class_names() for source in self.sources]
        if any(names):  # numbers are names too: class 0 of one source is not the first of another
            names = [
                class_names or [str(number) for number in range(source.num_classes)]
                for class_names, source in zip(names, self.sources, strict=True)
            ]
        self._classes = _union(names)
        self.labels = self._labels(times, names)

    def _labels(self, times: list[int], names: list[list[str] | None]) -> np.ndarray | None:
        """Return the labels of all indices, -1 for sources without labels; None if all are -1."""
        parts = []
        number_of = {name: number for number, name in enumerate(self._classes or ())}
        for source, n, class_names in zip(self.sources, times, names, strict=True):
            labels = source.labels
            if labels is None:
                labels = np.full(len(source), NO_LABEL, dtype=np.int64)
            elif class_names:
                numbers = [number_of[name] for name in class_names]
                labels = np.append(numbers, NO_LABEL)[labels]
            parts.append(np.tile(labels, n))
        joined = np.concatenate(parts)
        return joined if (joined >= 0).any() else None

    def origin(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        number = int(self.ends.searchsorted(index, "right"))
        source = self.sources[number]
        first = int(self.ends[number - 1]) if number else 0
        return source, (index - first) % len(source)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return super().__getitem__(index)[0], self.label_of(index)

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        for source, end in zip(self.sources, self.ends.tolist(), strict=True):
            add(b"%d\0" % end)
            source.hash_names(add)

    def describe(self) -> str:
        """Return a line such as ``3000 images of 2 sources, 10 classes: ...``.

        The sources' own lines follow.
        """
        parts = "; ".join(source.describe() for source in self.sources)
        number = f"{len(self)} images of {len(self.sources)} sources"
        return f"{number}, {self.describe_labels()}: {parts}"

    def unreadable(self) -> dict[int, BadImage]:
        first = 0
        result: dict[int, BadImage] = {}
        for source, end in zip(self.sources, self.ends.tolist(), strict=True):
            for row, bad in source.unreadable().items():
                result |= dict.fromkeys(range(first + row, end, len(source)), bad)
            first = end
        return result


def _union(names: list[list[str] | None]) -> list[str] | None:
    """Return all class names in order of appearance, or None if there are none."""
    named = [class_names for class_names in names if class_names]
    return list(dict.fromkeys(name for class_names in named for name in class_names)) or None
