"""Rows of images, one for each sample, such as its views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selftask.report.images.sprite import Sprite
from selftask.report.page import escape


def image_rows(
    sprite: Sprite, kinds: Sequence[str], samples: Sequence[tuple[Sequence[np.ndarray], str, str]]
) -> str:
    """Return a figure for each sample, which scrolls sideways if it is wider than the page.

    Args:
        sprite: Sprite sheet to which the images are added.
        kinds: Names of the images of a sample, such as ``original``, ``global 1``.
        samples: Images (H, W, C) uint8, name, and text (or "") of each sample.
    """
    figures = []
    for images, name, text in samples:
        tiles = "".join(
            f"<div>{sprite.html(sprite.add(image), f'{kind} of {name}')}"
            f"<small>{escape(kind)}</small></div>"
            for kind, image in zip(kinds, images, strict=True)
        )
        words = f"<q>{escape(text)}</q>" if text else ""
        figures.append(
            f"<figure class=sample><div class=tiles tabindex=0 role=group "
            f'aria-label="{escape(name)}">'
            f"{tiles}</div><figcaption><span class=name>{escape(name)}</span>{words}</figcaption>"
            "</figure>"
        )
    return f"<div class=samples>{''.join(figures)}</div>"
