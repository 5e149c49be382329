"""Videos as folders of frames."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from selftask.config.fields import setting
from selftask.data.reading.class_numbers import label_top_folders
from selftask.data.reading.path_table import PathTable
from selftask.data.reading.skipped_files import describe
from selftask.data.source import Source
from selftask.data.sources.files import FileSource, Folder
from selftask.errors import UserError
from selftask.registry import register_source

_NUMBER = re.compile(r"(\d+)")


@register_source("frames")
class Frames(FileSource):
    """Frames of videos: each folder of images is a clip, with frames sorted by number."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Folder that holds the folders of the clips, at any depth."""
        every: int = setting(1, min=1)
        """Use the first frame of each clip and every n-th frame after it."""
        next: int | None = setting(None, min=1)
        """Add an image ``next`` to each sample: the frame that comes this many used frames later.
        Frames without such a frame in their clip are omitted. Null: no image ``next``.
        """
        clip: int | None = setting(None, min=2)
        """Number of used frames in a sample: adds the images ``frame_1``, ``frame_2``, ... that
        follow the main one. Frames without enough later frames are omitted. Null: one frame.
        """
        labels: Literal["clip", "folder"] | None = None
        """Label of a frame: the number of its clip, or of its top folder if there are several;
        null: no labels."""

    def __init__(self, config: Config) -> None:
        folder = Folder(Folder.Config(path=config.path, labels=False))
        self.root, self.paths, self._passed_over = folder.root, folder.paths, folder.passed_over()
        self._unreadable = {}  # found when frames are read
        self.every = config.every
        rows, clip_of = _order(self.paths, config.every)
        offsets = {f"frame_{number}": number for number in range(1, config.clip or 1)}
        if config.next is not None:
            offsets["next"] = config.next
        later = max(offsets.values(), default=0)
        firsts = np.flatnonzero(clip_of[: max(0, len(rows) - later)] == clip_of[later:])
        if not len(firsts):
            asked = {"next": config.next, "clip": config.clip}
            keys = ", ".join(f"data.{name}={value}" for name, value in asked.items() if value)
            raise UserError(f"{keys}: no clip of {config.path} has so many frames")
        self.rows = rows[firsts]  # (N,) int64: indices of the samples among the folder's images
        self.later_rows = {name: rows[firsts + offset] for name, offset in offsets.items()}
        self.clip_of = clip_of[firsts]
        self.num_clips = len(np.unique(self.clip_of))
        self.extras = dict.fromkeys(offsets, "image")
        if config.labels == "clip":
            self.labels = self.clip_of
        elif config.labels == "folder":
            self.labels = label_top_folders([self.paths[row] for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    hash_names = Source.hash_names  # of the used frames only

    def extra(self, index: int, name: str) -> np.ndarray:
        """Return a later frame of the clip, uint8 (H, W, C); raises BadImage."""
        return self.image(self.extra_path(index, name))

    def path(self, index: int) -> str:
        return self.path_of_row(int(self.rows[index]))

    def extra_path(self, index: int, name: str) -> str:
        return self.path_of_row(int(self.later_rows[name][index]))

    def describe(self) -> str:
        """Return a line such as ``12000 frames of 40 clips, 1 in 5 of 60000, no labels``.

        ``1 in 5 of 60000`` (images in the folder) is left out if ``every`` is 1.
        """
        taken = "" if self.every == 1 else f", 1 in {self.every} of {len(self.paths)}"
        others = self.passed_over()
        more = f"; {describe(others)}" if others else ""
        return (
            f"{len(self)} frames of {self.num_clips} clips{taken}, {self.describe_labels()}{more}"
        )


def _order(paths: PathTable, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the used frames and the number of the clip of each, both (N,) int64.

    Clips are sorted by path and frames by name. Numbers in names are sorted by value: ``frame2``
    comes before ``frame10``.
    """
    clips: dict[str, list[tuple[list[str | int], int]]] = {}
    for row in range(len(paths)):
        clip, name = os.path.split(paths[row])
        clips.setdefault(clip, []).append((_natural(name), row))
    rows, numbers = [], []
    for number, clip in enumerate(sorted(clips, key=_natural)):
        taken = sorted(clips[clip])[::every]
        rows += [row for _, row in taken]
        numbers += [number] * len(taken)
    return np.array(rows, dtype=np.int64), np.array(numbers, dtype=np.int64)


def _natural(name: str) -> list[str | int]:
    """Return a sort key that compares numbers in names by value: texts and numbers in turn."""
    return [int(part) if part.isdecimal() else part for part in _NUMBER.split(name)]
