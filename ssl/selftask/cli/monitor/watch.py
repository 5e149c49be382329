"""``selftask watch``: serve live pages of a folder of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from selftask.cli.monitor.runs import folder_of, lines_of
from selftask.cli.options import take_options
from selftask.errors import UserError, nearest

PORT = 8742

USAGE = f"""\
usage: selftask watch [DIR] [port={PORT}] [host=127.0.0.1] [--token]

Serves live pages of all runs in and below DIR (runs/ if it is not given), local ones and those of
SLURM: the table of `selftask runs`, the report of each run, which follows while it trains, and
comparisons. It only reads. Ctrl-C ends it; the runs go on.

Only this machine can connect. From your own computer: ssh -L {PORT}:127.0.0.1:{PORT} MACHINE, then
open http://127.0.0.1:{PORT}/ there.

  host=0.0.0.0  all machines of the network can connect; asks for the token in the printed address.
                What is sent is not encrypted
  --token       asks for the token on this machine, too: its other users can connect
  port=PORT     the next free one is taken if it is in use"""

_KEYS = ("host", "port")


@dataclass(frozen=True)
class _Wanted:
    folder: Path
    host: str
    port: int
    token: bool


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C."""
    wanted = _read(argv)
    from selftask.report.watch.access import Access, is_loopback, new_token
    from selftask.report.watch.server import open_server
    from selftask.report.watch.site import Site

    asks = wanted.token or not is_loopback(wanted.host)
    access = Access(wanted.host, new_token() if asks else None)
    site = Site(wanted.folder, lambda: lines_of([wanted.folder]))
    server = open_server(site, access, wanted.port)
    port = server.server_address[1]
    if wanted.port not in (0, port):
        print(f"port {wanted.port} is taken; {port} is free", flush=True)
    host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
    query = f"?token={access.token}" if asks else ""
    print(f"watching {wanted.folder}: http://{host}:{port}/{query} (Ctrl-C ends)", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("stopped watching; the runs go on")
    finally:
        server.server_close()
    return 0


def _read(argv: list[str]) -> _Wanted:
    words, options = take_options(argv, {"--token": bool})
    given: dict[str, str] = {"host": "127.0.0.1", "port": str(PORT)}
    folders = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            if key not in _KEYS:
                raise UserError(f"{word}: there is no key {key!r}; {nearest(key, _KEYS)}")
            given[key] = value
        else:
            folders.append(folder_of(word, "watch"))
    if len(folders) > 1:
        raise UserError("watch takes one DIR: that above all runs")
    port = given["port"]
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"port={port}: expected a number from 0 to 65535, such as {PORT}")
    folder = folders[0] if folders else folder_of("runs", "watch")
    return _Wanted(folder, given["host"], int(port), bool(options.get("--token")))
