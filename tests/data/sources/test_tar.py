"""Tar shards give what was written to them, at any position and in every process."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.data.reading import storage
from selftask.data.reading.tar_walk import Damaged, Member, walk
from selftask.data.source import Source
from selftask.errors import BadImage, UserError
from selftask.registry import SOURCES

RNG = np.random.default_rng(0)
PIXELS = [RNG.integers(0, 256, (4 + i, 6, 3), dtype=np.uint8) for i in range(7)]


def build(**args: Any) -> Source:
    cls = SOURCES["webdataset"]
    source: Source = cls(cls.Config(**args))
    return source


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(numbers: range) -> list[tuple[str, bytes]]:
    members = []
    for i in numbers:
        note = json.dumps({"label": "cat" if i % 2 else "ape", "meta": {"id": i}})
        members += [(f"s/{i:04}.cls", str(i % 3).encode()), (f"s/{i:04}.png", png(PIXELS[i]))]
        members += [(f"s/{i:04}.json", note.encode())]
    return members


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Seven images in three shards, as a pattern."""
    for number, numbers in enumerate([range(3), range(3, 4), range(4, 7)]):
        write_tar(tmp_path / f"train-{number:03}.tar", samples(numbers))
    return f"{tmp_path}/train-{{000..002}}.tar"


def check(source: Source, labels: list[int]) -> None:
    assert len(source) == len(PIXELS)
    assert source.labels.tolist() == labels
    for index in (6, 0, 3, 2, 5, 1, 4):
        image, label = source[index]
        assert np.array_equal(image, PIXELS[index])
        assert label == labels[index]


def test_pixels_labels_and_names(shards: str, tmp_path: Path) -> None:
    source = build(path=shards)
    check(source, [0, 1, 2, 0, 1, 2, 0])
    assert source.path(3) == f"{tmp_path}/train-001.tar:s/0003.png"
    assert source.describe() == "7 images in 3 tar files, 3 classes"
    named = build(path=f"{tmp_path}/train-*.tar", labels="json.label")
    check(named, [0, 1, 0, 1, 0, 1, 0])
    assert named.class_names() == ["ape", "cat"]
    check(build(path=shards, labels="json[meta.id]", images="png"), list(range(7)))
    assert build(path=shards, labels=None).labels is None
    with pytest.raises(IndexError):
        source[7]


def test_folder_of_shards_and_hidden_files(tmp_path: Path) -> None:
    members = samples(range(7))
    for at in (21, 14, 8, 2, 1):  # as macOS puts them beside what they speak of
        members.insert(at, (f"s/._{at}.png", b"resources"))
    write_tar(tmp_path / "shards" / "x.tar", members)
    check(build(path=str(tmp_path / "shards")), [0, 1, 2, 0, 1, 2, 0])


def test_a_distant_store_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/flaky/x", b"0123456789")
    asked: list[int] = []

    class Flaky(type(memory)):  # type: ignore[misc]
        def cat_file(self, path: str, **part: Any) -> bytes:
            asked.append(1)
            if len(asked) < 3:
                raise OSError("503: slow down")
            return super().cat_file(path, **part)

    monkeypatch.setattr("selftask.data.reading.files.FIRST_PAUSE_S", 0.001)
    where = "selftask.files.fsspec_handler.store_of"
    monkeypatch.setattr(where, lambda path: (Flaky(), "/flaky/x"))
    assert storage.read_part("memory://flaky/x", 2, 3, "x") == b"234"
    assert len(asked) == 3
    asked.clear()
    monkeypatch.setattr("selftask.data.reading.files.POLICY.retries", 1)
    with pytest.raises(BadImage, match=r"^x: 503: slow down \(tried 2 times\)"):
        storage.read_part("memory://flaky/x", 2, 3, "x")
    memory.rm("/flaky", recursive=True)
    asked[:] = [1, 1]
    with pytest.raises(BadImage, match=r"^x: .*flaky/x"):  # gone: not asked again
        storage.read_part("memory://flaky/x", 2, 3, "x")
    assert len(asked) == 3


def test_a_stale_handle_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stale = str(tmp_path / "x"), []
    (tmp_path / "x").write_bytes(b"0123456789")
    assert storage.read_part(path, 0, 2, "x") == b"01"
    stale.append(storage._OPEN[path])
    read = os.pread

    def pread(handle: int, size: int, offset: int) -> bytes:
        if storage._OPEN[path] is stale[0]:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(handle, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr("selftask.data.reading.files.FIRST_PAUSE_S", 0.0)
    assert storage.read_part(path, 2, 3, "x") == b"234"


def test_list_of_shards_keeps_its_order(shards: str, tmp_path: Path) -> None:
    source = build(path=[f"{tmp_path}/train-002.tar", f"{tmp_path}/train-000.tar"])
    assert [source[i][1] for i in range(6)] == [1, 2, 0, 0, 1, 2]


def test_written_by_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(tmp_path / "x.tar")) as writer:
        for i, pixels in enumerate(PIXELS):
            writer.write({"__key__": f"{i:06}", "png": pixels, "cls": i, "note.txt": "x"})
    check(build(path=str(tmp_path / "x.tar")), list(range(7)))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_walk_finds_what_tarfile_finds(tmp_path: Path, form: int) -> None:
    path = tmp_path / "x.tar"
    long = "folder/" * 20 + "n.png"
    names = ["a.png", "d/b.jpg", long, *([] if form == tarfile.USTAR_FORMAT else ["ü" * 120])]
    with tarfile.open(path, "w", format=form) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = number * 511
            info.mtime = 1.25 if form == tarfile.PAX_FORMAT else 1  # pax: a header of its own
            tar.addfile(info, io.BytesIO(b"x" * info.size))
            link = tarfile.TarInfo(f"link{number}")
            link.type, link.linkname = tarfile.SYMTYPE, "a.png"
            tar.addfile(link)
        tar.addfile(_folder("d"))
    with tarfile.open(path) as tar:
        expected = [Member(m.name, m.offset_data, m.size) for m in tar if m.isfile()]
    with open(path, "rb") as file:
        assert list(walk(file, str(path))) == expected


