"""Data at addresses of a plug-in's handler: folders, lists, tables, arrays, shards, copies."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from selftask.config.compose.short_forms import expand_source
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.data.loading.open_data import open_data
from selftask.data.open_source import open_source
from selftask.data.source import Source
from selftask.data.staging.staged_source import copied
from selftask.errors import BadImage, UserError
from selftask.files import addresses

PIXELS = [np.full((4, 5, 3), 40 * n, np.uint8) for n in range(4)]
NAMES = ["b/0.png", "a/1.png", "a/2.PNG", "b/c/3.png"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import mem_store  # noqa: F401 - registers its handler

    folder = tmp_path / "store"
    folder.mkdir()
    monkeypatch.setenv("MEM_STORE", str(folder))
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    for name, pixels in zip(NAMES, PIXELS, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "png")
        put(tmp_path, f"images/{name}", buffer.getvalue())
    put(tmp_path, "images/.hidden/x.png", b"")
    put(tmp_path, "images/notes.txt", b"")
    return folder


def put(folder: Path, name: str, content: bytes) -> None:
    (folder / "file").write_bytes(content)
    addresses.upload(folder / "file", f"mem://bucket/{name}")


def build(text: str) -> Source:
    section = expand_source(text)
    return open_source(Component(name=section.pop("name"), args=section))


def check(source: Source, order: list[int], labels: list[int]) -> None:
    assert len(source) == len(order)
    for index, number in enumerate(order):
        image, label = source[index]
        np.testing.assert_array_equal(image, PIXELS[number])
        assert label == labels[index]


def test_a_folder(store: Path, tmp_path: Path) -> None:
    source = build("mem://bucket/images")
    check(source, [1, 2, 0, 3], [0, 0, 1, 1])
    assert source.class_names() == ["a", "b"]
    assert source.path(0) == "mem://bucket/images/a/1.png"
    assert source.describe() == "4 images, 3 folders, headers not checked"
    check(copied(source, str(tmp_path / "fast")), [1, 2, 0, 3], [0, 0, 1, 1])
    put(tmp_path, "images/a/1.png", b"damaged")
    with pytest.raises(BadImage, match=r"^mem://bucket/images/a/1\.png: not an image"):
        build("mem://bucket/images")[0]
    with pytest.raises(UserError, match=r"no images .* under mem://bucket/nothing"):
        build("mem://bucket/nothing")


@pytest.mark.parametrize("root", ["", "mem://bucket/images/"])
def test_a_list_and_a_table(store: Path, tmp_path: Path, root: str) -> None:
    put(tmp_path, "images/x.txt", f"{root}b/0.png\tcat\n{root}a/1.png\tdog\n".encode())
    check(build("mem://bucket/images/x.txt"), [0, 1], [0, 1])
    put(tmp_path, "images/x.csv", f"path,label\n{root}b/c/3.png,cat\n".encode())
    check(build("mem://bucket/images/x.csv"), [3], [0])
    put(tmp_path, "images/y.txt", b"gone.png\n")
    with pytest.raises(UserError, match=r"no such image: mem://bucket/images/gone\.png"):
        build("mem://bucket/images/y.txt")


def test_a_local_list_of_addresses(store: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("mem://bucket/images/b/0.png\nmem://bucket/images/a/1.png\n")
    check(build(str(tmp_path / "x.txt")), [0, 1], [-1, -1])


def test_a_local_table_of_addresses(store: Path, tmp_path: Path) -> None:
    address = "mem://bucket/images/b/0.png"
    (tmp_path / "x.csv").write_text(f"path,next\n{address},{address}\n")
    args = {"path": str(tmp_path / "x.csv"), "images": {"next": "next"}}
    source = open_source(Component(name="table", args=args))
    assert source.extra_path(0, "next") == address
    assert np.array_equal(source.extra(0, "next"), PIXELS[0])


def test_an_array(store: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, images=np.stack(PIXELS), labels=np.arange(4))
    put(tmp_path, "x.npz", buffer.getvalue())
    check(build("mem://bucket/x.npz"), [0, 1, 2, 3], [0, 1, 2, 3])


def test_patterns(store: Path) -> None:
    def names(pattern: str) -> list[str]:
        files = addresses.find(f"mem://bucket/images/{pattern}", pattern=True)
        return [address.removeprefix("mem://bucket/images/") for address, _, _ in files]

    assert names("*/[0-9].png") == ["a/1.png", "b/0.png"]
    assert names("**/[03].png") == ["b/0.png", "b/c/3.png"]
    assert names("**/[!03x].*") == [
        "a/1.png",
        "a/2.PNG",
    ]
    assert names("no?es.txt") == ["notes.txt"]


@pytest.mark.parametrize("key", ["data", "data.val", "data.val_sets.far"])
def test_an_address_that_nothing_reads_names_its_key(key: str) -> None:
    given = {"data": "digits", key: "nosuhc://x/y.csv"}
    data = load_config("simclr/digits", [f"{name}={text}" for name, text in given.items()]).data
    with pytest.raises(UserError, match=rf"^{key}: nosuhc://x/y\.csv: .*; known: .*https?"):
        open_data(data)


def test_an_address_of_a_misspelled_scheme() -> None:
    with pytest.raises(UserError, match=r"^htps://x/y: .*; did you mean 'https'\?$"):
        addresses.exists("htps://x/y")
