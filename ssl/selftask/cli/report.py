"""``selftask report``: write the HTML report of a run, or a comparison of several runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from selftask.cli.options import take
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError, nearest_path, printable_line
from selftask.files.paths import exists, is_folder

if TYPE_CHECKING:
    from selftask.report.page import Section

_MOST_PAIRS = 10  # printed; the page has all of them
USAGE = f"""\
usage: selftask report RUN [out=FILE] [images=1000]
       selftask report RUN RUN ... [sort=METRIC] [out=FILE]
       selftask report FOLDER_OF_RUNS [sort=METRIC] [out=FILE]

Writes one HTML page with what ran, a verdict, curves, events and config: report.html in the run
folder, or FILE. It needs no network and also works during the run.
It also shows the training views and, computed with the newest weights: nearest neighbors, a map
of the embeddings, accuracy by class, patch tokens of vision transformers, reconstructions.
They are kept in $SELFTASK_CACHE/report, so that a second report of the same weights takes a second.
images=N      the number of images whose features are computed; images=false: no images at all
{TRUST}

With several runs, or a folder of runs, the page compares them: a ranking (sort=knn_top1, or a click
on a column), mean and 95 % interval over seeds, cost, differences between the configs, overlaid
curves. Of results of `selftask eval` on the same test images it says whether two runs differ. It is
report.html in their common parent folder. Runs without a report of their own get one, without
images."""


def main(argv: list[str]) -> int:
    """Write the page, and print its path after a verdict on one run or a comparison of several."""
    words, trust = take_trust(argv)
    out, words = take("out", words)
    asked, words = take("images", words)
    sort, words = take("sort", words)
    if not words or any("=" in word and not exists(word) for word in words):
        raise UserError(f"report needs a RUN\n{USAGE}")
    from selftask.checkpoint.mirror import local_run
    from selftask.files import addresses
    from selftask.report.record import RunRecord
    from selftask.report.run_report import NAME, write_run_report
    from selftask.report.verdict import verdict_of

    path = Path(out).expanduser() if out else None
    places = [Path(local_run(word)) for word in words]
    folders = [run for place in places for run in _runs_in(place)]
    if len(folders) > 1:
        if asked not in (None, "false"):
            raise UserError(f"images={asked}: is for one run, and there are {len(folders)}")
        return _compare(list(dict.fromkeys(folders)), path, sort or "")
    if sort:
        raise UserError(f"sort={sort}: is for several runs, and there is one: {folders[0]}")
    record = RunRecord.read(folders[0])
    target = path or record.folder / NAME
    with _written(str(target)):  # fail before features are computed for minutes
        TemporaryFile(dir=target.absolute().parent).close()
    more = _image_sections(record.folder, asked or "true", trust=trust)
    with _written(str(target)):
        made = write_run_report(record, path, more=more)
    print(printable_line(f"{record.name}: {verdict_of(record).headline}"))
    if addresses.is_remote(words[0]) and not out:
        address = f"{words[0].rstrip('/')}/{NAME}"
        addresses.upload(made, address)
        print(printable_line(address))
    else:
        print(printable_line(str(made)))
    return 0


def _runs_in(folder: Path) -> list[Path]:
    """Return ``folder`` if it is a run folder, or else all run folders below it.

    Raises UserError if there is none.
    """
    from selftask.report.overview.find import find_runs
    from selftask.report.record import is_run

    if not is_folder(folder):
        raise UserError(f"{folder}: there is no such run; {nearest_path(folder)}")
    runs = [folder] if is_run(folder) else find_runs(folder).runs
    if not runs:
        raise UserError(f"{folder}: not a run folder, and there are no runs below it")
    return runs


@contextmanager
def _written(name: str) -> Iterator[None]:
    """Context that raises UserError if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: cannot be written ({error.strerror or error})") from error


def _compare(folders: list[Path], out: Path | None, sort: str) -> int:
    from selftask.report.compare.comparison_page import best_line, pairs_of, write_comparison
    from selftask.report.record import RunRecord
    from selftask.report.run_report import NAME, write_run_report

    path = out or Path(os.path.commonpath([folder.absolute().parent for folder in folders])) / NAME
    for folder in folders:
        if not (folder / NAME).exists():
            with suppress(OSError):  # a run of somebody else: the comparison has no link to it
                write_run_report(RunRecord.read(folder))
    with _written(str(path)):
        comparison = write_comparison(folders, path, sort)
    if line := best_line(comparison):
        print(printable_line(line))
    for pair in pairs_of(comparison)[:_MOST_PAIRS]:
        print(printable_line(pair.text))
    print(printable_line(str(path)))
    return 0


def _image_sections(run: Path, asked: str, *, trust: bool) -> list[Section]:
    """Return the sections with images; print progress to stderr.

    ``asked`` is the value of ``images=``: ``true``, ``false`` (no sections) or a number of images.
    """
    if asked == "false":
        return []
    if asked != "true" and not asked.isdecimal():
        raise UserError(f"images={asked}: expected a number of images, such as 1000, or false")
    from selftask.report.images.sections import DEFAULT_IMAGES, ImageSections

    def tell(text: str) -> None:
        print(printable_line(f"report: {text}"), file=sys.stderr, flush=True)

    images = DEFAULT_IMAGES if asked == "true" else int(asked)
    return ImageSections(run=run, images=images, trust=trust, tell=tell).make()
