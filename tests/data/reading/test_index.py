"""Lists of paths are found as they are: mapped, incrementally, whatever happens to the cache."""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from indexed import LONG_AGO, paths_of

from selftask.data.reading import index as store
from selftask.data.reading import scan
from selftask.data.reading.index import Index, load, save
from selftask.data.reading.path_list import read_list
from selftask.data.reading.scan import scan_folder
from selftask.errors import UserError

ENDINGS = (".png", ".jpg")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index is made of five paths already, in a cache of the test's own."""
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "MIN_INDEXED", 5)
    return tmp_path / "cache" / "index"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for name in ["b/2.png", "b/1.png", "a/x/3.JPG", "a/0.png", "a-b/4.png", "5.png", "c/.h.png"]:
        touch(folder / name)
    touch(folder / ".hidden" / "6.png")
    touch(folder / "a" / "notes.txt")
    finalize(folder)
    return folder


@pytest.fixture
def looked_into(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose names were read, except that of the index."""
    results: list[str] = []
    scandir = os.scandir

    def noting(path: Any) -> Any:
        if not os.fsdecode(path).startswith(os.environ["SELFTASK_CACHE"]):
            results.append(os.fsdecode(path))
        return scandir(path)

    monkeypatch.setattr(scan.os, "scandir", noting)
    return results


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def finalize(folder: Path) -> None:
    """Make all folders old, so that their times of change are believed."""
    for inner, _, _ in os.walk(folder):
        os.utime(inner, (LONG_AGO, LONG_AGO))


def paths_below(root: Path) -> list[str]:
    """The same by another way: no links, folders by path, then names."""
    results = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        relative = os.path.relpath(folder, root)
        start = "" if relative == "." else relative
        for name in names:
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                results.append((os.fsencode(start), os.fsencode(name)))
    return [os.fsdecode(os.path.join(*pair)) for pair in sorted(results)]


# -- folders ---------------------------------------------------------------------------------------


def test_folder_is_listed_in_a_fixed_order(root: Path) -> None:
    index = scan_folder(str(root), ENDINGS)
    names = ["5.png", "a/0.png", "a-b/4.png", "a/x/3.JPG", "b/1.png", "b/2.png"]
    assert paths_of(index) == names == paths_below(root)
    assert index.labels is not None
    assert index.labels.tolist() == [-1, 0, 1, 0, 2, 2]
    assert index.header["num_folders"] == 5


def test_random_trees_by_another_way(tmp_path: Path) -> None:
    """Changed at random again and again, with an index from before: always what is there."""
    rng = random.Random(0)
    root = tmp_path / "tree"
    root.mkdir()
    folders = [root]
    for _ in range(12):
        for _ in range(8):
            parent = rng.choice(folders)
            name = rng.choice("abcé-.~Z") + str(rng.randrange(30))
            if rng.random() < 0.3:
                (parent / name).mkdir(exist_ok=True)
                folders.append(parent / name)
            else:
                touch(parent / f"{name}.png")
        files = [path for path in root.rglob("*.png") if path.is_file()]
        for path in rng.sample(files, min(3, len(files))):
            path.unlink()
        index = scan_folder(str(root), ENDINGS)
        assert paths_of(index) == paths_below(root)
        assert len(paths_below(root)) < 5 or index.file is not None


def test_nothing_is_read_again_that_has_not_changed(root: Path, looked_into: list[str]) -> None:
    first = scan_folder(str(root), ENDINGS)
    assert len(looked_into) == 6
    looked_into.clear()
    again = scan_folder(str(root), ENDINGS)
    assert looked_into == []
    assert again.file is not None
    assert paths_of(again) == paths_of(first)

    touch(root / "a" / "x" / "9.png")
    touch(root / "d" / "e" / "0.png")
    changed = scan_folder(str(root), ENDINGS)
    assert sorted(os.path.relpath(path, root) for path in looked_into) == [".", "a/x", "d", "d/e"]
    assert paths_of(changed) == paths_below(root)
    assert len(first) == 6, "who has mapped the old list keeps it"
    assert first.paths[5] == "b/2.png"


def test_a_change_in_the_tick_of_the_scan_is_seen(root: Path, looked_into: list[str]) -> None:
    """The clock of a file system is coarse: the same time of change may mean another content."""
    touch(root / "b" / "3.png")
    before = os.stat(root / "b")
    scan_folder(str(root), ENDINGS)
    touch(root / "b" / "4.png")
    os.utime(root / "b", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert paths_of(scan_folder(str(root), ENDINGS)) == paths_below(root)


def test_files_that_are_passed_over_are_remembered(root: Path, looked_into: list[str]) -> None:
    for name in ("a/7.heic", "a/x/8.heic", "b/9.zip"):
        touch(root / name)
    finalize(root)
    assert scan_folder(str(root), ENDINGS).passed_over == {".heic": 2, ".zip": 1}
    looked_into.clear()
    assert scan_folder(str(root), ENDINGS).passed_over == {".heic": 2, ".zip": 1}
    assert looked_into == []
    (root / "a/x/8.heic").unlink()
    assert scan_folder(str(root), ENDINGS).passed_over == {".heic": 1, ".zip": 1}


def test_removed_folders_are_gone(root: Path) -> None:
    scan_folder(str(root), ENDINGS)
    for path in sorted((root / "a").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert paths_of(scan_folder(str(root), ENDINGS)) == ["5.png", "a-b/4.png", "b/1.png", "b/2.png"]


def test_small_folders_leave_nothing_behind(root: Path, cache: Path) -> None:
    store.MIN_INDEXED = 7  # the fixture takes it back
    index = scan_folder(str(root), ENDINGS)
    assert index.file is None
    assert paths_of(index) == paths_below(root)
    assert not cache.exists()


def test_other_endings_are_another_list(root: Path) -> None:
    scan_folder(str(root), ENDINGS)
    assert paths_of(scan_folder(str(root), (".txt",))) == ["a/notes.txt"]


def test_links_count_once_and_real_folders_first(root: Path, tmp_path: Path) -> None:
    """The same with and without an index; when the first way is gone, another one counts."""
    touch(tmp_path / "elsewhere" / "sub" / "7.png")
    (root / "a" / "loop").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a" / "self")
    (root / "0b").symlink_to(root / "b")
    (root / "two").symlink_to(tmp_path / "elsewhere")
    (root / "one").symlink_to(tmp_path / "elsewhere")
    finalize(root)
    finalize(tmp_path / "elsewhere")
    expected = sorted([*paths_below(root), "one/sub/7.png"])
    for _ in range(3):
        assert sorted(paths_of(scan_folder(str(root), ENDINGS))) == expected
        touch(root / "c" / "8.png")
        expected = sorted([*paths_below(root), "one/sub/7.png"])
    (root / "one").unlink()
    expected[expected.index("one/sub/7.png")] = "two/sub/7.png"
    assert sorted(paths_of(scan_folder(str(root), ENDINGS))) == sorted(expected)
    touch(tmp_path / "elsewhere" / "sub" / "9.png")
    assert "two/sub/9.png" in paths_of(scan_folder(str(root), ENDINGS))
    (root / "b").rename(tmp_path / "b")
    (root / "0b").unlink()
    (root / "0b").symlink_to(tmp_path / "b")
    assert "0b/1.png" in paths_of(scan_folder(str(root), ENDINGS))


def test_a_folder_behind_a_link_stays_when_the_real_one_goes(root: Path, tmp_path: Path) -> None:
    """What was left out as the second way in must come back, though its parent did not change."""
    (tmp_path / "keep").mkdir()
    (root / "c" / "again").symlink_to(tmp_path / "keep")
    (root / "b2").symlink_to(tmp_path / "keep")
    touch(tmp_path / "keep" / "7.png")
    finalize(root)
    assert "b2/7.png" in paths_of(scan_folder(str(root), ENDINGS))
    (root / "b2").unlink()
    assert "c/again/7.png" in paths_of(scan_folder(str(root), ENDINGS))


def test_a_folder_that_may_not_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def forbidden(path: Any) -> Any:
        if os.fsdecode(path).endswith("/a"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(scan.os, "scandir", forbidden)
    with pytest.raises(UserError, match=r"cannot look into .*images/a: Permission denied"):
        scan_folder(str(root), ENDINGS)


def test_progress_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("selftask.data.reading.progress_log._EVERY_S", -1.0)
    scan_folder(str(root), ENDINGS)
    printed = capsys.readouterr().err.splitlines()  # threads may lose a count
    assert re.fullmatch(rf"data: {root}: \d images in \d folders so far \(0 s\)", printed[-1])
    (root / "list.txt").write_text("a\nb\n")
    read_list(str(root / "list.txt"))
    assert "list.txt: 2 images so far (0 s)" in capsys.readouterr().err


# -- files of the cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "header", "version"])
def test_a_damaged_index_is_made_anew(root: Path, damage: str) -> None:
    file = scan_folder(str(root), ENDINGS).file
    assert file is not None
    content = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "cut": content[: len(content) // 2],
            "other": b"\xff" * len(content),
            "header": content[:-60] + b"\xff" * 20 + content[-40:],
            "version": b"selftask paths 1" + content[16:],
        }[damage]
    )
    assert load(file) is None
    assert paths_of(scan_folder(str(root), ENDINGS)) == paths_below(root)
    assert load(file) is not None


@pytest.mark.parametrize("trouble", ["no folder", "full"])
def test_without_a_place_the_list_stays_in_memory(
    root: Path,
    tmp_path: Path,
    cache: Path,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if trouble == "no folder":
        (tmp_path / "a file").touch()
        monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "a file"))
    else:

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    index = scan_folder(str(root), ENDINGS)
    assert index.file is None
    assert paths_of(index) == paths_below(root)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be kept for the next run" in caplog.text
    assert not list(cache.glob(".*")), "no half-written file stays"


def test_only_one_scans(root: Path) -> None:
    """The other one waits, and takes what was found meanwhile."""
    file = store.index_file("folder", str(root), *ENDINGS)
    results: list[Index] = []
    with store.only_one(file) as alone:
        assert alone
        other = threading.Thread(target=lambda: results.append(scan_folder(str(root), ENDINGS)))
        other.start()
        time.sleep(0.3)
        assert results == [], "it waits"
        ready = save(Index({"num_folders": 1}, scan._assemble(_walked(root)).arrays), file)
    other.join(10)
    assert results[0].header == ready.header  # one folder, unlike the result of a scan


def test_without_locks_everybody_scans(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none."""

    def none(lock: Any) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store, "take_lock", none)
    index = scan_folder(str(root), ENDINGS)
    assert index.file is not None
    assert paths_of(index) == paths_below(root)


