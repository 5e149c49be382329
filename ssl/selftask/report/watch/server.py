"""Web server of ``selftask watch``, for GET requests and files of run folders only."""

from __future__ import annotations

import errno
import gzip
import hashlib
import socket
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from selftask.errors import UserError
from selftask.report.watch import pages
from selftask.report.watch.access import Access, path_parts
from selftask.report.watch.site import TEXTS, NotThere, Site

PORTS = 20  # number of ports that are tried
MOST_CONNECTIONS = 64
REPLACE_S = 0.5  # longest time that a new connection waits for the end of the one it replaces
TIMEOUT_S = 30.0  # time after which an idle connection is closed
_SMALL = 1400  # responses of fewer bytes are not compressed
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NO_CODE = "default-src 'none'; frame-ancestors 'none'"
_REFUSED = {"Allow": "GET", "Connection": "close"}


class Server(ThreadingHTTPServer):
    """Server of a site with at most ``MOST_CONNECTIONS`` connections.

    At the limit, a new connection replaces the one that has waited longest without sending a whole
    request. If all connections are being answered, the new one is closed.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], site: Site, access: Access) -> None:
        self.site, self.access = site, access
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._waiting: dict[Any, None] = {}  # connections without a whole request, oldest first
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._end_oldest()
            if not self._room.acquire(timeout=REPLACE_S):
                self.shutdown_request(request)
                return
        self.set_waiting(request, True)
        super().process_request(request, client_address)

    def set_waiting(self, connection: Any, waits: bool) -> None:
        """Record whether a connection waits for a request."""
        with self._lock:
            self._waiting.pop(connection, None)
            if waits:
                self._waiting[connection] = None

    def _end_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                del self._waiting[oldest]
                with suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.set_waiting(request, False)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except those of a reader that has disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def open_server(site: Site, access: Access, port: int) -> Server:
    """Return a server that listens on the port, or on the next free one.

    Args:
        site: Runs and files to show.
        access: Access rules, with the host to listen on.
        port: The port; 0 for any free port.

    Raises:
        UserError: If no port is free, or the host is invalid.
    """
    tried = [port] if port == 0 else range(port, min(port + PORTS, 65536))
    for number in tried:
        try:
            return Server((access.host, number), site, access)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UserError(f"host={access.host}: {error.strerror or error}") from error
    raise UserError(f"port={port}: this port and the next {PORTS - 1} are taken; give another one")


class Handler(BaseHTTPRequestHandler):
    """Handler of the requests of a connection."""

    protocol_version = "HTTP/1.1"
    server_version = "selftask"
    sys_version = ""
    timeout = TIMEOUT_S
    server: Server

    def handle_one_request(self) -> None:
        self.server.set_waiting(self.connection, True)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the rest of a request, after which its connection is no longer replaced."""
        complete = super().parse_request()
        self.server.set_waiting(self.connection, False)
        return complete

    def do_GET(self) -> None:
        access = self.server.access
        hosts = self.headers.get_all("Host") or []
        url = urlsplit(self.path if self.path.startswith("/") else "/\0")
        query = parse_qs(url.query)
        if len(hosts) != 1 or not access.knows_host(hosts[0]):
            self._plain(421, "this server does not go by that name")
        elif "token" in query and access.token is not None:
            self._sign_in(url.path, query["token"][-1])
        elif not access.knows_reader(self.headers.get("Cookie", "")):
            self._plain(403, "open the address with ?token=... that selftask watch printed")
        else:
            self._try_to_answer(query)

    def _try_to_answer(self, query: dict[str, list[str]]) -> None:
        try:
            self._answer(query)
        except UserError as error:
            self._plain(404, str(error) or "not found")

    def _answer(self, query: dict[str, list[str]]) -> None:
        site = self.server.site
        match path_parts(self.path):
            case []:
                self._page(pages.overview_page(str(site.root), site.lines()))
            case ["compare"]:
                names = query.get("run") or list(site.lines())
                folders = {name: site.folder(name) for name in names}
                if not folders:
                    raise NotThere
                self._page(pages.comparison_page(folders, query.get("sort", [""])[-1]))
            case ["run", *rest]:
                self._run(rest)
            case _:
                raise NotThere

    def _run(self, parts: list[str]) -> None:
        site = self.server.site
        name, rest = site.split(parts)
        if not rest and not urlsplit(self.path).path.endswith("/"):
            self._redirect(pages.run_url(name))  # links on the page are relative to this address
        elif not rest:
            self._page(pages.run_page(name, site.record(name)))
        else:
            self._file(site.file(name, rest))

    def _sign_in(self, path: str, token: str) -> None:
        """Replace the token in an address by a cookie, to keep it out of the browser history."""
        access = self.server.access
        if access.has_token(token):
            self._redirect(path if path_parts(path) else "/", {"Set-Cookie": access.cookie})
        else:
            self._plain(403, "this is not the token that selftask watch printed")

    def _page(self, text: str) -> None:
        """Send a page, or nothing to a reader that already has it."""
        body = text.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", "")
        else:
            policy = "frame-ancestors 'none'"
            kind = "text/html; charset=utf-8"
            self._send(200, body, kind, policy=policy, headers={"ETag": tag})

    def _plain(self, code: int, text: str) -> None:
        self._send(code, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def _redirect(self, path: str, headers: dict[str, str] | None = None) -> None:
        self._send(303, b"", "text/plain", headers={"Location": path, **(headers or {})})

    def _send(
        self,
        code: int,
        body: bytes,
        kind: str,
        *,
        policy: str = _NO_CODE,
        headers: dict[str, str] | None = None,
    ) -> None:
        headers = dict(headers or {})
        if len(body) > _SMALL and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 5), "gzip"
        if code != 304:
            headers |= {"Content-Type": kind, "Content-Length": str(len(body))}
        self._begin(code, headers, policy)
        self.wfile.write(body)

    def _begin(self, code: int, headers: dict[str, str], policy: str = _NO_CODE) -> None:
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Security-Policy": policy, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _file(self, path: Path) -> None:
        """Send a file; the browser shows texts and downloads weights."""
        with path.open("rb") as file:
            remaining = path.stat().st_size  # a log may grow while it is sent
            headers = {"Content-Type": "text/plain; charset=utf-8"}
            if path.name not in TEXTS:
                headers = {"Content-Type": "application/octet-stream"}
                headers["Content-Disposition"] = "attachment"
            self._begin(200, {**headers, "Content-Length": str(remaining)})
            while remaining and (piece := file.read(min(remaining, 1 << 20))):
                self.wfile.write(piece)
                remaining -= len(piece)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that are not GET or not HTTP in plain text, without echoing them."""
        self.close_connection = True
        body = b"GET only\n" if code in (405, 501) else b"bad request\n"
        if getattr(self, "command", "") == "HEAD":
            body = b""
        self._send(405 if code == 501 else code, body, "text/plain", headers=_REFUSED)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, so that requests are not logged."""
