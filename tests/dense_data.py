"""Small folders of images with masks or depths: colored shapes on noise; colors tell the class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import map_coordinates

COLORS = np.array([[40, 40, 40], [220, 60, 40], [40, 200, 80], [60, 80, 220], [220, 210, 60]])
DEPTH = np.array([8.0, 2.0, 4.0, 6.0])  # by class of a scene


def scene(seed: int, classes: int = 4, side: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (H, W, 3) of colored rectangles, and its mask (H, W); 0 is background."""
    draws = np.random.default_rng(seed)
    height, width = side + 8 * (seed % 3), side + 8 * (seed % 2)
    mask = np.zeros((height, width), dtype=np.uint8)
    for label in draws.permutation(np.arange(1, classes)):
        top, left = draws.integers(0, height - 16), draws.integers(0, width - 16)
        mask[top : top + 20, left : left + 20] = label
    image = COLORS[mask] + draws.normal(0, 12, (height, width, 3))
    return image.clip(0, 255).astype(np.uint8), mask


def save_scene(folder: Path, name: str, image: np.ndarray, mask: np.ndarray) -> None:
    """Write ``images/NAME.jpg`` and ``masks/NAME.png``."""
    for kind, array, suffix in (("images", image, ".jpg"), ("masks", mask, ".png")):
        path = folder / kind / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path, quality=95)


def write_scenes(folder: Path, count: int, first: int = 0, classes: int = 4) -> Path:
    """Write scenes number ``first`` to ``first + count - 1``; return the folder."""
    for number in range(first, first + count):
        save_scene(folder, f"part_{number % 2}/{number}", *scene(number, classes))
    return folder


def write_depths(folder: Path, count: int, first: int = 0, *, png: bool = False) -> Path:
    """Write scenes with the depth of their classes; a corner of each is unknown."""
    for kind in ("images", "depths"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        image, mask = scene(number)
        depth = DEPTH[mask]
        depth[:6, :6] = 0 if png else np.nan
        Image.fromarray(image).save(folder / f"images/{number}.jpg", quality=95)
        if png:
            Image.fromarray((depth * 1000).astype(np.uint16)).save(folder / f"depths/{number}.png")
        else:
            np.save(folder / f"depths/{number}.npy", depth.astype(np.float32))
    return folder


def interpolated(scores: np.ndarray, size: int) -> np.ndarray:
    """Bilinear interpolation of (C, h, w) with pixel centers at .5, in double precision."""
    places = (np.arange(size) + 0.5) * scores.shape[1] / size - 0.5
    grid = np.meshgrid(places, places, indexing="ij")
    return np.stack([map_coordinates(part, grid, order=1, mode="nearest") for part in scores])
