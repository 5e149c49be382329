"""Images of a report: thumbnails, names, labels and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """N images in the order in which they were read, with their features.

    Shape:
        features: (N, E) float32.
        labels: (N,) int64, -1 for images without a label.
    """

    what: str  # name of the images in texts: "validation images"
    names: Sequence[str]
    labels: np.ndarray
    features: np.ndarray
    thumbnails: Sequence[np.ndarray]  # uint8 (h, w, 3) each
    classes: Sequence[str] = field(default=())  # class names by label, if there are any

    def __len__(self) -> int:
        return len(self.names)

    def label_text(self, row: int) -> str:
        """Return the class of an image as text, or an empty string."""
        return self.class_text(int(self.labels[row]))

    def class_text(self, label: int) -> str:
        """Return the name of a class, or its number if it has no name; empty for -1."""
        if label < 0:
            return ""
        return str(self.classes[label]) if label < len(self.classes) else str(label)

    def draw(self, count: int) -> Gathered:
        """Return ``count`` random images in their order, or all of them if there are fewer."""
        if count >= len(self):
            return self
        rows = np.sort(np.random.default_rng(0).permutation(len(self))[:count])
        return replace(
            self,
            names=[self.names[row] for row in rows],
            labels=self.labels[rows],
            features=self.features[rows],
            thumbnails=[self.thumbnails[row] for row in rows],
        )
