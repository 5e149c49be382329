"""What a source gives beside image and label reaches the batch, whatever the way there."""

from __future__ import annotations

import csv
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import Component, Config
from selftask.data.extras import ExtrasReader
from selftask.data.fingerprint import differences
from selftask.data.loading.data_module import DataModule
from selftask.data.loading.open_data import Sources, open_source
from selftask.data.reading.files import BadImage
from selftask.data.source import Source
from selftask.data.sources.dataset_objects import DatasetSource
from selftask.data.staging.staged_source import copied
from selftask.data.subset import subset_of
from selftask.data.tokenizers.byte_level import Bytes
from selftask.distributed.world import World
from selftask.errors import ConfigError, UserError
from selftask.registry import TOKENIZERS

SIZE = 8
SMALL = ["train.batch_size=4", "eval.evaluations=null", "data.val=null", "train.device=cpu"]
CROP = "{name: random_crop, size: 8}"


class Clips(Source):
    """Pairs of images; every field says which sample it belongs to."""

    extras = {"caption": "text", "later": "image", "time": "array", "mask": "array"}

    def __init__(self, number: int = 12, without_caption: int = -1) -> None:
        self.number = number
        self.without_caption = without_caption

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((SIZE, SIZE, 3), index, np.uint8), -1

    def extra(self, index: int, name: str) -> Any:
        if name == "caption":
            return "" if index == self.without_caption else chr(ord("a") + index) * (index + 1)
        if name == "later":
            return np.full((SIZE + index, SIZE, 3), 100 + index, np.uint8)
        return index / 2 if name == "time" else np.full((3, 5), index, np.int16)

    def path(self, index: int) -> str:
        return f"clips[{index}]"

    def describe(self) -> str:
        return "clips"


def config(tmp_path: Path, *more: str) -> Config:
    views = (
        f"views={{main: null, now: {{transforms: [{CROP}, normalize]}}, "
        f"then: {{image: later, count: 2, transforms: [{CROP}, normalize]}}}}"
    )
    return load_config("swav/digits", [*SMALL, views, "method.queue_size=0", *more])


def batches(loaded: Config, source: Source, count: int = 3) -> list[Batch]:
    module = DataModule(loaded, Sources(source, None), World(), torch.device("cpu"))
    try:
        return list(itertools.islice(module.train_batches(0), count))
    finally:
        module.close()


def check(batch: Batch, row: Any = lambda index: index) -> None:
    """Every field of a sample is that of the image with its index."""
    rows = torch.tensor([row(int(index)) for index in batch.index])
    (now,), then = batch.views["now"], batch.views["then"]
    torch.testing.assert_close(_grey(now), rows.double(), atol=0.01, rtol=0)
    assert len(then) == 2
    for view in then:
        torch.testing.assert_close(_grey(view), rows.double() + 100, atol=0.01, rtol=0)
    assert batch.extras.keys() == {"caption", "time", "mask"}  # the image went into views
    assert torch.equal(batch.extras["time"], rows.float() / 2)
    assert torch.equal(batch.extras["mask"], rows.short()[:, None, None].expand(-1, 3, 5))
    for ids, number in zip(batch.extras["caption"].tolist(), rows.tolist(), strict=True):
        letters = [ord("a") + number + 1] * (number + 1)  # ids of bytes are one more
        assert ids[: number + 3] == [257, *letters, 258]
        assert not any(ids[number + 3 :])


def _grey(view: torch.Tensor) -> torch.Tensor:
    """Grey levels of plain images that were normalised by ImageNet's statistics, (B,) float64."""
    values = view.double().amax((2, 3))[:, 0]
    return (values * 0.229 + 0.485) * 255


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["data.num_workers=2"],
        ["data.cache=ram"],
        ["data.cache=disk", "data.num_workers=1"],
        ["data.augment_on=device", "data.num_workers=1"],
        ["data.augment_on=device", "data.cache=device"],
    ],
    ids=str,
)
def test_every_field_is_that_of_its_image(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path))
    for batch in batches(config(tmp_path, *more), Clips()):
        check(batch)


@pytest.mark.parametrize("cache", ["ram", "disk", "device"])
def test_a_cache_reads_further_images_once(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path))
    source, asked = Clips(), []
    monkeypatch.setattr(
        source, "extra", lambda i, name: asked.append((i, name)) or Clips.extra(source, i, name)
    )
    more = [f"data.cache={cache}", "data.augment_on=device", "data.num_workers=0"]
    loaded = config(tmp_path, *more)
    module = DataModule(loaded, Sources(source, None), World(), torch.device("cpu"))
    stream = module.train_batches(0)
    next(stream)
    images = [index for index, name in asked if name == "later"]
    assert {*images} == {*range(12)}
    for batch in itertools.islice(stream, 5):
        check(batch)
    assert [index for index, name in asked if name == "later"] == images
    module.close()


@pytest.mark.parametrize("more", [[], ["data.cache=device"]], ids=str)
def test_views_of_further_images_are_alike_on_both_engines(more: list[str]) -> None:
    """Textures of two sizes, cropped and mirrored by each view's own draws."""

    class Textures(Clips):
        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            return _texture(20, 24 + index, index), -1

        def extra(self, index: int, name: str) -> Any:
            return (
                _texture(30 - index, 18, -index) if name == "later" else super().extra(index, name)
            )

    crop = "transforms: [{name: random_resized_crop, size: 12}, horizontal_flip, normalize]"
    views = f"views={{main: null, now: {{{crop}}}, then: {{image: later, count: 2, {crop}}}}}"
    of = {
        engine: batches(config(Path(), views, f"data.augment_on={engine}", *extra), Textures())
        for engine, extra in (("cpu", []), ("device", more))
    }
    for cpu, device in zip(of["cpu"], of["device"], strict=True):
        assert torch.equal(cpu.index, device.index)
        for one, other in zip(cpu.all_views, device.all_views, strict=True):
            assert one.std() > 0.1
            torch.testing.assert_close(one, other, atol=0.02, rtol=0)


