"""Arrays of many channels: some or all of them, scaled by a stated range."""

from __future__ import annotations

import pickle
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.data.reading.files import POLICY
from selftask.data.source import Source, Wrapped
from selftask.data.staging.staged_source import copied
from selftask.errors import BadImage, UserError
from selftask.registry import SOURCES

DEEP = np.random.default_rng(0).integers(0, 12_000, (4, 9, 11, 5), dtype=np.uint16)


def build(**args: Any) -> Source:
    cls = SOURCES["bands"]
    source: Source = cls(cls.Config(**args))
    return source


def test_what_is_infinite_too_large_or_of_more_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.array([-np.inf, np.nan, 2.0, 5.0, np.inf], np.float32)
    np.save(tmp_path / "0.npy", np.tile(values[:, None, None], (1, 6, 3)))
    np.save(tmp_path / "1.npy", np.zeros((5, 6, 4), np.float32))
    source = build(path=str(tmp_path), value_range=[0, 8])
    assert source[0][0][:, 0, 0].tolist() == [0, 0, 64, 159, 255]
    with pytest.raises(BadImage, match=r"it has 4 channels, and the first file 3; data\.bands"):
        source[1]
    monkeypatch.setattr(POLICY, "max_pixels", 30)
    assert source[0][0].shape == (5, 6, 3)
    monkeypatch.setattr(POLICY, "max_pixels", 29)
    with pytest.raises(BadImage, match=r"6x5 pixels, more than data\.max_pixels=29"):
        source[0]


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Five channels of 16 bits in the ways they come."""
    tifffile = pytest.importorskip("tifffile")
    root = tmp_path / "sentinel"
    for folder in ("forest", "river"):
        (root / folder).mkdir(parents=True)
    np.save(root / "forest" / "0.npy", DEEP[0])
    np.save(root / "forest" / "1.npy", DEEP[1].transpose(2, 0, 1))
    np.savez(root / "river" / "2.npz", bands=DEEP[2], mask=np.zeros(3))
    tifffile.imwrite(root / "river" / "3.tif", DEEP[3], photometric="minisblack", planarconfig=1)
    (root / "river" / "notes.txt").touch()
    return root


def scaled(array: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.rint(np.clip((array.astype(np.float64) - low) / (high - low), 0, 1) * 255)


def test_three_channels_by_a_stated_range(arrays: Path, tmp_path: Path) -> None:
    source = build(path=str(arrays), bands=[3, 2, 1], value_range=[1000, 10000])
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.describe() == "4 images, channels 3, 2, 1, 2 classes"
    fast = copied(
        build(path=str(arrays), bands=[3, 2, 1], value_range=[1000, 10000]), f"{tmp_path}/f"
    )
    for read in (source, pickle.loads(pickle.dumps(source)), fast):
        for i, deep in enumerate(DEEP):
            image, label = read[i]
            assert (image.dtype, image.shape, label) == (np.uint8, (9, 11, 3), i // 2)
            expected = scaled(deep[..., [3, 2, 1]], 1000, 10000)
            assert np.abs(image.astype(int) - expected).max() <= 1  # float32 against float64
            assert (image == expected).mean() > 0.99
    shutil.rmtree(arrays)
    assert fast.path(3) == f"{arrays}/river/3.tif"
    assert fast[3][0].shape == (9, 11, 3)


def test_all_channels_of_every_file(arrays: Path) -> None:
    source = build(path=str(arrays), value_range=[0, 12_000])
    assert source.channels == Wrapped(source).channels == 5
    assert source.describe() == "4 images, all 5 channels, 2 classes"
    for i, deep in enumerate(DEEP):
        image, _ = source[i]
        assert (image.dtype, image.shape) == (np.uint8, (9, 11, 5)) and image.flags.c_contiguous
        assert np.abs(image.astype(int) - scaled(deep, 0, 12_000)).max() <= 1
    np.save(arrays / "forest" / "1.npy", DEEP[1][..., :4])
    reason = r"1\.npy: it has 4 channels, and the first file 5; data\.bands says which to take"
    with pytest.raises(BadImage, match=reason):
        build(path=str(arrays), value_range=[0, 1])[1]


def test_floats_gray_and_patterns(tmp_path: Path) -> None:
    values = np.array([[0.0, 0.25, 0.5], [1.0, np.nan, 9.0]], np.float32)
    np.save(tmp_path / "x.npy", np.pad(values, ((0, 0), (0, 2))))
    source = build(path=f"{tmp_path}/*.npy", bands=[0], value_range=[0, 1])
    assert source[0][0].shape == (2, 5, 1) and source.channels == 1
    assert source[0][0][:, :3, 0].tolist() == [[0, 64, 128], [255, 0, 255]]
    gray = build(path=f"{tmp_path}/*.npy", bands=[0, 0, 0], value_range=[0, 1])  # for RGB weights
    assert np.array_equal(gray[0][0], np.repeat(source[0][0], 3, axis=2))
    odd = tmp_path / "x [2024]"
    odd.mkdir()
    np.save(odd / "x.npy", np.full((4, 5, 3), 7, np.uint8))
    (odd / "a.npy").touch()  # unreadable, and the first
    assert build(path=str(odd))[1][0].tolist() == np.full((4, 5, 3), 7).tolist()


def test_wrong_bands_and_damaged_arrays_are_reported(arrays: Path) -> None:
    def fails(match: str, **args: Any) -> None:
        with pytest.raises(UserError, match=match):
            build(**{"path": str(arrays), "value_range": [0, 1], **args})

    fails(r"data\.value_range is missing: .*0\.npy holds uint16, \d+ to 11\d+", value_range=None)
    fails(r"bands=\[3, 4, 5\]: .*0\.npy has 5 channels, from 0 to 4", bands=[3, 4, 5])
    fails(r"bands=\[\]: numbers of channels, from 0", bands=[])
    fails(r"bands=\[1, -1\]: numbers of channels, from 0", bands=[1, -1])
    fails(r"value_range=\[1, 0\]", value_range=[1, 0])
    fails("there is no folder", path=f"{arrays}/gone/x")
    fails(r"no arrays \(looked for \.npy", path=f"{arrays}/river/*.txt")
    fails(r"none of the first 1 files .*2\.npz: no array", path=f"{arrays}/*/*.npz", key="x")
    source = build(path=str(arrays), value_range=[0, 1], key="band")
    with pytest.raises(
        BadImage, match=r"2\.npz: no array data\.key='band' in it; did you mean 'ba"
    ):
        source[2]
    for name in ("forest/1.npy", "river/3.tif"):
        (arrays / name).write_bytes((arrays / name).read_bytes()[:100])
        index = 1 if name.endswith("npy") else 3
        with pytest.raises(BadImage, match=rf"^{arrays}/{name}: "):
            build(path=str(arrays), value_range=[0, 1])[index]
    np.save(arrays / "forest" / "1.npy", DEEP[1][..., :2])
    with pytest.raises(BadImage, match=r"1\.npy: it has 2 channels only"):
        build(path=str(arrays), bands=[2], value_range=[0, 1])[1]
    np.save(arrays / "forest" / "1.npy", np.zeros(3, np.uint16))
    with pytest.raises(BadImage, match=r"1\.npy: an array of shape \(3,\) is not an image"):
        build(path=str(arrays), value_range=[0, 1])[1]


def test_gray_png_of_16_bits_by_a_stated_range(tmp_path: Path) -> None:
    """12 bits stored in 16, as cameras and scanners write them."""
    deep = np.random.default_rng(1).integers(0, 4096, (2, 9, 11), dtype=np.uint16)
    for index, image in enumerate(deep):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    with pytest.raises(UserError, match=r"data\.value_range is missing: .* holds uint16"):
        build(path=str(tmp_path))
    source = build(path=str(tmp_path), bands=[0, 0, 0], value_range=[0, 4095])
    for index, image in enumerate(deep):
        pixels = source[index][0]
        assert np.abs(pixels.astype(int) - scaled(image[..., None], 0, 4095)).max() <= 1
    np.save(tmp_path / "a.npy", np.zeros((4, 5, 2), np.uint8))
    assert build(path=str(tmp_path)).describe() == "1 images, all 2 channels, no labels"


def test_color_png_of_16_bits_is_refused(tmp_path: Path) -> None:
    """Pillow returns the upper byte of each value, and cannot write such a file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)  # 5 x 4 pixels, 16 bits, RGB
    rows = (b"\0" + struct.pack(">H", 4000) * 15) * 4
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    with pytest.raises(UserError, match="16 bits per color"):
        build(path=str(tmp_path))
