"""Resizing and affine maps of 8-bit images, with Pillow's and torchvision's semantics."""

from __future__ import annotations

import cv2
import numpy as np

from selftask.data.transforms.channels import by_groups

cv2.setNumThreads(1)  # workers are processes, and OpenCV's threads do not survive a fork

MODES = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC, "nearest": cv2.INTER_NEAREST}


def resize(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    """Resize an image, antialiased unless ``interpolation`` is ``nearest``.

    torch has the fastest antialiased kernel for uint8; OpenCV has none. If no side shrinks, OpenCV
    is faster and gives the same result, except for bicubic, whose kernel differs.

    Args:
        image: uint8 (H, W, C); may be a crop of a larger array.
        height: Height of the result, in pixels.
        width: Width of the result, in pixels.
        interpolation: ``bilinear``, ``bicubic`` or ``nearest``.

    Returns:
        uint8 (height, width, C).
    """
    size = image.shape[:2]
    if size == (height, width):
        return np.ascontiguousarray(image)
    grows = height >= size[0] and width >= size[1]
    if interpolation == "nearest":
        rows, columns = _nearest(size[0], height), _nearest(size[1], width)
        return image.take(rows, axis=0).take(columns, axis=1)
    if interpolation == "bicubic" or not grows:
        return by_groups(lambda part: _antialiased(part, height, width, interpolation), image)
    return by_groups(
        lambda part: cv2.resize(part, (width, height), interpolation=cv2.INTER_LINEAR), image
    )


def _nearest(size: int, resized: int) -> np.ndarray:
    """Return the index of the nearest pixel for each pixel of a resized side.

    As in Pillow, coordinates are running sums: their rounding decides between two neighbors at
    equal distance. OpenCV does the same only from version 5 on.
    """
    steps = np.full(resized, size / resized)
    steps[0] /= 2  # the center of the first pixel
    return np.add.accumulate(steps).astype(np.intp)


def _antialiased(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    import torch  # imported here, so that configs are checked without torch
    from torch.nn.functional import interpolate

    # Index before permuting: only then are the strides those of channels_last. Otherwise torch
    # copies to planes and back, which takes longer than the resizing.
    channels = image[..., None] if image.ndim == 2 else image
    planes = torch.from_numpy(channels)[None].permute(0, 3, 1, 2)
    resized = interpolate(planes, (height, width), mode=interpolation, antialias=True)
    pixels: np.ndarray = resized[0].permute(1, 2, 0).numpy()
    return np.ascontiguousarray(pixels).reshape(height, width, *image.shape[2:])


def warp(
    image: np.ndarray, output_to_input: tuple[float, ...], interpolation: str, fill: int
) -> np.ndarray:
    """Apply an affine map to an image and return the result, which has the same size.

    Args:
        image: uint8 (H, W, C).
        output_to_input: 2x3 matrix, row by row. The center of the first pixel is at (0.5, 0.5),
            as in Pillow.
        interpolation: A key of ``MODES``.
        fill: Gray level for pixels outside the image.
    """
    a, b, c, d, e, f = output_to_input
    centered = ((a, b, c + (a + b - 1) / 2), (d, e, f + (d + e - 1) / 2))

    def change(part: np.ndarray) -> np.ndarray:
        return cv2.warpAffine(
            part,
            np.array(centered),
            (image.shape[1], image.shape[0]),
            flags=MODES[interpolation] | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=(fill,) * 4,
        )

    return by_groups(change, image)
