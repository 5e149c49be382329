"""``selftask watch``: serve live pages of a folder of runs."""

from __future__ import annotations

from selftask.cli.monitor.runs import folder_of, lines_of
from selftask.cli.options import take_keys, take_options
from selftask.errors import UserError

PORT = 8742

USAGE = f"""\
usage: selftask watch [DIR] [port={PORT}] [host=127.0.0.1] [--token]

Serves live pages of all runs in and below DIR (runs/ if it is not given), local ones and those of
SLURM: the table of `selftask runs`, the report of each run, which follows while it trains, and
comparisons. It only reads. Ctrl-C ends it; the runs continue.

Only this machine can connect. From your own computer: ssh -L {PORT}:127.0.0.1:{PORT} MACHINE, then
open http://127.0.0.1:{PORT}/ there.

  host=0.0.0.0  all machines of the network can connect; asks for the token in the printed address.
                What is sent is not encrypted
  --token       asks for the token on this machine, too: its other users can connect
  port=PORT     the next free one is taken if it is in use"""


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C."""
    words, options = take_options(argv, {"--token": bool})
    names, values = take_keys(words, {"host": "127.0.0.1", "port": str(PORT)})
    folders = [folder_of(name, "watch") for name in names or ["runs"]]
    if len(folders) > 1:
        raise UserError("watch takes one DIR, the folder that holds all runs")
    if not values["port"].isdecimal() or int(values["port"]) > 65535:
        raise UserError(f"port={values['port']}: expected a number from 0 to 65535, such as {PORT}")
    folder, host, wanted = folders[0], values["host"], int(values["port"])
    from selftask.report.watch.access import Access, is_loopback, new_token
    from selftask.report.watch.server import open_server
    from selftask.report.watch.site import Site

    asks = options.get("--token") or not is_loopback(host)
    access = Access(host, new_token() if asks else None)
    site = Site(folder, lambda: lines_of([folder]))
    server = open_server(site, access, wanted)
    port = server.server_address[1]
    if wanted not in (0, port):
        print(f"port {wanted} is taken; {port} is free", flush=True)
    host = f"[{host}]" if ":" in host else host
    query = f"?token={access.token}" if asks else ""
    print(f"watching {folder}: http://{host}:{port}/{query} (Ctrl-C ends)", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("stopped watching; the runs continue")
    finally:
        server.server_close()
    return 0