def _texture(height: int, width: int, phase: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    planes = [np.sin(x / 5 + phase), np.cos(y / 4 - phase), np.sin((x + y) / 6)]
    return (np.stack(planes, -1) * 127 + 128).astype(np.uint8)


def test_fields_of_a_subset() -> None:
    part = subset_of(Clips(), {"count": 8})
    rows = part.rows  # type: ignore[attr-defined]
    for batch in batches(config(Path()), part):
        check(batch, lambda index: rows[index])


def test_a_sample_without_caption_is_replaced_and_listed(tmp_path: Path) -> None:
    loaded = config(tmp_path, "data.max_unreadable=0.5", f"out={tmp_path}")
    for batch in batches(loaded, Clips(without_caption=3)):
        assert 3 not in batch.index.tolist()
        check(batch)
    assert "clips[3]\tits caption is empty" in (tmp_path / "bad_files.txt").read_text()


def test_an_image_that_is_not_there_is_refused_with_the_config() -> None:
    wrong = config(Path(), "views.then.image=after")
    with pytest.raises(ConfigError, match=r"views\.then\.image: .* 'after'; it has later"):
        batches(wrong, Clips())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("time", "noon", r"clips\[\d+\]: its 'time' is 'noon'; a number"),
        ("caption", 3, "its 'caption' is 3; a text"),
        ("later", np.zeros((4, 4, 1), np.uint8), r"its 'later' is uint8 of shape \(4, 4, 1\)"),
    ],
)
def test_a_broken_contract_is_told(name: str, value: Any, message: str) -> None:
    class Broken(Clips):
        def extra(self, index: int, asked: str) -> Any:
            return value if asked == name else super().extra(index, asked)

    with pytest.raises(UserError, match=message):
        batches(config(Path()), Broken())


def test_arrays_of_different_shapes_make_no_batch() -> None:
    class Ragged(Clips):
        def extra(self, index: int, name: str) -> Any:
            return np.zeros(index % 2) if name == "mask" else super().extra(index, name)

    with pytest.raises(UserError, match=r"its 'mask' differs between samples \(float64 \(0,\)"):
        batches(config(Path(), "data.num_workers=1"), Ragged())


def test_a_test_phase_has_extras_and_an_evaluation_none() -> None:
    module = DataModule(config(Path()), Sources(Clips(), Clips(4)), World(), torch.device("cpu"))
    (batch,) = module.test_batches()
    assert batch.extras["time"].tolist() == [0, 0.5, 1, 1.5]
    assert next(module.test_samples())["extras"] == {}
    module.close()


def test_a_bad_extra_image_counts_as_unreadable(tmp_path: Path) -> None:
    class Torn(Clips):
        def extra(self, index: int, name: str) -> Any:
            if (index, name) == (5, "later"):
                raise BadImage("clips/5b.jpg", "torn")
            return super().extra(index, name)

    loaded = config(Path(), "data.max_unreadable=0.5", f"out={tmp_path}")
    assert all(5 not in batch.index.tolist() for batch in batches(loaded, Torn()))


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


def test_bytes_are_cut_and_cleaned() -> None:
    encode = Bytes(Bytes.Config(length=6)).encode
    assert encode("  AB\n c ") == [257, 98, 99, 33, 100, 258]
    assert encode("Äbcdef") == [257, 0xC3 + 1, 0xA4 + 1, 99, 100, 258]
    assert Bytes(Bytes.Config(length=6, lower=False)).encode("AB") == [257, 66, 67, 258]


def test_a_vocabulary_of_the_tokenizers_library(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    words = {"[start]": 0, "[end]": 1, "[unk]": 2, "a": 3, "barn": 4, "red": 5}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="[unk]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    ends = [("[start]", 0), ("[end]", 1)]
    made.post_processor = library.processors.TemplateProcessing("[start] $A [end]", None, ends)
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    cls = TOKENIZERS["file"]
    tokenizer = cls(cls.Config(path=str(file), length=5))
    assert tokenizer.vocab_size == 7
    assert tokenizer("a red barn").tolist() == [1, 4, 6, 5, 2]  # ids plus one: 0 is padding
    assert tokenizer("a red red red barn").tolist() == [1, 4, 6, 6, 2]
    assert tokenizer("blue").tolist() == [1, 3, 2, 0, 0]
    file.write_text("{}")
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: .* is no tokenizer\.json"):
        cls(cls.Config(path=str(file)))
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: no such file"):
        cls(cls.Config(path=str(tmp_path / "tokenizers.json")))


def test_another_vocabulary_is_told_on_resume() -> None:
    short, long = (config(Path(), f"data.tokenizer.length={length}") for length in (9, 10))
    known = [
        DataModule(loaded, Sources(Clips(), None), World(), torch.device("cpu")).fingerprint
        for loaded in (short, long)
    ]
    (difference,) = differences(*known)
    assert difference == (
        "tokens: bytes, lower case, 9 tokens before, bytes, lower case, 10 tokens now"
    )
