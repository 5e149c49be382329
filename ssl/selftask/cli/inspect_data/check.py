"""``selftask data check``: read every image once and report problems."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from selftask.cli.inspect_data.inspect_commands import CountDone, open_for_survey
from selftask.cli.options import take_options
from selftask.config.trust import TRUST
from selftask.errors import UserError
from selftask.files.paths import is_folder

USAGE = f"""\
usage: selftask data check SOURCE [--workers N] [--out FILE] [--html FILE] [--json] [key=value ...]

Reads every image of SOURCE (what data= takes) in N processes (default: one for each core), as
training would, and reports formats, modes, sizes, duplicates by content and what cannot be read.
--out FILE   writes what cannot be read, one `path<TAB>reason` a line
--html FILE  writes a page with thumbnails of the duplicates
--json       prints the report as one line of JSON instead
data.max_pixels=N, data.read_timeout_s=S, ... are set as for training.
{TRUST}
Exit code 0: all can be read; 1: some cannot. The last line begins with CHECK."""

OPTIONS = {"--workers": int, "--out": str, "--html": str, "--json": bool}


def main(argv: list[str]) -> int:
    """Read all images; return 1 if one cannot be read."""
    words, options = take_options(argv, OPTIONS)
    out, page = (Path(options[key]) if key in options else None for key in ("--out", "--html"))
    for key, path in (("--out", out), ("--html", page)):
        if path is not None and not is_folder(path.absolute().parent):
            raise UserError(f"{key} {path}: there is no folder {path.absolute().parent}")
    survey = open_for_survey("check", words, options.get("--workers"), USAGE)

    from selftask.data.inspect.check import check, lines_of, verdict

    with CountDone("read", len(survey.source)) as count:
        report = check(survey.source, survey.num_workers, progress=count)
    if out is not None:
        lines = (os.fsencode(f"{bad.path}\t{bad.reason}\n") for bad in report.unreadable)
        out.write_bytes(b"".join(lines))  # as in a run's bad_files.txt
    if page is not None:
        from selftask.report.images.copies import write_copies

        write_copies(page, f"Duplicates of {survey.name}", survey.source, report.copies)
    if options.get("--json"):
        print(json.dumps({"source": survey.name, **report.to_dict()}))
    else:
        shown = [f"{'source':<11}{survey.name}", *lines_of(report)]
        for line in [*shown, verdict(report, survey.config)]:
            sys.stdout.buffer.write(os.fsencode(line) + b"\n")  # file names may be invalid UTF-8
        sys.stdout.flush()
    return 1 if report.unreadable else 0
