"""Encode the scores of test images for JSON, and compute digests that identify the images."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from typing import Any

import numpy as np

from selftask.data.fingerprint import fingerprint, sample_contents
from selftask.data.source import Source

_MOST_IMAGES = 100_000_000
_LARGEST = 1e100  # limit of a score, so that products of scores are finite


def content_digest(source: Source) -> str:
    """Return a digest of the number of images, their labels, and the bytes of up to 256 of them.

    It does not depend on the folder of the images. If reading the bytes is expensive or fails,
    the names of the images are used instead.
    """
    facts = fingerprint(source)
    contents = sample_contents(source)
    images = facts["names"] if None in contents else contents
    text = json.dumps([facts["count"], facts["labels"], images])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def packed_scores(scores: np.ndarray) -> dict[str, Any]:
    """Return scores (N,) as values for JSON: the distinct scores, and each image's index into them.

    Indices have 8, 16 or 32 bits, as the number of distinct scores needs. They are compressed by
    zlib and encoded in base64. 50,000 images that are right or wrong take up to 11 kB.
    """
    values, numbers = np.unique(scores, return_inverse=True)
    packed = zlib.compress(numbers.astype(_index_type(len(values))).tobytes(), 9)
    return {
        "images": len(scores),
        "values": values.tolist(),
        "numbers": base64.b64encode(packed).decode(),
    }


def unpacked_scores(packed: Any) -> np.ndarray | None:
    """Return the scores (N,) of a result of ``packed_scores``, float64; None for other values."""
    try:
        count, values, numbers = (packed[name] for name in ("images", "values", "numbers"))
        values = np.asarray(values, dtype=np.float64)
        if not 0 < count <= _MOST_IMAGES or values.ndim != 1 or not (abs(values) <= _LARGEST).all():
            return None
        kind = _index_type(len(values))
        size = count * kind.itemsize
        content = zlib.decompressobj().decompress(base64.b64decode(numbers), size + 1)
        return values[np.frombuffer(content, kind)] if len(content) == size else None
    except (KeyError, TypeError, ValueError, IndexError, zlib.error, binascii.Error):
        return None  # a run may come from somebody else


def _index_type(num_values: int) -> np.dtype[Any]:
    """Return the smallest type of indices into so many values."""
    return np.dtype("u1" if num_values <= 1 << 8 else "<u2" if num_values <= 1 << 16 else "<u4")
