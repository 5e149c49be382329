"""Tables and patterns name the same images, in a fixed order, and say what they miss."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.config.compose.short_forms import expand_source
from selftask.config.load import load_config
from selftask.data.labels import align_classes
from selftask.data.loading.open_data import open_data
from selftask.data.reading.patterns import expand_braces, match_files
from selftask.data.source import Source
from selftask.data.subset import subset_of
from selftask.errors import BadImage, UserError
from selftask.registry import SOURCES

NAMES = ["a/0.png", "a/1.png", "b/x/2.png", "b/3.png"]


def build(name: str, **args: Any) -> Source:
    cls = SOURCES[name]
    source: Source = cls(cls.Config(**args))
    return source


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def pixels(tmp_path: Path) -> list[np.ndarray]:
    """Four PNGs below tmp_path, as their pixels."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (5 + i, 7, 3), dtype=np.uint8) for i in range(4)]
    for name, image in zip(NAMES, images, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / name)
    return images


def check(source: Source, pixels: list[np.ndarray], labels: list[int] | None) -> None:
    """Pixels and labels, of the source and of what a worker gets."""
    assert len(source) == len(pixels)
    assert (None if source.labels is None else source.labels.tolist()) == labels
    for read in (source, pickle.loads(pickle.dumps(source))):
        for index, expected in enumerate(pixels):
            image, label = read[index]
            assert np.array_equal(np.asarray(image), expected)
            assert label == (-1 if labels is None else labels[index])


def test_csv_with_header(tmp_path: Path, pixels: list[np.ndarray]) -> None:
    rows = ["id,File,label", "7,a/0.png,dog", '8,"a/1.png",cat', "", "9,b/x/2.png,dog"]
    (tmp_path / "list.csv").write_text("\ufeff" + "\r\n".join(rows), encoding="utf-8")
    source = build("table", path=str(tmp_path / "list.csv"))
    check(source, pixels[:3], [1, 0, 1])
    assert source.path(2) == str(tmp_path / "b/x/2.png")
    assert source.describe() == "3 images, 2 folders, 0 unreadable"
    assert build("table", path=str(tmp_path / "list.csv"), label_column="id")[1][1] == 8
    assert build("table", path=str(tmp_path / "list.csv"), label_column=None).labels is None


def test_tsv_without_header_and_missing_labels(tmp_path: Path, pixels: list[np.ndarray]) -> None:
    (tmp_path / "list.tsv").write_text("a/1.png\t3\nb/3.png\t\na/0.png\t1\n")
    check(
        build("table", path=str(tmp_path / "list.tsv")), [pixels[i] for i in (1, 3, 0)], [3, -1, 1]
    )
    (tmp_path / "list.csv").write_text("5;a/1.png\n6;b/3.png\n")
    source = build("table", path=str(tmp_path / "list.csv"), column="1", delimiter=";")
    check(source, [pixels[1], pixels[3]], None)


def test_captions_of_json_lines_may_hold_line_separators(
    tmp_path: Path, pixels: list[np.ndarray]
) -> None:
    text = "two\u2028lines\x85"
    row = json.dumps({"path": NAMES[0], "caption": text}, ensure_ascii=False)
    (tmp_path / "list.jsonl").write_text(f"{row}\r\n\n{row}\n", encoding="utf-8")
    source = build("table", path=str(tmp_path / "list.jsonl"), caption="caption")
    assert [source.extra(row, "caption") for row in range(2)] == [text, text]


@pytest.mark.parametrize("missing", ["", "-1"])
def test_numbers_of_a_column_that_lacks_some(missing: str, tmp_path: Path) -> None:
    """pandas writes 2 as 2.0 then; as names, 10 would come before 2."""
    rows = [("2.0", 2), (missing, -1), ("10.0", 10), ("0", 0)]
    (tmp_path / "x.csv").write_text(
        "path,label\n" + "".join(f"{index}.png,{text}\n" for index, (text, _) in enumerate(rows))
    )
    (tmp_path / "0.png").touch()
    source = build("table", path=str(tmp_path / "x.csv"))
    assert source.labels.tolist() == [number for _, number in rows]
    assert source.class_names() is None


