"""Nearest neighbors of some images by cosine similarity, shown as images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.evaluate.knn import Bank
from selftask.report.images.gathered import Gathered
from selftask.report.images.image_section import image_section
from selftask.report.images.sprite import Sprite
from selftask.report.page import Section, escape

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
    rows = [
        f"<div class=near-row>{_query(images, sprite, query)}<ol>"
        + "".join(
            f"<li>{_neighbor(images, sprite, query, row, cosine)}</li>"
            for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
        )
        + "</ol></div>"
        for query, rows, cosines in zip(queries, nearest, similar, strict=True)
    ]
    html = f"<p class=muted>{_note(images, queries, nearest)}</p>{''.join(rows)}"
    return image_section("Nearest neighbors", html, "neighbors", sprite)


def _note(images: Gathered, queries: Sequence[int], nearest: np.ndarray) -> str:
    text = (
        f"For random images, the nearest of {len(images):,} {escape(images.what)} by cosine "
        "distance (1 - cosine) of the backbone's features; 0 is the same direction."
    )
    pairs = images.labels[list(queries)][:, None], images.labels[nearest]
    have_labels = (pairs[0] >= 0) & (pairs[1] >= 0)
    if not have_labels.any():
        return text
    same = (pairs[0] == pairs[1])[have_labels].mean()
    return f"{text} {same:.0%} of these neighbors have the class of their image."


def _query(images: Gathered, sprite: Sprite, row: int) -> str:
    return f"<figure class=query>{_figure(images, sprite, row)}</figure>"


def _neighbor(images: Gathered, sprite: Sprite, query: int, row: int, cosine: float) -> str:
    """Return one neighbor; a mark, a word and the frame show whether it has the query's class."""
    kind, mark = "", ""
    distance = f"<span class=dist>{max(0.0, 1 - cosine):.3f}</span>"
    if images.labels[query] >= 0 and images.labels[row] >= 0:
        right = images.labels[query] == images.labels[row]
        kind = "right" if right else "wrong"
        label = "same class" if right else "other class"
        mark = f'<b class=mark role=img aria-label="{label}">{"✓" if right else "✗"}</b>'
    figure = _figure(images, sprite, row, mark, distance)
    return f'<figure class="{kind}">{figure}</figure>'


def _figure(images: Gathered, sprite: Sprite, row: int, mark: str = "", distance: str = "") -> str:
    """Return thumbnail, class and file name of an image."""
    name, label = images.names[row], images.label_text(row)
    tile = sprite.html(sprite.add(images.thumbnails[row]), f"{name}, {label}" if label else name)
    words = f"{mark}<span class=label>{escape(label)}</span>" if label else ""
    return f"{tile}<figcaption>{words}{distance}<span class=name>{escape(name)}</span></figcaption>"
