"""``selftask report``: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path

from selftask.errors import UserError

USAGE = """\
usage: selftask report RUN [out=FILE]

Writes one HTML page with what ran, a verdict, curves, events and config: report.html in the run
folder, or FILE. It needs no network and also works while the run goes on."""


def main(argv: list[str]) -> int:
    """Write the page and print its path and the verdict."""
    runs = [word for word in argv if not word.startswith("out=")]
    outs = [word.removeprefix("out=") for word in argv if word.startswith("out=")]
    if len(runs) != 1 or len(outs) > 1:
        raise UserError(f"report needs one RUN\n{USAGE}")
    from selftask.checkpoint.mirror import local_run
    from selftask.report.record import RunRecord
    from selftask.report.run_report import write_run_report

    record = RunRecord.read(local_run(runs[0]))
    path = write_run_report(record, Path(outs[0]).expanduser() if outs else None)
    print(path)
    return 0