def test_parquet(tmp_path: Path, pixels: list[np.ndarray]) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (tmp_path / "lists").mkdir()
    table = pa.table({"n": range(4), "image": NAMES, "species": ["owl", "cat", None, "owl"]})
    parquet.write_table(table, tmp_path / "lists" / "x.parquet", row_group_size=3)
    args = {"path": str(tmp_path / "lists" / "x.parquet"), "root": str(tmp_path)}
    check(build("table", **args, label_column="species"), pixels, [1, 0, -1, 1])
    check(build("table", **args), pixels, None)
    categories = table.set_column(1, "image", table["image"].dictionary_encode())
    parquet.write_table(categories, tmp_path / "lists" / "y.parquet")
    args_of_y = {**args, "path": str(tmp_path / "lists" / "y.parquet")}
    check(build("table", **args_of_y), pixels, None)
    with pytest.raises(UserError, match=r"data\.label_column: .* 'specie'; did you mean 'species'"):
        build("table", **args, label_column="specie")
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=r"bad\.parquet is not a parquet file"):
        build("table", path=str(tmp_path / "bad.parquet"))


def test_a_large_table_is_read_once(
    tmp_path: Path, pixels: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selftask.data.reading.index.MIN_INDEXED", 2)
    file = tmp_path / "x.csv"
    file.write_text("path,label\na/0.png,1\na/1.png,0\n")
    os.utime(file, (1, 1))
    check(build("table", path=str(file)), pixels[:2], [1, 0])
    with monkeypatch.context() as patch:
        patch.setattr("selftask.data.sources.tables._read", None)
        check(build("table", path=str(file)), pixels[:2], [1, 0])
        others = [("label_column", None), ("column", "label"), ("delimiter", ";")]
        for key, value in [*others, ("root", str(tmp_path / "a"))]:  # other questions
            with pytest.raises(TypeError):
                build("table", path=str(file), **{key: value})
    file.write_text("path,label\na/1.png,0\na/0.png,1\n")
    os.utime(file, (2, 2))
    check(build("table", path=str(file)), [pixels[1], pixels[0]], [0, 1])


def test_parquet_with_images_inside_is_told(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    cell = {"bytes": b"x", "path": "0.png"}
    parquet.write_table(pa.table({"image": [cell]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"holds struct<.*; paths are expected"):
        build("table", path=str(tmp_path / "x.parquet"))


def test_table_errors_name_the_place(tmp_path: Path, pixels: list[np.ndarray]) -> None:
    def fails(text: str, match: str, **args: Any) -> None:
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(UserError, match=match):
            build("table", path=str(tmp_path / "x.csv"), **args)

    fails("path,label\na/0.png,1\n", "no column 'pth'; did you mean 'path'", column="pth")
    fails("one,two\na/0.png,1\n", r"data\.column: which column .* one of one, two")
    fails("path,label\n\na/9.png,1\n", r"x\.csv:3: no such image: .*a/9\.png; data\.root")
    fails("path,label\na/0.png,1\n,2\n", r"x\.csv:3: no path")
    fails("path,label\na/0.png,1\na/1.png\n", r"x\.csv:3: 1 columns, expected 2")
    fails("path,label\n", "has no rows")
    fails("path,label\na/0.png,1\n", r"data\.root: no such folder", root="no/such")
    with pytest.raises(UserError, match=r"no such table: .*y\.csv; did you mean '.*x\.csv'"):
        build("table", path=str(tmp_path / "y.csv"))


def test_unreadable_image_of_a_table_is_named(tmp_path: Path, pixels: list[np.ndarray]) -> None:
    (tmp_path / "a" / "1.png").write_bytes(b"nothing")
    (tmp_path / "x.csv").write_text("path\na/0.png\na/1.png\n")
    with pytest.raises(BadImage, match=r"a/1\.png: not an image"):
        build("table", path=str(tmp_path / "x.csv"))[1]


def test_glob_is_sorted_and_labeled(tmp_path: Path, pixels: list[np.ndarray]) -> None:
    (tmp_path / "b" / "notes.txt").write_text("no image")
    (tmp_path / "b" / "0.png").mkdir()
    order = [0, 1, 3, 2]  # b/3.png before b/x/2.png
    everything = [pixels[i] for i in order]
    check(build("glob", pattern=f"{tmp_path}/**/*.png"), everything, [0, 0, 1, 1])
    check(build("glob", pattern=f"{tmp_path}/**"), everything, [0, 0, 1, 1])
    check(build("glob", pattern=f"{tmp_path}/**", labels=False), everything, None)
    check(build("glob", pattern=f"{tmp_path}/b/*.png"), [pixels[3]], None)
    check(build("glob", pattern=f"{tmp_path}/a/{{0..1}}.png"), pixels[:2], None)
    source = build("glob", pattern=f"{tmp_path}/{{a,b}}/?.png")
    assert [Path(source.path(i)).name for i in range(3)] == ["0.png", "1.png", "3.png"]


def test_classes_of_data_val_have_the_numbers_of_data(
    tmp_path: Path, pixels: list[np.ndarray]
) -> None:
    """By their names, in whatever form the two sets are: val lacks the first class of data."""
    for folder, classes in {"train": "abc", "val": "bc"}.items():
        for name in classes:
            (tmp_path / folder / name).mkdir(parents=True)
            Image.fromarray(pixels[0]).save(tmp_path / folder / name / "0.png")
    (tmp_path / "val.csv").write_text("path,label\nval/c/0.png,c\nval/b/0.png,b\nval/b/0.png,\n")
    (tmp_path / "val.txt").write_text("val/c/0.png\tc\nval/b/0.png\tb\n")
    (tmp_path / "numbers.txt").write_text("val/c/0.png\t1\nval/b/0.png\t0\n")
    np.savez(tmp_path / "val.npz", images=np.zeros((2, 4, 4), np.uint8), labels=["c", "a"])

    def labels_of(val: str, *more: str) -> list[int]:
        words = [f"data={tmp_path}/train", f'data.val="{tmp_path}/{val}"', *more]
        opened = open_data(load_config("simclr/images", words).data).val
        assert opened is not None
        labels = opened.labels.tolist()
        assert [opened[index][1] for index in range(len(opened))] == labels
        return labels

    assert labels_of("val") == labels_of("val/*/*.png") == [1, 2]
    assert labels_of("val.csv") == [2, 1, -1]
    assert labels_of("val.txt") == [2, 1]
    assert labels_of("val.npz") == [2, 0]
    assert labels_of("val", "data.val.subset={part: 1, of: 2, per_class: true}") == [1, 2]
    assert labels_of("numbers.txt") == [1, 0], "numbers are what they are"
    other = load_config("simclr/images", [f"data={tmp_path}/val", f"data.val={tmp_path}/train"])
    with pytest.raises(UserError, match=r"data\.val: its class 'a' is none of the 2 of data"):
        open_data(other.data)


@pytest.mark.parametrize("val", ["val", "val.csv", "val/*/*.png"])
def test_classes_of_data_val_have_the_names_of_data(
    val: str, tmp_path: Path, pixels: list[np.ndarray]
) -> None:
    """Also those without an image in ``data.val``, and in a subset of it."""
    for folder, classes in {"train": "abc", "val": "ac"}.items():
        for name in classes:
            (tmp_path / folder / name).mkdir(parents=True)
            Image.fromarray(pixels[0]).save(tmp_path / folder / name / "0.png")
    (tmp_path / "val.csv").write_text("path,label\nval/c/0.png,c\nval/a/0.png,a\n")
    words = [f"data={tmp_path}/train", f'data.val="{tmp_path}/{val}"']
    for more in ([], ["data.val.subset={part: 1, of: 2, per_class: true}"]):
        opened = open_data(load_config("simclr/images", [*words, *more]).data).val
        assert opened is not None
        assert opened.class_names() == ["a", "b", "c"]


def test_glob_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no image matches"):
        build("glob", pattern=f"{tmp_path}/*.png")
    with pytest.raises(UserError, match=r"there is no folder .*/gone"):
        build("glob", pattern=f"{tmp_path}/gone/*.png")


def test_braces_are_those_of_the_shell(tmp_path: Path) -> None:
    import subprocess

    for text in ("{000..010}.tar", "a{b,c}{1..3}", "x{8..11}y", "plain{}{z}"):
        shell = subprocess.run(
            ["bash", "-c", f"echo {text}"], capture_output=True, text=True, check=True
        )
        assert list(expand_braces(text)) == shell.stdout.split()
    with pytest.raises(UserError, match="is not a range"):
        list(expand_braces("{10..1}"))
    assert match_files(f"{tmp_path}/s{{08..10}}.tar") == [
        f"{tmp_path}/s{number}.tar" for number in ("08", "09", "10")
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x/list.csv", {"name": "table", "path": "x/list.csv"}),
        ("list.TSV", {"name": "table", "path": "list.TSV"}),
        ("list.parquet", {"name": "table", "path": "list.parquet"}),
        ("/x/**/*.jpg", {"name": "glob", "pattern": "/x/**/*.jpg"}),
        ("/x/{train,val}/*", {"name": "glob", "pattern": "/x/{train,val}/*"}),
        ("x/{00..10}.tar", {"name": "webdataset", "path": "x/{00..10}.tar"}),
        ("s3://b/x-*.tar", {"name": "webdataset", "path": "s3://b/x-*.tar"}),
    ],
)
def test_short_forms_of_lists(text: str, expected: dict[str, str]) -> None:
    assert expand_source(text) == expected


def test_folder_with_brackets_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos [2024]").mkdir()
    monkeypatch.chdir(tmp_path)
    assert expand_source("photos [2024]") == {"name": "folder", "path": "photos [2024]"}


@pytest.mark.parametrize("name", ["folder", "table"])
def test_class_names_of_a_validation_set_that_lacks_a_class(tmp_path: Path, name: str) -> None:
    """Zero-shot takes the names of its test images by number."""
    sources = []
    for split, classes in (("train", "abc"), ("val", "bc")):
        for label in classes:
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / split / label / "0.png")
        rows = "".join(f"{label}/0.png,{label}\n" for label in classes)
        (tmp_path / split / "x.csv").write_text(f"path,label\n{rows}")
        path = tmp_path / split / ("" if name == "folder" else "x.csv")
        sources.append(subset_of(build(name, path=str(path)), 1.0))
    train, val = sources
    align_classes(val, train, "data.val")
    assert val.class_names() == train.class_names() == ["a", "b", "c"]
    assert val.labels.tolist() == [val[i][1] for i in range(2)] == [1, 2]


def test_numbers_beside_class_names_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers of ImageNet's own list of validation labels are not those of sorted names."""
    for label in "ab":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{label}.png")
    labels = {"names": "ab", "numbers": "10", "none": ("", "")}
    for name, column in labels.items():
        rows = "".join(f"{path}.png,{label}\n" for path, label in zip("ab", column, strict=True))
        (tmp_path / f"{name}.csv").write_text(f"path,label\n{rows}")
    opened = {name: build("table", path=str(tmp_path / f"{name}.csv")) for name in labels}
    align_classes(opened["none"], opened["names"], "data.val")
    assert "classes" not in caplog.text
    align_classes(opened["numbers"], opened["names"], "data.val")
    assert "of data have names, those of data.val are numbers: 0 is taken as 'a'" in caplog.text
    align_classes(opened["names"], opened["numbers"], "data.val")
    assert "of data.val have names, those of data are numbers: 0 is taken as 'a'" in caplog.text
