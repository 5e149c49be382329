"""``selftask watch``: what is served, to whom, and that nothing else is."""

from __future__ import annotations

import errno
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tiny
from run_folders import row, write_run
from selftask.cli.main import main
from selftask.cli.monitor.runs import lines_of
from selftask.report.watch.access import Access, path_parts
from selftask.report.watch.server import Server, open_server
from selftask.report.watch.site import Site

SECRET = "only for the owner"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Runs, and around them what must not be served."""
    folder = tmp_path / "runs"
    write_run(folder / "a b", "running", steps=8, knn=0.5)
    write_run(folder / "sweep/lr_0.1", knn=0.7)
    (tmp_path / "secret.txt").write_text(SECRET)
    (folder / "secret.txt").write_text(SECRET)
    (folder / "sweep/lr_0.1/private.txt").write_text(SECRET)
    (folder / "sweep/lr_0.1/checkpoints").mkdir()
    (folder / "sweep/lr_0.1/checkpoints/step_000000020.pt").write_bytes(b"weights" * 1000)
    (folder / "sweep/lr_0.1/checkpoints/out.pt").symlink_to(tmp_path / "secret.txt")
    (folder / "a b/git.diff").symlink_to(tmp_path / "secret.txt")
    return folder


def started(server: Server) -> Server:
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    site = Site(root, lambda: lines_of([root]))
    running = started(open_server(site, Access("127.0.0.1"), 0))
    yield running
    running.shutdown()
    running.server_close()


class Answer:
    """An answer of a server to one request."""

    def __init__(
        self, server: Server, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> None:
        port = server.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        own_host = "Host" in (headers or {})
        connection.putrequest(method, path, skip_host=own_host, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        self.code, self.headers = answer.status, dict(answer.getheaders())
        body = answer.read()
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.body = body
        self.text = body.decode("utf-8", errors="replace")
        connection.close()


def test_overview_and_pages_of_runs(server: Server) -> None:
    overview = Answer(server, "/", headers={"Accept-Encoding": "gzip"})
    assert overview.code == 200 and overview.headers["Content-Encoding"] == "gzip"
    assert "2 runs: 1 running, 1 finished" in overview.text
    assert 'href="/run/a%20b/"' in overview.text and 'href="/run/sweep/lr_0.1/"' in overview.text
    page = Answer(server, "/run/sweep/lr_0.1/")
    assert page.code == 200 and "live-status" in page.text
    moved = Answer(server, "/run/sweep/lr_0.1")
    assert (moved.code, moved.headers["Location"]) == (303, "/run/sweep/lr_0.1/")
    both = Answer(server, "/compare?run=a%20b&run=sweep/lr_0.1&sort=loss")
    assert both.code == 200 and "lowest loss" in both.text
    assert 'href="/run/a%20b/"' in both.text
    assert Answer(server, "/compare?run=a%20b&run=other").code == 404
    assert Answer(server, "/compare?sort=los").code == 404


@pytest.mark.parametrize("path", ["/run/sweep/lr_0.1/", "/compare"])
def test_a_page_is_sent_again_when_it_has_changed(server: Server, root: Path, path: str) -> None:
    page = Answer(server, path)
    same = Answer(server, path, headers={"If-None-Match": page.headers["ETag"]})
    assert (same.code, same.body) == (304, b"")
    with (root / "sweep/lr_0.1/metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(21, 0.0625)) + "\n")
    deadline = time.monotonic() + 10
    asked = {"If-None-Match": page.headers["ETag"]}
    while (news := Answer(server, path, headers=asked)).code == 304:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert news.code == 200 and "0.0625" in news.text and "0.0625" not in page.text


def test_files_of_a_run(server: Server) -> None:
    log = Answer(server, "/run/sweep/lr_0.1/log.txt")
    assert log.code == 200 and "RUN finished" in log.text
    assert log.headers["Content-Type"].startswith("text/plain")
    weights = Answer(server, "/run/sweep/lr_0.1/checkpoints/step_000000020.pt")
    assert weights.body == b"weights" * 1000
    assert weights.headers["Content-Disposition"] == "attachment"


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt",
        "/../secret.txt",
        "/run/../secret.txt",
        "/run/sweep/lr_0.1/../../../secret.txt",
        "/run/sweep/lr_0.1/%2e%2e/%2e%2e/%2e%2e/secret.txt",
        "/run/sweep/lr_0.1/..%2f..%2f..%2fsecret.txt",
        "/run/sweep/lr_0.1/%252e%252e/secret.txt",
        "/run/sweep/lr_0.1/..\\..\\secret.txt",
        "/run/sweep/lr_0.1/checkpoints/..%5csecret.txt",
        "/run/sweep/lr_0.1/checkpoints/out.pt",
        "/run/sweep/lr_0.1/checkpoints/",
        "/run/sweep/lr_0.1/checkpoints",
        "/run/sweep/lr_0.1/checkpoints/%00",
        "/run/sweep/lr_0.1/private.txt",
        "/run/a%20b/git.diff",
        "/run/sweep/",
        "/run/",
        "/run/%ff/",
        "//etc/passwd",
        "/etc/passwd",
        "http://127.0.0.1/secret.txt",
        "/run/sweep/lr_0.1/" + "a" * 5000,
        "/run/sweep/lr_0.1/checkpoints/" + "a" * 300,  # longer than a file system allows
    ],
)
def test_nothing_else_is_served(server: Server, path: str) -> None:
    answer = Answer(server, path)
    assert answer.code == 404
    assert SECRET not in answer.text and "root:" not in answer.text


def test_links_out_of_the_folder_are_no_runs(server: Server, root: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    site = Site(root, lambda: lines_of([root, tmp_path / "elsewhere"]))
    assert "elsewhere" in site.lines()
    other = started(open_server(site, Access("127.0.0.1"), 0))
    assert Answer(other, "/run/link/").code == 404
    assert Answer(other, "/run/elsewhere/").code == 404
    other.shutdown()
    other.server_close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "GARBAGE"])
def test_get_only(server: Server, method: str) -> None:
    answer = Answer(server, "/", method)
    assert answer.code == 405 and answer.headers["Allow"] == "GET"
    assert not any(name.startswith("Access-Control") for name in answer.headers)


@pytest.mark.parametrize("path", ["/", "/compare", "/run/a%20b/", "/nowhere", "/run/a%20b/log.txt"])
def test_headers_of_every_answer(server: Server, path: str) -> None:
    headers = Answer(server, path, headers={"Origin": "https://elsewhere.example"}).headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert not any(name.lower().startswith("access-control") for name in headers)
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1", 200),
        ("localhost:8080", 200),
        ("[::1]:8080", 200),
        ("elsewhere.example", 421),
        ("127.0.0.1.nip.io", 421),
        ("localhost.elsewhere.example", 421),
        ("10.0.0.1", 421),
        ("", 421),
        ("localhost@elsewhere.example", 421),
    ],
)
def test_names_of_other_sites_are_refused(server: Server, host: str, code: int) -> None:
    """Else a page of another site, whose name is pointed here, reads everything."""
    assert Answer(server, "/", headers={"Host": host}).code == code


def test_the_token_becomes_a_cookie(root: Path) -> None:
    access = Access("0.0.0.0", "correct")
    server = started(open_server(Site(root, lambda: lines_of([root])), access, 0))
    for path in ("/", "/compare", "/run/a%20b/log.txt", "/nowhere"):
        refused = Answer(server, path)
        assert refused.code == 403 and "RUN" not in refused.text
    assert Answer(server, "/?token=wrong").code == 403
    assert Answer(server, "/?token=").code == 403
    assert Answer(server, "/?token=%c3%a4").code == 403
    assert Answer(server, "/", headers={"Cookie": "selftask_watch=wrong"}).code == 403
    assert Answer(server, "/", headers={"Cookie": '"; x=\x7f'}).code == 403
    signed = Answer(server, "/?token=correct")
    assert (signed.code, signed.headers["Location"]) == (303, "/"), "the token leaves the address"
    cookie = signed.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert Answer(server, "/", headers={"Cookie": cookie.split(";")[0]}).code == 200
    elsewhere = Answer(server, "//elsewhere.example/?token=correct")
    assert re.match(r"/(?!/)", elsewhere.headers["Location"]), "no redirect to another site"
    named = {"Cookie": cookie.split(";")[0], "Host": "elsewhere.example"}
    assert Answer(server, "/", headers=named).code == 421
    named["Host"] = f"{socket.gethostname()}:80"
    assert Answer(server, "/", headers=named).code == 200
    server.shutdown()
    server.server_close()


def test_path_parts() -> None:
    assert path_parts("/") == [] and path_parts("/a%20b/c/?x=/../") == ["a b", "c"]
    for wrong in ("", "a", "//a", "/a//b", "/./a", "/a/%2E%2e", "/a%2fb", "/a%00", "/%c3"):
        assert path_parts(wrong) is None, wrong


def test_many_readers_share_one_reading(root: Path) -> None:
    readings = []

    def read() -> list[object]:
        readings.append(1)
        return lines_of([root])  # type: ignore[return-value]

    server = started(open_server(Site(root, read), Access("127.0.0.1"), 0))  # type: ignore[arg-type]
    begun = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(lambda n: Answer(server, f"/?n={n}").code, range(200)))
    seconds = time.monotonic() - begun
    assert codes == [200] * 200
    assert len(readings) <= 2 + seconds  # once a second, however many ask
    server.shutdown()
    server.server_close()


def test_idle_connections_do_not_keep_others_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.server_address[1])) for _ in range(40)]
    for connection in idle:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: local")
    assert Answer(server, "/").code == 200
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_half_open_connections_do_not_keep_others_out(server: Server, sent: bytes) -> None:
    """70 of them kept every reader out for 30 seconds."""
    host, port = server.server_address[:2]
    half = [socket.create_connection((str(host), port)) for _ in range(70)]
    try:
        for connection in half:
            connection.sendall(sent)
        began = time.monotonic()
        answers = [Answer(server, "/") for _ in range(3)]
        assert [answer.code for answer in answers] == [200, 200, 200]
        assert time.monotonic() - began < 20
    finally:
        for connection in half:
            connection.close()


def test_a_broken_connection_is_not_printed(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (OSError(errno.EHOSTUNREACH, "No route to host"), ValueError("a fault")):
        try:
            raise error
        except (OSError, ValueError):
            server.handle_error(None, ("127.0.0.1", 5))
    printed = capsys.readouterr().err
    assert "a fault" in printed and "No route" not in printed


def test_the_command_takes_the_next_port_and_ends_by_ctrl_c(root: Path) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    words = [sys.executable, "-u", "-m", "selftask", "watch", str(root), f"port={port}"]
    process = subprocess.Popen(
        words, env=tiny.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    printed = process.stdout.readline() + process.stdout.readline()
    assert f"port {port} is taken" in printed
    match = re.search(r"http://127\.0\.0\.1:(\d+)/", printed)
    assert match is not None and int(match[1]) != port
    connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=20)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    os.kill(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=20) == 0 and "Traceback" not in rest
    taken.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        ([".", "port=many"], "port=many: expected a number"),
        ([".", "port=70000"], "port=70000"),
        ([".", "hots=0.0.0.0"], "did you mean 'host'?"),
        ([".", "host=no.such.host.invalid"], "host=no.such.host.invalid"),
        ([".", "."], "one DIR"),
    ],
)
def test_mistakes_of_watch(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    assert message in capsys.readouterr().err
