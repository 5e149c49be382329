"""Rectangles of images in a table: a sample each, equal to Pillow's crop."""

from __future__ import annotations

import csv
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.config.compose.short_forms import expand_source
from selftask.config.schema import Component
from selftask.data.fingerprint import differences, fingerprint
from selftask.data.open_source import open_source
from selftask.data.source import Source
from selftask.data.staging.staged_source import copied
from selftask.errors import BadImage, UserError

SIDES = ["x0", "y0", "x1", "y1"]
BOXES = [(0, 0, 7, 5), (2, 1, 6, 5), (3, 2, 4, 3), (0.6, 1.4, 3.5, 4.0), (5, 3, 7, 5)]
FILES = ["a.png", "b.png", "a.png", "b.png", "a.png"]  # several of an image


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        pixels = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    boxed = zip(FILES, BOXES, strict=True)
    return [{"path": file, **dict(zip(SIDES, box, strict=True)), "n": 1} for file, box in boxed]


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    file = folder / f"regions.{kind}"
    if kind == "json":
        file.write_text(json.dumps(rows))
    elif kind == "jsonl":
        file.write_text("\n\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist([{**r, "x0": float(r["x0"])} for r in rows]), file)
    else:
        with open(file, "w", newline="") as opened:
            writer = csv.DictWriter(opened, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    os.utime(file, (1, 1))  # so that its index is believed
    return file


def opened(file: Path, **args: Any) -> Source:
    return open_source(Component(name="table", args={"path": str(file), "box": SIDES, **args}))


def expected(folder: Path) -> list[np.ndarray]:
    pairs = zip(FILES, BOXES, strict=True)
    return [np.asarray(Image.open(folder / file).crop(box)) for file, box in pairs]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_regions_are_pillows_crops(
    kind: str,
    indexed: bool,
    rows: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if indexed:
        monkeypatch.setattr("selftask.data.reading.index.MIN_INDEXED", 2)
    file = write(tmp_path, kind, rows)
    assert expand_source(str(file))["name"] == "table"
    for source in (opened(file), opened(file), pickle.loads(pickle.dumps(opened(file)))):
        assert len(source) == len(BOXES)
        assert source.extras == {}
        for index, crop in enumerate(expected(tmp_path)):
            image, label = source[index]
            assert np.array_equal(image, crop)
            assert image.flags.c_contiguous and label == -1


def test_regions_of_parquet(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = [{**row, **{side: float(row[side]) for side in SIDES}} for row in rows]
    source = opened(write(tmp_path, "parquet", rows), numbers=["n"])
    assert [source[0][0].shape, source[2][0].shape] == [(5, 7, 3), (1, 1, 3)]
    assert source.extra(1, "n") == 1


def test_regions_of_staged_copies_and_subsets(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """A copy is read where the source would read the original."""
    file = write(tmp_path, "csv", rows)
    staged = copied(opened(file, subset={"count": 3, "seed": 1}), str(tmp_path / "fast"))
    for name in ("a.png", "b.png"):
        Image.new("RGB", (7, 5)).save(tmp_path / name)
    assert (tmp_path / "fast").exists()
    kept = [staged[index][0] for index in range(3)]
    assert all(image.any() for image in kept)
    whole = copied(opened(file), str(tmp_path / "fast2"))
    shapes = [crop.shape for crop in expected(tmp_path)]
    assert [whole[index][0].shape for index in range(len(BOXES))] == shapes


def test_another_box_is_other_data(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """A resumed run says so."""
    before = fingerprint(opened(write(tmp_path, "csv", rows)))
    rows[1]["x1"] = 5
    now = fingerprint(opened(write(tmp_path, "json", rows)))
    assert differences(before, now)


def test_parts_outside_are_left_out_and_an_empty_rest_is_unreadable(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    wide = {**rows[0], "x0": -3, "x1": 100}
    outside = {**rows[0], "y0": 50, "y1": 60}
    source = opened(write(tmp_path, "csv", [wide, outside]))
    assert np.array_equal(source[0][0], np.asarray(Image.open(tmp_path / "a.png")))
    with pytest.raises(BadImage, match=r"no pixel of its box \(0, 50, 7, 60\) is in .* of 7x5"):
        source[1]


@pytest.mark.parametrize(
    ("change", "args", "message"),
    [
        ({"x1": 2}, {}, r"data\.box: .*regions\.csv:3: \(2, 1, 2, 5\) is no rectangle; left, top"),
        ({"y1": "nan"}, {}, r"data\.box: .*regions\.csv:3: \(2, 1, 6, nan\) is no rectangle"),
        ({"y1": 1}, {}, r"data\.box: .*regions\.csv:3: \(2, 1, 6, 1\) is no rectangle"),
        ({"x1": "inf"}, {}, r"data\.box: .*regions\.csv:3: \(2, 1, inf, 5\) is no rectangle"),
        ({"y0": "top"}, {}, r"data\.box: .*regions\.csv:3: y0 is 'top', no number"),
        ({}, {"box": ["x0", "y0"]}, r"data\.box=.*: four columns are expected: left, top, right"),
        ({}, {"box": [*SIDES[:3], "y2"]}, r"data\.box: .* no column 'y2'; known: .*x0"),
    ],
    ids=str,
)
def test_wrong_boxes_are_told(
    change: dict[str, Any],
    args: dict[str, Any],
    message: str,
    rows: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    file = write(tmp_path, "csv", [rows[0], {**rows[1], **change}])
    with pytest.raises(UserError, match=message):
        opened(file, **args)


@pytest.mark.parametrize("text", ['{"images": []}', "[1, 2]", "[", "[]", '[{"path": null}]'])
def test_json_that_is_no_table(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    message = r"data: .*x\.json( is not a list| has no rows| row 0: no path)"
    with pytest.raises(UserError, match=message):
        open_source(Component(name="table", args={"path": str(tmp_path / "x.json")}))
