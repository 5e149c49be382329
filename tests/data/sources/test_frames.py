"""Folders of frames: clips in order, frames by number, one in so many."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.config.load import load_config
from selftask.data.source import Source
from selftask.errors import BadImage, ConfigError, UserError
from selftask.registry import SOURCES

CLIPS = {"run/clip2": 4, "run/clip10": 3, "jump/clip1": 1}


def build(**args: Any) -> Source:
    cls = SOURCES["frames"]
    source: Source = cls(cls.Config(**args))
    return source


@pytest.fixture
def clips(tmp_path: Path) -> str:
    """Frames 8, 9, 10, ... of each clip, of one gray level each: ten times the clip + the place."""
    for number, (clip, frames) in enumerate(CLIPS.items()):
        (tmp_path / clip).mkdir(parents=True)
        for i in range(frames):
            pixels = np.full((4, 4, 3), 10 * number + i, np.uint8)
            Image.fromarray(pixels).save(tmp_path / clip / f"f{8 + i}.png")
    return str(tmp_path)


def levels(source: Source) -> list[int]:
    return [int(source[i][0][0, 0, 0]) for i in range(len(source))]


def test_order_labels_and_stride(clips: str) -> None:
    source = build(path=clips)
    assert levels(source) == [20, 0, 1, 2, 3, 10, 11, 12]  # jump; run/clip2 before run/clip10
    assert source.path(3) == f"{clips}/run/clip2/f10.png"
    assert (source[0][1], source.labels) == (-1, None)
    assert source.describe() == "8 frames of 3 clips, no labels"
    by_clip = build(path=clips, labels="clip", every=2)
    assert levels(by_clip) == [20, 0, 2, 10, 12]
    assert by_clip.labels.tolist() == [0, 1, 1, 2, 2] == [by_clip[i][1] for i in range(5)]
    assert by_clip.describe() == "5 frames of 3 clips, 1 in 2 of 8, 3 classes"
    by_class = build(path=clips, labels="folder")
    assert by_class.labels.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    assert levels(pickle.loads(pickle.dumps(by_clip))) == levels(by_clip)


def test_labels_are_those_of_the_frames_that_begin_a_sample(clips: str, tmp_path: Path) -> None:
    for name in ("f11", "f12"):  # jump now has three frames, of which the first begins a clip
        Image.fromarray(np.full((4, 4, 3), 21, np.uint8)).save(
            tmp_path / "jump/clip1" / f"{name}.png"
        )
    for args in ({"clip": 3}, {"next": 2}):
        source = build(path=clips, labels="folder", **args)
        assert levels(source) == [20, 0, 1, 10]
        assert source.labels.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("clip", [5, 9, 12, 20])  # of clips of 4, 3 and 1 frames
def test_clips_longer_than_all_frames_are_refused(clips: str, clip: int) -> None:
    with pytest.raises(UserError, match=f"data.clip={clip}: no clip of .* has so many frames"):
        build(path=clips, clip=clip)


def test_damaged_huge_and_missing_frames_are_reported(
    clips: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "clip2" / "f9.png").write_bytes(b"nothing")
    with pytest.raises(BadImage, match=r"run/clip2/f9\.png: not an image"):
        build(path=clips)[2]
    with pytest.raises(ConfigError, match=r"data\.every=0: must be at least 1"):
        load_config("simclr/images", [f"data={{name: frames, path: {clips}, every: 0}}"])
    with pytest.raises(UserError, match="no such folder"):
        build(path=f"{clips}/gone")
    source = build(path=clips)
    monkeypatch.setattr("selftask.data.reading.files.POLICY.max_pixels", 15)
    with pytest.raises(BadImage, match=r"more than data\.max_pixels=15"):
        source[0]
