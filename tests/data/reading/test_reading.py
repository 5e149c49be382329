"""Reading whole files: what is no file is refused, silence has an end, the last file is known."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from selftask.data.reading import files
from selftask.data.reading.files import POLICY, last_file, now_reading, read_bytes
from selftask.errors import BadImage


def read_limited(path: str, timeout_s: float, retries: int = 2) -> bytes:
    with patch.multiple(POLICY, timeout_s=timeout_s, retries=retries):
        return read_bytes(path)


@pytest.fixture
def stuck_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path that looks like a file and whose opening blocks, as on a dead network mount.

    It is a named pipe that ``os.stat`` takes for a file; opened without O_NONBLOCK it waits for a
    writer. At the end one comes, so that the threads left behind can leave.
    """
    path = tmp_path / "stuck.jpg"
    os.mkfifo(path)
    a_file = os.stat(__file__)
    real_stat, real_open = os.stat, os.open
    monkeypatch.setattr(
        os, "stat", lambda p, **more: a_file if str(p) == str(path) else real_stat(p, **more)
    )
    monkeypatch.setattr(
        os, "open", lambda p, flags, *mode: real_open(p, flags & ~os.O_NONBLOCK, *mode)
    )
    yield path
    while any(thread.is_alive() for thread in files._STUCK):
        with open(path, "wb", buffering=0) as writer:
            writer.write(b"x")
        time.sleep(0.01)


def test_content_of_a_file_and_through_a_link(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "empty").write_bytes(b"")
    for timeout_s in (0, 5):
        assert read_limited(str(tmp_path / "a"), timeout_s) == content
        assert read_limited(str(tmp_path / "link"), timeout_s) == content
        assert read_limited(str(tmp_path / "empty"), timeout_s) == b""
        assert read_limited("/proc/self/status", timeout_s).startswith(b"Name:")  # its size is 0


def test_files_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(5000)
    (tmp_path / "a").write_bytes(content)
    real = os.stat(tmp_path / "a")
    for size in (10, 4999, 5001, 90_000):  # what was said before it grew or shrank
        fields = [*real[:6], size, *real[7:10]]
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", lambda p, fields=fields: os.stat_result(fields))
            assert read_limited(str(tmp_path / "a"), 0) == content


@pytest.mark.parametrize("timeout_s", [0, 5])
def test_what_is_no_file_is_refused_at_once(timeout_s: float, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")  # endless
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    os.truncate(os.open(tmp_path / "sparse.jpg", os.O_CREAT | os.O_WRONLY), 1 << 40)
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(tmp_path / "socket.jpg"))
    expected = {
        "pipe.jpg": "a named pipe, not a file",
        "folder.jpg": "a folder, not a file",
        "zero.jpg": "a device, not a file",
        "socket.jpg": "a socket, not a file",
        "gone.jpg": "no such file or directory",
        "loop.jpg": "too many levels of symbolic links",
        "sparse.jpg": "1099511627776 bytes, more than data.max_bytes=1073741824",
        "null\0.jpg": "embedded null",  # python's words, which differ between versions
    }
    started = time.perf_counter()
    for name, reason in expected.items():
        with pytest.raises(BadImage) as caught:
            read_limited(str(tmp_path / name), timeout_s)
        message = caught.value.reason
        assert message == reason or (name == "null\0.jpg" and reason in message), name
        assert caught.value.path == str(tmp_path / name)
    assert time.perf_counter() - started < 20
    server.close()


def test_silence_has_an_end_and_the_next_file_is_read(stuck_pipe: Path) -> None:
    started = time.perf_counter()
    with pytest.raises(BadImage, match=r"no answer .* within 0.2 s \(tried 2 times\)"):
        read_limited(str(stuck_pipe), timeout_s=0.2, retries=1)
    assert 0.4 < time.perf_counter() - started < 20
    good = stuck_pipe.with_name("good.jpg")
    good.write_bytes(b"good")
    assert read_limited(str(good), timeout_s=5) == b"good"


def test_a_dead_file_system_does_not_collect_threads(
    stuck_pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_STUCK", 2)
    monkeypatch.setattr(files, "_IDLE", [])
    for _ in range(2):
        with pytest.raises(BadImage, match="no answer"):
            read_limited(str(stuck_pipe), timeout_s=0.05, retries=0)
    threads = threading.active_count()
    with pytest.raises(BadImage, match="2 reads of other files have not come back"):
        read_limited(str(stuck_pipe), timeout_s=60, retries=0)
    assert threading.active_count() == threads


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN])
def test_errors_that_pass_are_tried_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"here")
    failures = [OSError(number, os.strerror(number))] * 2
    real_open = os.open

    def opened(path: Any, flags: int, *mode: int) -> int:
        if failures:
            raise failures.pop()
        return real_open(path, flags, *mode)

    monkeypatch.setattr(files, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(os, "open", opened)
    assert read_limited(str(tmp_path / "a"), 5) == b"here"
    failures[:] = [OSError(number, os.strerror(number))] * 3
    said = os.strerror(number).lower()
    with pytest.raises(BadImage) as caught:
        read_limited(str(tmp_path / "a"), 5)
    assert caught.value.reason == f"{said} (tried 3 times)"
    failures[:] = [PermissionError(errno.EACCES, "Permission denied")] * 2
    with pytest.raises(BadImage, match=r"permission denied$"):
        read_limited(str(tmp_path / "a"), 5)
    assert len(failures) == 1, "what does not pass is not tried again"


def test_an_interrupt_leaves_no_answer_for_the_next_file(
    stuck_pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            read_limited(str(stuck_pipe), timeout_s=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    good = stuck_pipe.with_name("good.jpg")
    good.write_bytes(b"good")
    assert read_limited(str(good), timeout_s=5) == b"good"


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / str(number)).write_bytes(str(number).encode() * 1000)
    wrong = []

    def read(number: int) -> None:
        for _ in range(50):
            if read_limited(str(tmp_path / str(number)), 5) != str(number).encode() * 1000:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_last_file_of_a_killed_process_is_known(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    read_limited(str(tmp_path / "a"), 5)  # so that this process has a thread that the child has not
    odd = str(tmp_path / "b\udcff\n.jpg")
    Path(odd).write_bytes(b"b")
    child = os.fork()
    if not child:
        read_limited(odd, 5)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert last_file(child) == odd
    assert last_file(os.getpid()) == str(tmp_path / "a")
    assert last_file(child + 1024) is None, "another process in the same slot"


def test_no_idle_thread_is_there_when_a_process_is_forked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    read_limited(str(tmp_path / "a"), 5)
    assert any(thread.name == "reader" for thread in threading.enumerate())
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    stuck = set(files._STUCK)
    assert not [t for t in threading.enumerate() if t.name == "reader" and t not in stuck]
    assert read_limited(str(tmp_path / "a"), 5) == b"a"


def test_a_long_name_keeps_its_end() -> None:
    now_reading("x" * 5000 + "/the_file.jpg")
    name = last_file(os.getpid())
    assert name is not None and name.endswith("x/the_file.jpg") and len(name) < 4096


def test_nothing_is_opened_that_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    opened: list[str] = []
    monkeypatch.setattr(os, "open", lambda path, *more: opened.append(str(path)))
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    with pytest.raises(BadImage):
        read_limited(str(tmp_path / "pipe"), 0)
    assert opened == []