def _folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE
    return info


def test_index_is_made_once_and_again_when_a_shard_changes(
    shards: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(path=shards)
    (made,) = (cache / "index").glob("*.tar")
    before = made.read_bytes()
    monkeypatch.setattr("selftask.data.reading.tar_index._build", None)
    check(build(path=shards), [0, 1, 2, 0, 1, 2, 0])  # without building
    monkeypatch.undo()
    monkeypatch.setenv("SELFTASK_CACHE", str(cache))
    write_tar(tmp_path / "train-001.tar", [*samples(range(3, 4)), ("z.png", png(PIXELS[0]))])
    assert len(build(path=shards)) == 8
    assert [*(cache / "index").glob("*.tar")] == [made]  # replaced
    assert made.read_bytes() != before


def _read_all(source: Source, queue: Any) -> None:
    queue.put([source[i] for i in range(len(source))])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(shards: str, method: str) -> None:
    source = build(path=shards)
    source[0]  # opens a handle, which a forked worker must not use
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=_read_all, args=(source, queue))
    worker.start()
    read = queue.get(timeout=60)
    worker.join()
    assert all(np.array_equal(image, PIXELS[i]) for i, (image, _) in enumerate(read))
    assert [label for _, label in read] == source.labels.tolist()


def test_behind_fsspec(shards: str, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob("*.tar"):
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    try:
        check(build(path="memory://bucket/train-{000..002}.tar"), [0, 1, 2, 0, 1, 2, 0])
        source = build(path="memory://bucket/*.tar")
        check(source, [0, 1, 2, 0, 1, 2, 0])
        assert source.path(0) == "memory:///bucket/train-000.tar:s/0000.png"
        with pytest.raises(UserError, match=r"data\.path: no file matches memory://bucket/x\*"):
            build(path="memory://bucket/x*")
        with pytest.raises(UserError, match=r"memory://bucket/y\.tar cannot be read"):
            build(path="memory://bucket/y.tar")
    finally:
        memory.rm("/bucket", recursive=True)
    with pytest.raises(BadImage, match=r"train-000\.tar:s/0000\.png"):
        source[0]


def test_damage_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("0.png", png(PIXELS[0])), ("1.png", b"no image")])
    whole = path.read_bytes()
    with pytest.raises(BadImage, match=r"x\.tar:1\.png: not an image"):
        build(path=str(path))[1]
    path.write_bytes(whole[: 512 + 40])  # within the first image
    cut = build(path=str(path))
    with pytest.raises(BadImage, match=r"x\.tar:0\.png: cut off: 40 of \d+ bytes are there"):
        cut[0]
    path.write_bytes(whole[:1024] + b"\x01" * 512)  # something else where the next header was
    torn = build(path=str(path))
    assert np.array_equal(torn[0][0], PIXELS[0])
    assert torn.describe().endswith(
        f"1 tar files cannot be read to their end, the first {path} from byte 1024 on"
    )
    with pytest.raises(Damaged):
        list(walk(io.BytesIO(b"\x01" * 512), "x"))


def test_members_that_are_passed_over_are_counted(tmp_path: Path) -> None:
    heic = [(f"{number}.HEIC", b"") for number in range(3)]
    for number in range(2):
        write_tar(tmp_path / f"{number}.tar", [("a.png", png(PIXELS[0])), *heic, ("9.dng", b"")])
    for _ in range(2):  # the second one finds the index
        source = build(path=f"{tmp_path}/*.tar")
        assert source.passed_over() == {".heic": 6, ".dng": 2}
        assert (
            "2 images in 2 tar files, no labels; 6 .heic, 2 .dng passed over" in source.describe()
        )


def test_missing_empty_and_compressed_shards_are_refused(
    shards: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        UserError, match=r"no such file: .*train-003\.tar; did you mean '.*train-00"
    ):
        build(path=f"{tmp_path}/train-{{000..003}}.tar")
    with pytest.raises(UserError, match=r"no file matches .*/val-\*\.tar; in "):
        build(path=f"{tmp_path}/val-*.tar")
    with pytest.raises(
        UserError, match=r"data\.labels: .*'json\.labl'; did you mean 'json\.label'"
    ):
        build(path=shards, labels="json.labl")
    with pytest.raises(UserError, match="which field"):
        build(path=shards, labels="json")
    write_tar(tmp_path / "x.tar", [("0.txt", b"x"), ("0.json", b"{}")])
    with pytest.raises(UserError, match=r"no images in 1 tar files.*there are \.json, \.txt"):
        build(path=str(tmp_path / "x.tar"))
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz"):
        pass
    with pytest.raises(UserError, match=r"x\.tar\.gz is compressed"):
        build(path=str(tmp_path / "x.tar.gz"))
    with pytest.raises(UserError, match="the same file is named twice"):
        build(path=[shards, shards])
    (tmp_path / "file").touch()
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "file"))
    check(build(path=shards), [0, 1, 2, 0, 1, 2, 0])
    assert "SELFTASK_CACHE=DIR names another place" in caplog.text
