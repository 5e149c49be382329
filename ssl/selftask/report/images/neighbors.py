"""Nearest neighbors of some images by cosine similarity, shown as images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.evaluate.nearest import Bank
from selftask.report.images.gather import Gathered
from selftask.report.images.sprite import Sprite, image_section
from selftask.report.page import Section, render

BUDGET = 500_000  # largest size of the images, in characters
_SIDE = 96
_NEIGHBORS = 8


def nearest_neighbors(
    features: Tensor, queries: Sequence[int], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the ``k`` nearest other images of each query by cosine similarity.

    Args:
        features: (N, E).
        queries: Row indices of the Q query images.
        k: Number of neighbors; all other images if there are fewer.

    Returns:
        Row indices and cosines (Q, k), nearest first.
    """
    asked = torch.as_tensor(list(queries), dtype=torch.int64)
    normalized = F.normalize(features[asked], dim=1)
    cosine, row = Bank(features).nearest(normalized, min(k, len(features) - 1), asked)
    return row.numpy(), cosine.numpy()


def neighbors_section(images: Gathered, queries: Sequence[int]) -> Section:
    """Return the section with a row for each query: the image, then its nearest neighbors."""
    nearest, similar = nearest_neighbors(torch.from_numpy(images.features), queries, _NEIGHBORS)
    sprite = Sprite("near", _SIDE, BUDGET)
    labels = images.labels
    rows = [
        (
            query,
            [
                (row, _same(labels[query], labels[row]), f"{max(0.0, 1 - cosine):.3f}")
                for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
            ],
        )
        for query, rows, cosines in zip(queries, nearest, similar, strict=True)
    ]
    compared = [same for _, neighbors in rows for _, same, _ in neighbors if same is not None]
    share = sum(compared) / len(compared) if compared else None
    html = render("images.neighbors", images, sprite, rows, share)
    return image_section("Nearest neighbors", html, "neighbors", sprite)


def _same(query: int, other: int) -> bool | None:
    """Return whether two labels are equal, or None if one is missing."""
    return bool(query == other) if query >= 0 and other >= 0 else None
