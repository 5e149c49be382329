"""Files that no image folder should hold, and some that look odd and are sound."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """Noise of its own for each seed; ``size`` is (width, height)."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def encoded(seed: int, format: str = "JPEG", size: tuple[int, int] = (24, 20)) -> bytes:
    """The bytes of such a picture's file."""
    buffer = io.BytesIO()
    picture(seed, size).save(buffer, format=format)
    return buffer.getvalue()


def make_photographs(folder: Path, number: int, size: tuple[int, int] = (24, 20)) -> list[Path]:
    """``number`` sound JPEG files below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{seed:04d}.jpg" for seed in range(number)]
    for seed, path in enumerate(paths):
        path.write_bytes(encoded(seed, size=size))
    return paths


def bomb() -> bytes:
    """A GIF of 44 bytes that claims 65535 x 65535 pixels."""
    screen = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    frame = b"," + struct.pack("<HHHH", 0, 0, 65535, 65535) + b"\0\x02\x02\x4c\x01\0;"
    return (screen + frame).ljust(44, b"\0")


def make_bad(folder: Path) -> dict[str, str]:
    """Files that cannot be read, below ``folder``: relative path -> a part of the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    sound = encoded(1000, size=(64, 64))  # large enough to be cut behind its header
    contents = {
        "empty.jpg": b"",
        "text.jpg": b"this is no image",
        "cut.jpg": sound[: len(sound) * 6 // 10],
        "cut_header.jpg": sound[:15],
        "cut.png": encoded(1001, "PNG")[:-300],
        "bomb.gif": bomb(),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.jpg")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    return {
        "empty.jpg": "not an image",
        "text.jpg": "not an image",
        "cut.jpg": "truncated",
        "cut_header.jpg": "",
        "cut.png": "truncated",
        "bomb.gif": "pixels",
        "pipe.jpg": "a named pipe, not a file",
        "zero.png": "a device, not a file",
        "gone.jpg": "no such file",
    }


def make_odd_but_sound(folder: Path) -> list[Path]:
    """Files that look strange and are images all the same."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "png.jpg").write_bytes(encoded(2000, "PNG"))
    (folder / "a folder.jpg").mkdir()
    (folder / "a folder.jpg" / "x.jpg").write_bytes(encoded(2001))
    (folder / "link.jpg").symlink_to(folder / "a folder.jpg" / "x.jpg")
    picture(2002).convert("CMYK").save(folder / "cmyk.jpg")
    picture(2003).convert("L").save(folder / "gray.png")
    picture(2004).convert("P").save(folder / "palette.gif")
    deep = np.arange(24 * 20, dtype=np.uint16).reshape(20, 24) * 100
    Image.fromarray(deep).save(folder / "deep.png")
    picture(2005).save(folder / "name with\nnewline.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(2006, (30, 10)).save(folder / "turned.jpg", exif=turned)
    return sorted(path for path in folder.rglob("*") if path.is_file())
