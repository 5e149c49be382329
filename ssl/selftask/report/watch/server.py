"""Web server of ``selftask watch``, for GET requests and files of run folders only."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from selftask.errors import UserError
from selftask.report.watch import pages
from selftask.report.watch.access import Access, path_parts
from selftask.report.watch.site import TEXTS, NotThere, Site

PORTS = 20  # number of ports that are tried
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
    """Server of a site, with a thread for each connection."""

    request_queue_size = 64

    def __init__(self, address: tuple[str, int], site: Site, access: Access) -> None:
        self.site, self.access = site, access
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except those of a broken connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def open_server(site: Site, access: Access, port: int) -> Server:
    """Return a server that listens on the port, or on the first free one of the next 19.

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
            self._file(rest[-1], site.open_file(name, rest))

    def _sign_in(self, path: str, token: str) -> None:
        """Replace the token in an address by a cookie, to keep it out of the browser history."""
        access = self.server.access
        if access.has_token(token):
            self._redirect(path if path_parts(path) else "/", {"Set-Cookie": access.cookie})
        else:
            self._plain(403, "this is not the token that selftask watch printed")

    def _page(self, text: str) -> None:
        """Send a page, or status 304 if the browser already has it."""
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

    def _file(self, name: str, file: BinaryIO) -> None:
        """Send a file; the browser shows texts and downloads weights."""
        with file:
            remaining = os.fstat(file.fileno()).st_size  # a log may grow while it is sent
            headers = {"Content-Type": "text/plain; charset=utf-8"}
            if name not in TEXTS:
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
