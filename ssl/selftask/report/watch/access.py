"""Who may read which page: hosts, token, and names in addresses."""

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
MOST_NAME = 1000  # characters of a path


def new_token() -> str:
    """Return 256 random bits as text for an address."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Decides on requests.

    Args:
        host: The host that the server listens on.
        token: What a reader must know, or None on loopback.
    """

    host: str
    token: str | None = None

    def knows_host(self, header: str | None) -> bool:
        """Return whether a ``Host`` header names this server.

        A page of another site can have its own name point to this machine (DNS rebinding) and
        would then read everything. Its requests carry that name. Numeric addresses need no check
        beyond loopback: no name stands behind them.
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

    def has_token(self, given: str | None) -> bool:
        """Return whether a text is the token; also True if none is needed."""
        if self.token is None:
            return True
        return given is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def knows_reader(self, cookies: str) -> bool:
        """Return whether a ``Cookie`` header has the token."""
        try:
            cookie = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            cookie = None
        return self.has_token(cookie.value if cookie is not None else None)

    @property
    def cookie(self) -> str:
        """Value of ``Set-Cookie``: for this server only, and not for scripts."""
        return f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def path_parts(target: str) -> list[str] | None:
    """Return the decoded parts of a request's path, or None for one that is not allowed.

    Decoded once, as a browser encodes it. Not allowed are empty parts, ``.``, ``..``, backslashes,
    null bytes, and what is no UTF-8. A slash at the end does not count.
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
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", header or "")
    return found[1].strip("[]").lower() if found else None


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], socket.getfqdn().lower()}
