"""Extensions of the files that are read as images, and of unsupported images and archives."""

from __future__ import annotations

import os
from collections.abc import Mapping

EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".jp2", ".avif"),
)
IMAGE_LIKE = frozenset(
    {".heic", ".heif", ".hif", ".jxl", ".jfif", ".jpe", ".j2k", ".jpx", ".psd", ".svg", ".tga"}
    | {".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw", ".raw"}
    | {".dcm", ".exr", ".hdr"}
)
ARCHIVES = frozenset(
    {".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz"}
    | {".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"}
)


def kind_of(name: str) -> str | None:
    """Return the extension of an unsupported image or an archive, such as ``.heic``.

    Return None for supported images and for all other files, such as ``.txt``.
    """
    start, extension = os.path.splitext(name.lower())
    if start.endswith(".tar"):
        extension = f".tar{extension}"
    return extension if extension in IMAGE_LIKE or extension in ARCHIVES else None


def describe(counts: Mapping[str, int]) -> str:
    """Return a text such as ``12 .heic, 3 .zip passed over (...)``, with advice in parentheses."""
    most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{number} {extension}" for extension, number in most_first)
    advice = []
    if IMAGE_LIKE & counts.keys():
        advice.append("convert images to JPEG or PNG")
    if ARCHIVES & counts.keys():
        advice.append("unpack archives")
    return f"{listed} passed over ({', '.join(advice)})"
