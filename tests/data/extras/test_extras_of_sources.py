"""Fields that shipped sources give beside image and label, and mistakes in asking for them."""

from __future__ import annotations

import csv
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import SIZE, Clips, batches, config
from PIL import Image

from selftask.config.schema import Component, num_views, total_views
from selftask.data.extras import ExtrasReader
from selftask.data.open_source import open_source
from selftask.data.source import Source
from selftask.data.sources.dataset_objects import DatasetSource
from selftask.data.sources.frames import Frames
from selftask.data.staging.staged_source import copied
from selftask.data.tokenizers.byte_level import Bytes
from selftask.errors import BadImage, ConfigError, UserError


def _pixels(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((SIZE, SIZE, 3), level, np.uint8)).save(path)


@pytest.fixture
def pairs(tmp_path: Path) -> list[dict[str, Any]]:
    """Rows of a table: images of levels 0 to 3 and 100 to 103, with words and numbers."""
    captions = ["a red barn", 'says "hello", twice\nin two lines', "Zwölf Bäume", ""]
    rows = []
    for number, caption in enumerate(captions):
        _pixels(tmp_path / "a" / f"{number}.png", number)
        _pixels(tmp_path / "b" / f"{number}.png", 100 + number)
        files = {"path": f"a/{number}.png", "later": f"b/{number}.png"}
        rows.append({**files, "text": caption, "hour": number + 0.5})
    return rows


