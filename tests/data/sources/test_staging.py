"""Copies on a faster disk: the same images and names, made once, and nothing half."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
import tarfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.config.schema import Component
from selftask.data.loading.open_data import Sources, copy_data
from selftask.data.open_source import open_source
from selftask.data.relabeled import relabeled
from selftask.data.source import Source
from selftask.data.staging import copies
from selftask.data.staging.staged_source import copied
from selftask.errors import BadImage, UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)


def build(name: str, **args: Any) -> Source:
    return open_source(Component(name=name, args=args))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """``slow/a/0.png`` to ``slow/b/5.png``."""
    for i, pixels in enumerate(PIXELS):
        path = tmp_path / "slow" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "slow"


def contents(source: Source) -> list[tuple[bytes, int, str]]:
    return [(*_plain(source[i]), source.path(i)) for i in range(len(source))]


def _plain(item: tuple[np.ndarray, int]) -> tuple[bytes, int]:
    return item[0].tobytes(), item[1]


def test_files_are_copied_with_their_times_and_checksums(tree: Path, tmp_path: Path) -> None:
    source = build("folder", path=str(tree))
    before = contents(source)
    fast = copied(source, str(tmp_path / "fast"))
    copy = tmp_path / "fast" / str(tree)[1:] / "b" / "3.png"
    original = tree / "b" / "3.png"
    assert copy.read_bytes() == original.read_bytes()
    assert abs(copy.stat().st_mtime - original.stat().st_mtime) < 1e-3
    lines = (tmp_path / "fast" / ".checksums").read_text().splitlines()
    data = original.read_bytes()
    assert f"{zlib.crc32(data):08x} {len(data)} {original}" in lines
    assert len(lines) == 6
    shutil.rmtree(tree)  # from here on only the copies can be read
    assert contents(fast) == contents(pickle.loads(pickle.dumps(fast))) == before
    assert (fast.num_classes, fast.labels.tolist()) == (2, [0, 0, 0, 1, 1, 1])


def test_the_second_time_only_what_changed(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "fast")
    copied(build("folder", path=str(tree)), folder)
    assert "data: copying 6 files" in capsys.readouterr().err
    Image.fromarray(PIXELS[0]).save(tree / "b" / "3.png")
    os.utime(tree / "b" / "3.png", (1, 1))
    resized, times = tree / "a" / "0.png", (tree / "a" / "0.png").stat()
    Image.fromarray(np.tile(PIXELS[1], (2, 2, 1))).save(resized)
    os.utime(resized, ns=(times.st_atime_ns, times.st_mtime_ns))  # of another size
    source = copied(build("folder", path=str(tree)), folder)
    said = capsys.readouterr().err
    assert "copying 2 files" in said
    assert "4 files were in" in said
    assert np.array_equal(source[4][0], PIXELS[0])
    assert np.array_equal(source[0][0], np.tile(PIXELS[1], (2, 2, 1)))
    assert not list(Path(folder).rglob(".*.png.*"))  # nothing half is left


def test_of_a_subset_only_its_files(tree: Path, tmp_path: Path) -> None:
    source = build("folder", path=str(tree), subset={"count": 1, "per_class": True})
    fast = copied(source, str(tmp_path / "fast"))
    assert len(list((tmp_path / "fast").rglob("*.png"))) == len(fast) == 2
    assert contents(fast) == contents(source)


def test_other_labels_of_copies(tree: Path, tmp_path: Path) -> None:
    source = relabeled(build("folder", path=str(tree), subset={"count": 3}), "index")
    fast = copied(source, str(tmp_path / "fast"))
    images = contents(fast)
    shutil.rmtree(tree)
    assert contents(fast) == images
    assert [fast[index][1] for index in range(3)] == [0, 1, 2]


def test_unreadable_files_keep_their_names(tree: Path, tmp_path: Path) -> None:
    (tree / "a" / "0.png").write_bytes(b"nothing")
    (tree / "a" / "2.png").unlink()
    os.mkfifo(tree / "a" / "2.png")
    fast = copied(build("folder", path=str(tree), labels=False), str(tmp_path / "fast"))
    for index, reason in ((0, "not an image"), (1, "a named pipe")):
        with pytest.raises(BadImage, match=rf"^{tree}/a/{2 * index}\.png: {reason}"):
            fast[index]
    assert np.array_equal(fast[2][0], PIXELS[4])
    next((tmp_path / "fast").rglob("4.png")).unlink()  # someone tidied up
    assert np.array_equal(fast[2][0], PIXELS[4])


def test_containers(tree: Path, tmp_path: Path) -> None:
    """Read after the originals are gone: an array, a tar, HDF5, LMDB, a saved data set."""
    slow, sources = tmp_path / "files", {}
    slow.mkdir()
    np.save(slow / "x.npy", PIXELS)
    sources["array"] = build("array", path=str(slow / "x.npy"))
    with tarfile.open(slow / "x.tar", "w") as tar:
        for path in sorted(tree.rglob("*.png")):
            tar.add(path, path.name)
    sources["webdataset"] = build("webdataset", path=str(slow / "x.tar"))
    h5py, lmdb = pytest.importorskip("h5py"), pytest.importorskip("lmdb")
    with h5py.File(slow / "x.h5", "w") as file:
        file["images"] = PIXELS
    sources["hdf5"] = build("hdf5", path=str(slow / "x.h5"), subset=3)
    with lmdb.open(str(slow / "x_lmdb"), map_size=1 << 20) as made, made.begin(write=True) as put:
        for i, pixels in enumerate(PIXELS):
            buffer = io.BytesIO()
            np.save(buffer, pixels)
            put.put(f"{i}".encode(), buffer.getvalue())
    sources["lmdb"] = build("lmdb", path=str(slow / "x_lmdb"))
    before = {name: contents(source) for name, source in sources.items()}
    for name, source in sources.items():
        sources[name] = copied(source, str(tmp_path / "fast"))
    shutil.rmtree(slow)
    for name, source in sources.items():
        assert contents(source) == contents(pickle.loads(pickle.dumps(source))) == before[name]


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Array3D((5, 7, 3), "uint8")})
    made = datasets.Dataset.from_dict({"image": list(PIXELS)}, features=features)
    made.save_to_disk(tmp_path / "hf")
    source = build("huggingface", path=str(tmp_path / "hf"))
    before = contents(source)
    fast = copied(source, str(tmp_path / "fast"))
    shutil.rmtree(tmp_path / "hf")
    assert contents(fast) == before


def test_from_a_distant_store(tree: Path, tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tree / "a" / "0.png", "0.png")
    memory.pipe("/bucket/x.tar", (tmp_path / "x.tar").read_bytes())
    try:
        source = copied(build("webdataset", path="memory://bucket/x.tar"), str(tmp_path / "fast"))
        again = build("webdataset", path="memory://bucket/x.tar")
        assert not copies._is_copied(copies.FileStat("memory:///bucket/x.tar", 1, ""), tmp_path)
        copied(again, str(tmp_path / "fast"))
    finally:
        memory.rm("/bucket", recursive=True)
    assert np.array_equal(source[0][0], PIXELS[0])
    assert len((tmp_path / "fast" / ".checksums").read_text().splitlines()) == 1  # not twice


def _copy(tree: str, folder: str, queue: Any, all_are_there: Any) -> None:
    copy_one = copies._copy_one

    def slowly(file: Any, folder: Path) -> Any:
        time.sleep(0.2)  # the others look for copies meanwhile
        return copy_one(file, folder)

    copies._copy_one = slowly
    source = build("folder", path=tree)
    all_are_there.wait(60)
    queue.put(contents(copied(source, folder)))


def test_many_processes_copy_once(tree: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    args = (str(tree), str(tmp_path / "fast"), queue, context.Barrier(3))
    processes = [context.Process(target=_copy, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    read = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert read == [contents(build("folder", path=str(tree)))] * 3
    assert len((tmp_path / "fast" / ".checksums").read_text().splitlines()) == 6


def test_impossible_copies_are_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build("folder", path=str(tree))
    usage = shutil.disk_usage(tmp_path)._replace(free=4 * 4096)
    with monkeypatch.context() as patch:
        patch.setattr(copies.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(
            UserError, match=r"has 16\.4 kB free, and the data needs [\d.]+ kB more"
        ):
            copied(source, str(tmp_path / "fast"))
        assert not list((tmp_path / "fast").rglob("*.png"))
    with pytest.raises(UserError, match="Digits source cannot be copied"):
        copied(build("digits"), str(tmp_path / "fast"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        copied(source, str(tmp_path / "file" / "x"))
    with monkeypatch.context() as patch:
        patch.setattr(copies, "RAM", tmp_path / "no_shm")
        with pytest.raises(UserError, match=r"data\.stage_to=ram: this machine has no .*no_shm"):
            copied(source, "ram")


def test_ram_is_this_users_folder(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(copies, "RAM", tmp_path / "shm")
    sources = copy_data(Sources(build("folder", path=str(tree)), None), "ram")
    assert len(list((tmp_path / "shm" / f"selftask-{os.getuid()}").rglob("*.png"))) == 6
    assert sources.val is None
    assert copy_data(sources, None) is sources


def test_an_interrupted_copy_leaves_nothing(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def torn(path: str) -> io.BytesIO:
        return io.BytesIO(b"half")

    source = build("folder", path=str(tree))
    with monkeypatch.context() as patch:
        patch.setattr(copies, "open_file", torn)
        with pytest.raises(UserError, match=r"cannot be copied to .*: 4 bytes were read instead"):
            copied(source, str(tmp_path / "fast"))
    assert not [p for p in (tmp_path / "fast").rglob("*") if p.is_file() and p.parent.name in "ab"]
    assert contents(copied(source, str(tmp_path / "fast"))) == contents(source)
