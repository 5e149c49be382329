"""Access control of the server: hosts, token, and paths of requests."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import unquote_to_bytes

COOKIE = "selftask_watch"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_NAME = 1000  # largest number of characters of a path


def new_token() -> str:
    """Return 256 random bits as URL-safe text."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Return whether a server on ``host`` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Access rules for requests.

    Args:
        host: The host that the server listens on.
        token: Secret that a reader must send; None if none is needed, as on loopback.
    """

    host: str
    token: str | None = None

    def knows_host(self, header: str | None) -> bool:
        """Return whether a ``Host`` header names this server.

        A page of another site can make its own name resolve to this machine (DNS rebinding) and
        could then read everything. Its requests carry that name in this header. Numeric addresses
        cannot be rebound, so they are accepted unless the server listens on loopback.
        """
        name = _name_of(header)
        if name is None:
            return False
        if is_loopback(self.host):
            return name in LOOPBACK or name == self.host
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {"localhost", self.host.lower(), *_own_names()}
        return True

    def has_token(self, text: str | None) -> bool:
        """Return whether a text is the token; also True if none is needed."""
        if self.token is None:
            return True
        return text is not None and hmac.compare_digest(text.encode(), self.token.encode())

    def knows_reader(self, cookies: str) -> bool:
        """Return whether a ``Cookie`` header has the token; also True if none is needed."""
        try:
            cookie = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            cookie = None
        return self.has_token(cookie.value if cookie is not None else None)

    @property
    def cookie(self) -> str:
        """Value of ``Set-Cookie``: a cookie hidden from scripts, and not sent from other sites."""
        return f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def path_parts(target: str) -> list[str] | None:
    """Return the decoded parts of a request's path, or None for a path that is not allowed.

    Percent-encoding is decoded once. Empty parts, ``.``, ``..``, encoded slashes, backslashes,
    control characters, invalid UTF-8 and more than 1000 characters are not allowed. A final slash
    is ignored.
    """
    path = target.partition("?")[0]
    if not path.startswith("/") or len(path) > MOST_NAME:
        return None
    parts = []
    for raw in path[1:].removesuffix("/").split("/") if path != "/" else []:
        try:
            part = unquote_to_bytes(raw).decode("utf-8")
        except UnicodeDecodeError:
            return None
        if part in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", part):
            return None
        parts.append(part)
    return parts


def _name_of(header: str | None) -> str | None:
    """Return the host of a ``Host`` header without its port, or None if it is malformed."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", header or "")
    return match[1].strip("[]").lower() if match else None


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], socket.getfqdn().lower()}
