"""Replacement of the labels of the data: by the index of the image, by 0, or by none."""

from __future__ import annotations

from typing import Literal

import numpy as np

from selftask.data.source import Source, Wrapped


class Relabeled(Wrapped):
    """Source whose labels are replaced, see ``data.relabel``.

    Args:
        source: Source of the images.
        kind: ``index``: the index of the image; ``zero``: 0 for all images; ``none``: no labels.
    """

    def __init__(self, source: Source, kind: Literal["index", "zero", "none"]) -> None:
        super().__init__(source)
        rows = np.arange(len(source), dtype=np.int64)
        self.labels = {"index": rows, "zero": np.zeros_like(rows), "none": None}[kind]
        self.kind = kind

    num_classes = Source.num_classes

    def class_names(self) -> None:
        """Return None: the classes have no names."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.source[index][0], self.label_of(index)

    def describe(self) -> str:
        return f"{self.source.describe()}; labels: {self.kind} (data.relabel)"


def relabeled(source: Source, kind: str) -> Source:
    """Return the source with the labels that ``data.relabel`` selects; ``no`` keeps them."""
    return source if kind == "no" else Relabeled(source, kind)  # type: ignore[arg-type]
