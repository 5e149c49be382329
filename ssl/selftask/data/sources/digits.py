"""Handwritten digits of scikit-learn, which need no download."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from selftask.config.fields import setting
from selftask.data.reading.image import from_array
from selftask.data.source import ExtraKind, Source
from selftask.errors import UserError
from selftask.registry import register_source

NUM_VAL = 450  # the last digits of the file, by other writers
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = ("a handwritten {}", "the digit {}", "{}, written by hand", "a photo of the number {}")
NUMBERS = {"even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "loop": (0, 6, 8, 9)}
TURN = 10  # degrees a frame
INK_LEVELS = 16  # the file holds 8x8 counts of 0..16


@register_source("digits")
class Digits(Source):
    """scikit-learn's 1797 handwritten digits as RGB images, bright strokes on black.

    They are read from a file of the package. scikit-learn is not imported, as that takes a second.
    """

    drawn_in_size = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        split: Literal["train", "val"] = "train"
        """``train`` is the first 1347 digits, ``val`` the last 450, by different writers."""
        size: int = setting(32, min=1, max=4096)
        """Height and width, in pixels; the 8x8 images are resized by bicubic interpolation."""
        captions: bool = False
        """Whether samples have captions such as "a handwritten three"."""
        numbers: bool = False
        """Whether samples have the numbers ``even``, ``prime`` and ``loop``: 1 if this holds for
        the digit (0, 6, 8 and 9 have a loop), otherwise 0.
        """
        clip: int | None = setting(None, min=2)
        """Number of frames of a clip in which the digit turns by 10 degrees per frame, to the left
        for every other digit; adds the images ``frame_1``, ``frame_2``, ... Null: one frame.
        """

    def __init__(self, config: Config) -> None:
        with gzip.open(_packaged_file(), "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        rows = slice(None, -NUM_VAL) if config.split == "train" else slice(-NUM_VAL, None)
        self.first = 0 if config.split == "train" else len(table) - NUM_VAL
        self.split = config.split
        self.size = config.size
        self.labels = table[rows, -1].astype(np.int64)
        self.extras: dict[str, ExtraKind] = {"caption": "text"} if config.captions else {}
        self.extras |= dict.fromkeys(NUMBERS, "array") if config.numbers else {}
        self.extras |= {f"frame_{number}": "image" for number in range(1, config.clip or 1)}
        self.images = np.stack([_enlarge(row, config.size) for row in table[rows, :-1]])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return from_array(self.images[index]), int(self.labels[index])

    def extra(self, index: int, name: str) -> Any:
        """Return a frame, a number as float32, or a caption, whose wording depends on the index."""
        if name.startswith("frame_"):
            degrees = TURN * int(name.removeprefix("frame_")) * (-1) ** (self.first + index)
            turned = Image.fromarray(self.images[index]).rotate(degrees, Image.Resampling.BICUBIC)
            return from_array(np.asarray(turned))
        if name in NUMBERS:
            return np.float32(self.labels[index] in NUMBERS[name])
        word = WORDS[self.labels[index]]
        return WORDINGS[(self.first + index) % len(WORDINGS)].format(word)

    def path(self, index: int) -> str:
        return f"digits.csv.gz:{self.first + index + 1}"

    def describe(self) -> str:
        """Return ``1347 images of 32x32, 10 classes (handwritten digits, train)``, for example."""
        shape = f"{self.size}x{self.size}"
        return f"{len(self)} images of {shape}, 10 classes (handwritten digits, {self.split})"


def _enlarge(ink: np.ndarray, size: int) -> np.ndarray:
    small = Image.fromarray((ink.reshape(8, 8) * (255.0 / INK_LEVELS)).round().astype(np.uint8))
    return np.asarray(small.resize((size, size), Image.Resampling.BICUBIC))


def _packaged_file() -> Path:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError("data: digits come with scikit-learn: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise UserError(f"data: scikit-learn is installed without its digits ({path} is missing)")
    return path
