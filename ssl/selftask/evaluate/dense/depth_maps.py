"""Folders of images with depth maps.

``DIR/images`` has images, also in sub-folders. ``DIR/depths`` has a file of the same name for each
image: a ``.npy`` array of depths, or a 16-bit PNG. Images are resized to S x S pixels.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from PIL import Image

from selftask.data.reading.files import read_bytes
from selftask.data.reading.image import reason_of
from selftask.data.source import ExtraKind, Source
from selftask.data.transforms.resampling import resize
from selftask.errors import BadImage, UserError
from selftask.evaluate.dense.masks import check_size, companions
from selftask.evaluate.dense.patches import Squared

DEPTHS = "depths"
UNKNOWN = 0.0  # depth of pixels that do not count


class DepthImages(Squared):
    """Square images with the extra array ``depth``, float32 (S, S); UNKNOWN for missing values.

    Depths are resized by nearest-neighbor interpolation.

    Args:
        root: Folder with ``images`` and ``depths``.
        source: Source of the images below ``root/images``, or of some of them.
        key: Config key of the folder, for messages.
        size: Height and width in pixels.
        unit: Depth of a pixel with value 1 in a PNG.

    Raises:
        UserError: If a depth map is missing; as it is read, also if it is damaged or has another
            size than its image.
    """

    extras: Mapping[str, ExtraKind] = MappingProxyType({"depth": "array"})

    def __init__(self, root: str, source: Source, key: str, size: int, unit: float) -> None:
        super().__init__(source, size)
        self.key, self.unit = key, unit
        self.depths: Sequence[str] = companions(root, source, key, DEPTHS, (".npy", ".png"))

    def extra(self, index: int, name: str) -> np.ndarray:
        path = self.depths[index]
        depth = read_depth(path, self.unit)
        check_size(depth, path, self.source.path(index))
        return resize(depth[..., None], self.size, self.size, "nearest")[..., 0]

    def extra_path(self, index: int, name: str) -> str:
        return self.depths[index]


def read_depth(path: str, unit: float) -> np.ndarray:
    """Return the depths of a file, float32 (H, W); UNKNOWN if not finite or not above 0.

    Args:
        path: A ``.npy`` file of depths, or a PNG of 16 bits.
        unit: Depth of a pixel with value 1 in a PNG.

    Raises:
        UserError: If it cannot be read or is not a depth map.
    """
    try:
        data = read_bytes(path)
        if path.endswith(".npy"):
            depth = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            if depth.ndim != 2 or depth.dtype.kind not in "fiu":
                raise UserError(
                    f"{path}: an array {depth.dtype} of shape {depth.shape}; numbers (H, W) are "
                    "expected"
                )
        else:
            with Image.open(io.BytesIO(data)) as image:
                if not image.mode.startswith("I"):
                    raise UserError(
                        f"{path}: has mode {image.mode}; a PNG of 16 bits or a .npy is expected"
                    )
                depth = np.asarray(image) * unit
    except (BadImage, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = error.reason if isinstance(error, BadImage) else reason_of(error)
        raise UserError(f"{path}: the depth map cannot be read: {reason}") from error
    depth = depth.astype(np.float32)
    return np.where(np.isfinite(depth) & (depth > 0), depth, np.float32(UNKNOWN))