def _walked(root: Path) -> list[scan.Folder]:
    endings = tuple(map(os.fsencode, ENDINGS))
    return [folder for level in scan.walk(str(root), endings) for folder in level]


def test_a_million_paths_open_at_once(tmp_path: Path) -> None:
    """Under a millisecond, and in no memory of the process's own."""
    count = 1_000_000
    names = np.frombuffer(b"".join(b"image_%08d.jpg/" % i for i in range(count)), dtype=np.uint8)
    arrays = {
        "names": names,
        "offsets": np.arange(count + 1) * 19,
        "firsts": np.arange(1000) * 1000,
        "folders": np.frombuffer(b"".join(b"n%05d\0" % i for i in range(1000)), dtype=np.uint8),
        "folder_offsets": np.arange(1001) * 7,
        "labels": np.repeat(np.arange(1000), 1000),
    }
    stored = save(Index({"num_folders": 1000}, arrays), tmp_path / "million")
    assert stored.file is not None
    before = _private_bytes()
    times = []
    for _ in range(20):
        started = time.perf_counter()
        index = load(stored.file)
        assert index is not None
        table = index.paths
        times.append(time.perf_counter() - started)
    assert min(times) < 0.02  # reading takes 100 ms and more (tools/bench/file_list.py)
    for number in range(0, count, 997):
        assert table[number] == f"n{number // 1000:05d}/image_{number:08d}.jpg"
    assert index.labels is not None
    assert index.labels[count - 1] == 999
    assert _private_bytes() - before < 1 << 20


def _private_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