def _write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    file = folder / f"pairs.{kind}"
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        with open(file, "w", newline="", encoding="utf-8") as opened:
            writer = csv.DictWriter(opened, rows[0], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    os.utime(file, (1, 1))  # so that its index is believed
    return str(file)


PAIRS = {"caption": "text", "images": {"after": "later"}, "numbers": ["hour"]}


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_columns_of_a_table(
    kind: str,
    indexed: bool,
    pairs: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    if indexed:
        monkeypatch.setattr("selftask.data.reading.index.MIN_INDEXED", 2)
    component = Component(name="table", args={"path": _write(tmp_path, kind, pairs), **PAIRS})
    for source in (open_source(component), open_source(component)):
        assert source.extras == {"caption": "text", "after": "image", "hour": "array"}
        for copy in (source, pickle.loads(pickle.dumps(source))):
            assert [copy.extra(row, "caption") for row in range(4)] == [r["text"] for r in pairs]
            assert [float(copy.extra(row, "hour")) for row in range(4)] == [0.5, 1.5, 2.5, 3.5]
            assert [copy.extra(row, "after")[0, 0, 0] for row in range(4)] == [100, 101, 102, 103]
        assert source.extra_path(2, "after") == str(tmp_path / "b/2.png")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"caption": "txt"}, r"data\.caption: .* no column 'txt'; did you mean 'text'"),
        ({"images": {"after": "b"}}, r"data\.images\.after: .* no column 'b'"),
        ({"numbers": ["text"]}, r"data\.numbers: .*pairs\.csv:2: text is 'a red barn', no number"),
        ({"caption": "label"}, r"data\.caption: .* no column 'label'"),
    ],
    ids=str,
)
def test_wrong_columns_are_told(
    args: dict[str, Any], message: str, pairs: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = _write(tmp_path, "csv", pairs)
    with pytest.raises(UserError, match=message):
        open_source(Component(name="table", args={"path": path, **args}))


def test_a_table_without_header_has_columns_by_number(tmp_path: Path) -> None:
    _pixels(tmp_path / "0.png", 7)
    (tmp_path / "x.tsv").write_text("0.png\ta red barn\n")
    source = open_source(
        Component(name="table", args={"path": str(tmp_path / "x.tsv"), "caption": "1"})
    )
    assert (source.extra(0, "caption"), source.labels) == ("a red barn", None)


def test_an_empty_cell_of_a_further_image_is_an_unreadable_one(
    pairs: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = _write(tmp_path, "csv", [*pairs[:1], {**pairs[1], "later": ""}])
    source = open_source(Component(name="table", args={"path": path, **PAIRS}))
    with pytest.raises(BadImage, match=r"a/1\.png: its after is empty"):
        source.extra(1, "after")


def test_staged_copies_of_further_images_are_read(
    pairs: list[dict[str, Any]], tmp_path: Path
) -> None:
    component = Component(name="table", args={"path": _write(tmp_path, "csv", pairs), **PAIRS})
    with open(tmp_path / "pairs.csv", "a") as table:
        table.write("a/0.png,,nothing beside it,1\n")
    copies = copied(open_source(component), str(tmp_path / "stage"))
    for file in (tmp_path / "b").iterdir():
        file.unlink()
    assert [copies.extra(row, "after")[0, 0, 0] for row in range(4)] == [100, 101, 102, 103]
    assert copies.extra(0, "caption") == "a red barn"
    with pytest.raises(BadImage, match=r"a/0\.png: its after is empty"):
        copies.extra(4, "after")


def test_the_next_frame_of_a_clip(tmp_path: Path) -> None:
    for clip, frames in (("x", 5), ("y", 2), ("z", 3)):
        for place in range(frames):
            _pixels(tmp_path / clip / f"{place}.png", 10 * "xyz".index(clip) + place)

    def levels(**args: Any) -> list[tuple[int, int]]:
        source = open_source(Component(name="frames", args={"path": str(tmp_path), **args}))
        assert source.extras == {"next": "image"}
        rows = range(len(source))
        return [(int(source[r][0][0, 0, 0]), int(source.extra(r, "next")[0, 0, 0])) for r in rows]

    clip_x = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert levels(next=1) == [*clip_x, (10, 11), (20, 21), (21, 22)]
    assert levels(next=2) == [(0, 2), (1, 3), (2, 4), (20, 22)]
    assert levels(next=1, every=2) == [(0, 2), (2, 4), (20, 22)]
    with pytest.raises(UserError, match=r"data\.next=5: no clip"):
        levels(next=5)


def test_clips_of_several_frames(tmp_path: Path) -> None:
    """Each sample has T frames of one clip in order; clips that are too short have none."""
    for clip, length in (("a", 4), ("b", 2), ("c", 3)):
        for number in range(length):
            _pixels(tmp_path / clip / f"frame{number}.png", 10 * "abc".index(clip) + number)
    source = Frames(Frames.Config(path=str(tmp_path), clip=3, next=1))
    assert source.extras == {"frame_1": "image", "frame_2": "image", "next": "image"}
    samples = [
        [source[row][0], *(source.extra(row, name) for name in source.extras)]
        for row in range(len(source))
    ]
    clips = [[int(image[0, 0, 0]) for image in images] for images in samples]
    assert clips == [[0, 1, 2, 1], [1, 2, 3, 2], [20, 21, 22, 21]]
    with pytest.raises(UserError, match=r"data\.clip=5: no clip of .* has so many frames"):
        Frames(Frames.Config(path=str(tmp_path), clip=5))


def test_a_group_makes_views_of_several_images(tmp_path: Path) -> None:
    """Two views of each image in turn, each with draws of its own; counted as the method sees."""
    loaded = config(tmp_path, "views.then.image=[null, later]")
    assert num_views(loaded.views) == {"now": 1, "then": 4}
    assert total_views(loaded.to_dict()["views"]) == 5
    (batch, *_) = batches(loaded, Clips())
    first, again, later, _ = (view.flatten(1) for view in batch.views["then"])
    step = (later - first).mean(dim=1)
    assert torch.allclose(step, step[:1].expand_as(step)) and step[0] > 0  # 100 gray values
    assert torch.equal(first, again)  # images of one color: crops are alike
    with pytest.raises(ConfigError, match=r"views\.then\.image: .* no extra image 'after'"):
        batches(config(tmp_path, "views.then.image=[null, after]"), Clips())


def test_arrays_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    images = np.arange(3, dtype=np.uint8)[:, None, None, None] + np.zeros((3, 4, 5, 3), np.uint8)
    np.savez(file, images=images, other=images + 50, words=["a", "b", "c"], time=[0.5, 1, 2])
    component = Component(
        name="array", args={"path": str(file), "extras": ["words", "other", "time"]}
    )
    source = open_source(component)
    assert source.extras == {"words": "text", "other": "image", "time": "array"}
    assert [source.extra(row, "words") for row in range(3)] == ["a", "b", "c"]
    assert source.extra(2, "other").max() == 52 and source.extra(1, "time") == 1
    np.savez(file, images=images, words=["a", "b"])
    with pytest.raises(UserError, match=r"data\.extras: 'words' of .* for each of 3 images"):
        open_source(Component(name="array", args={"path": str(file), "extras": ["words"]}))
    with pytest.raises(UserError, match=r"data\.extras: .* no array 'word'; did you mean 'words'"):
        open_source(Component(name="array", args={"path": str(file), "extras": ["word"]}))


def test_captions_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"image": [np.zeros((4, 4, 3), np.uint8)] * 2, "text": ["a barn", None], "n": [1, 2]}
    features = {"image": datasets.Image(), "text": datasets.Value("string")}
    made = datasets.Dataset.from_dict(
        columns, features=datasets.Features({**features, "n": datasets.Value("int64")})
    )
    made.save_to_disk(tmp_path / "saved")

    def opened(caption: str) -> Source:
        args = {"path": str(tmp_path / "saved"), "caption": caption}
        return open_source(Component(name="huggingface", args=args))

    source = opened("text")
    for copy in (source, pickle.loads(pickle.dumps(source))):
        assert [copy.extra(row, "caption") for row in range(2)] == ["a barn", ""]
    with pytest.raises(UserError, match=r"data\.caption: .* no column 'txt'; did you mean 'text'"):
        opened("txt")
    with pytest.raises(UserError, match=r"data\.caption: column 'n' of .* holds int64, not texts"):
        opened("n")


def test_extras_of_a_data_set_object() -> None:
    class Rooms:
        extras = {"caption": "text", "depth": "array", "other": "image"}
        reads = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            image = Image.new("L", (4, 5), index)
            return image, index, {"caption": f"room {index}", "depth": index / 4, "other": image}

    rooms = Rooms()
    source = DatasetSource(rooms, "mine:Rooms")
    reader = ExtrasReader({"caption": "text", "depth": "array"}, Bytes(Bytes.Config(length=9)))
    image, label = source[2]
    extras = reader.read(source, 2)
    assert (image.shape, label, rooms.reads) == ((5, 4, 3), 2, 1)
    assert extras["caption"].tolist() == [257, *(byte + 1 for byte in b"room 2"), 258, 0]
    assert (extras["depth"], extras["depth"].dtype) == (0.5, np.float32)
    assert source.extra(1, "other")[0, 0].tolist() == [1, 1, 1]
    Rooms.extras = {"caption": "words"}
    with pytest.raises(UserError, match="'words' is none of image, text, array"):
        DatasetSource(rooms, "mine:Rooms")
    Rooms.extras = {"title": "text"}
    with pytest.raises(UserError, match=r"mine:Rooms\[0\]: its item has no 'title'"):
        DatasetSource(rooms, "mine:Rooms").extra(0, "title")
