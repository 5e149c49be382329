"""``selftask data check``, and what it shares with its like: they say what is there, and end."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny
from data.odd_files import bomb, make_bad, make_odd_but_sound, make_photographs
from selftask.cli.main import main
from selftask.data.inspect.check import check
from selftask.data.inspect.worker_pool import Lost, map_images
from selftask.data.source import Source
from selftask.errors import BadImage, RunError


class Numbers(Source):
    """Constant images; what happens when one of them is read can be chosen."""

    def __init__(self, number: int, **happens: Callable[[], None]) -> None:
        self.number = number
        self.happens = {int(key.removeprefix("at_")): what for key, what in happens.items()}

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self.happens:
            self.happens[index]()
        return np.full((4, 6, 3), index, dtype=np.uint8), -1

    def path(self, index: int) -> str:
        return f"number {index}"

    def describe(self) -> str:
        return "numbers"


def die(number: int) -> Callable[[], None]:
    def happen() -> None:
        faulthandler.disable()  # pytest's would fill the output
        os.kill(os.getpid(), number)

    return happen


def fail(error: Exception) -> Callable[[], None]:
    def happen() -> None:
        raise error

    return happen


def run_check(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[str]]:
    code = main(["data", "check", *argv])
    return code, capfd.readouterr().out.splitlines()


def test_check_reports_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_photographs(tmp_path / "a", 5, size=(24, 20))
    make_photographs(tmp_path / "b", 2, size=(48, 30))
    shutil.copy(tmp_path / "a/0001.jpg", tmp_path / "b/copy.jpg")
    code, lines = run_check(capfd, str(tmp_path), "--workers", "2")
    assert code == 0
    assert lines[-1] == "CHECK ok: all 8 images can be read"
    text = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert text["formats"] == "JPEG 8"
    assert text["modes"] == "RGB 8"
    assert text["sizes"] == "2 different; 24x20 6, 48x30 2"
    assert text["smallest"] == f"24x20  {tmp_path}/a/0000.jpg"
    assert text["largest"] == f"48x30  {tmp_path}/b/0000.jpg"
    assert text["duplicates"] == (
        f"1 copies of 1 images, such as {tmp_path}/a/0001.jpg = {tmp_path}/b/copy.jpg"
    )


def test_check_finds_all_that_is_bad_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = make_bad(tmp_path / "bad")
    sound = make_odd_but_sound(tmp_path / "sound")
    started = time.perf_counter()
    code, lines = run_check(
        capfd, str(tmp_path), "--json", "--out", str(tmp_path / "list.txt"), "--workers=2"
    )
    assert time.perf_counter() - started < 20
    assert code == 1
    assert len(lines) == 1
    report = json.loads(lines[0])
    assert report["images"] == len(bad) + len(sound)
    reasons = {entry["path"]: entry["reason"] for entry in report["unreadable"]}
    assert sorted(reasons) == sorted(f"{tmp_path}/bad/{name}" for name in bad)
    for name, part in bad.items():
        assert part in reasons[f"{tmp_path}/bad/{name}"].lower(), name
    listed = (tmp_path / "list.txt").read_text().splitlines()
    assert listed == [f"{path}\t{reason}" for path, reason in reasons.items()], "in the same order"
    (same,) = report["duplicates"]
    assert sorted(same) == [
        f"{tmp_path}/sound/{name}" for name in ("a folder.jpg/x.jpg", "link.jpg")
    ]
    assert report["formats"] == {"PNG": 4, "JPEG": 4, "GIF": 1}
    assert report["modes"] == {"RGB": 5, "CMYK": 1, "L": 1, "P": 1, "I;16": 1}
    assert report["sizes"]["10x30"] == 1, "the size of the turned one is upright"
    assert report["bytes"] >= sum(path.stat().st_size for path in sound)


def test_check_says_whether_a_run_would_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_photographs(tmp_path, 9)
    (tmp_path / "bomb.jpg").write_bytes(bomb())
    _, lines = run_check(capfd, str(tmp_path))
    assert lines[-1] == (
        "CHECK found problems: 1 of 10 images (10.00%) cannot be read, no more than "
        "the default of data.max_unreadable (0.1%, at least 3 images) allows: a run replaces them"
    )
    _, lines = run_check(capfd, str(tmp_path), "data.max_unreadable=0.05")
    assert lines[-1].endswith("more than data.max_unreadable=0.05 (5.00%) allows: a run would stop")
    _, lines = run_check(capfd, str(tmp_path), "data.on_error=fail")
    assert lines[-1].endswith("cannot be read, a run would stop (data.on_error=fail)")
    code, lines = run_check(capfd, str(tmp_path), f"data.max_pixels={24 * 20 - 1}")
    assert code == 1
    assert lines[-1].startswith("CHECK found problems: 10 of 10")


def test_check_counts_image_like_files_that_are_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_photographs(tmp_path, 3)
    for name in ("a.HEIC", "b.heic", "c.dng", "d.tar.gz", "e.txt", ".f.heic"):
        (tmp_path / name).touch()
    code, lines = run_check(capfd, str(tmp_path))
    assert code == 0
    passed_over = "2 .heic, 1 .dng, 1 .tar.gz passed over"
    assert f"others     {passed_over} (convert images to JPEG or PNG, unpack archives)" in lines
    _, lines = run_check(capfd, str(tmp_path), "--json")
    assert json.loads(lines[0])["passed_over"] == {".heic": 2, ".dng": 1, ".tar.gz": 1}


def test_check_names_images_of_16_bits_that_become_dark(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = np.linspace(0, 4095, 20).astype(np.uint16).reshape(4, 5)
    Image.fromarray(values).save(tmp_path / "12_bits.png")
    Image.fromarray(values * 16).save(tmp_path / "16_bits.png")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(tmp_path / "black.png")
    code, lines = run_check(capfd, str(tmp_path))
    assert code == 0
    (line,) = [line for line in lines if line.startswith("dark")]
    assert line.split()[1] == "1"
    assert "data.name=bands" in line


def test_check_takes_any_source(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
    images[4] = images[1]
    np.savez(tmp_path / "x.npz", images=images)
    code, lines = run_check(capfd, str(tmp_path / "x.npz"), "--json")
    report = json.loads(lines[0])
    assert code == 0
    assert report["sizes"] == {"9x8": 6}
    assert report["bytes"] == images.nbytes
    assert report["duplicates"] == [[f"{tmp_path}/x.npz[{index}]" for index in (1, 4)]]


def test_a_stuck_image_costs_its_process_and_no_more() -> None:
    source = Numbers(
        100,
        at_5=die(signal.SIGSEGV),
        at_17=lambda: time.sleep(1000),
        at_50=die(signal.SIGKILL),
        at_60=lambda: os._exit(3),
        at_70=fail(BadImage("number 70", "torn")),
        at_99=fail(ValueError("no such\nlayer")),
    )
    started = time.perf_counter()
    report = check(source, 2, silence_s=1.0)
    assert time.perf_counter() - started < 100
    assert [tuple(bad) for bad in report.unreadable] == [
        ("number 5", "the process that read it was killed by SIGSEGV"),
        ("number 17", "took longer than 1 s"),
        ("number 50", "the process that read it was killed by SIGKILL"),
        ("number 60", "the process that read it ended with code 3"),
        ("number 70", "torn"),
        ("number 99", "ValueError: no such layer"),
    ]
    assert report.sizes == Counter({(6, 4): 94})
    assert report.duplicates == []


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_image_is_looked_at_once(num_workers: int) -> None:
    seen = Counter(map_images(lambda index: index * index, range(7, 300), num_workers))
    assert seen == Counter((index, index * index) for index in range(7, 300))
    assert list(map_images(lambda index: index, [], num_workers)) == []


def test_processes_that_cannot_even_start_end_the_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selftask.data.inspect.worker_pool._work", lambda *words: os._exit(7))
    with pytest.raises(RunError, match=r"before they have read anything.*code 7"):
        list(map_images(lambda index: index, range(10), 2))


def test_a_process_lost_on_each_image_is_replaced_each_time() -> None:
    actual = dict(map_images(lambda index: os._exit(index), range(1, 13), 2))
    assert actual == {
        index: Lost(f"the process that read it ended with code {index}") for index in range(1, 13)
    }


def test_what_a_survey_raises_is_raised_here() -> None:
    with pytest.raises(RunError, match="image 3: ZeroDivisionError"):
        list(map_images(lambda index: 1 // (index - 3), range(10), 1))


def test_a_killed_survey_leaves_no_processes(tmp_path: Path) -> None:
    """Workers whose parent is gone notice it, although their siblings hold its end of the pipe."""
    code = (
        "import os, signal, sys, time\n"
        "from selftask.data.inspect import worker_pool\n"
        "sys.stdout.flush()\n"
        "found = worker_pool.map_images(\n"
        "    lambda i: time.sleep(0.002) or os.getpid(), range(1000), 2)\n"
        "print(*{next(found)[1] for _ in range(900)}, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = tiny.run([sys.executable, "-c", code], tmp_path)
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and any(_lives(pid) for pid in workers):
        time.sleep(0.1)
    assert not any(_lives(pid) for pid in workers)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_check_needs_no_torch(tmp_path: Path) -> None:
    make_photographs(tmp_path / "photos", 3)
    code = (
        "import sys; from selftask.cli.main import main\n"
        f"code = main(['data', 'check', {str(tmp_path / 'photos')!r}])\n"
        "print('HEAVY', sorted({'torch', 'torchvision', 'sklearn', 'timm'} & set(sys.modules)))\n"
        "sys.exit(code)"
    )
    done = tiny.run([sys.executable, "-c", code], tmp_path)
    assert done.stdout.splitlines()[-2:] == ["CHECK ok: all 3 images can be read", "HEAVY []"]
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_subset_of_files_is_still_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_photographs(tmp_path, 20)
    code, lines = run_check(capfd, str(tmp_path), "--json", "data.subset=0.5")
    report = json.loads(lines[0])
    assert code == 0
    assert report["images"] == 10
    assert report["formats"] == {"JPEG": 10}


def test_what_a_list_names_is_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_photographs(tmp_path, 3)
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    names = ["0000.jpg", "folder.jpg", "0001.jpg", "pipe.jpg", "nowhere.jpg"]
    (tmp_path / "list.txt").write_text("".join(f"{name}\n" for name in names))
    code, lines = run_check(capfd, str(tmp_path / "list.txt"), "--json")
    assert code == 1
    reasons = {bad["path"]: bad["reason"] for bad in json.loads(lines[0])["unreadable"]}
    assert reasons == {
        f"{tmp_path}/folder.jpg": "a folder, not a file",
        f"{tmp_path}/pipe.jpg": "a named pipe, not a file",
        f"{tmp_path}/nowhere.jpg": "no such file or directory",
    }
