"""``selftask report``: a run as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from selftask.cli.model.load_model import take
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError

if TYPE_CHECKING:
    from selftask.report.page import Section

USAGE = f"""\
usage: selftask report RUN [out=FILE] [images=1000]

Writes one HTML page with what ran, a verdict, curves, events and config: report.html in the run
folder, or FILE. It needs no network and also works while the run goes on.
It shows images, too: the views of training, and of the newest weights nearest neighbours, a map
of the embeddings, accuracy by class, patch tokens of vision transformers and reconstructions.
They are kept in RUN/report, so that a second report of the same weights takes a second.
images=N      the number of images that features are computed of; images=false leaves them out
{TRUST}"""


def main(argv: list[str]) -> int:
    """Write the page and print its path and the verdict."""
    words, trust = take_trust(argv)
    out, words = take("out", words)
    asked, words = take("images", words)
    if len(words) != 1 or "=" in words[0]:
        raise UserError(f"report needs one RUN\n{USAGE}")
    from selftask.checkpoint.mirror import local_run
    from selftask.report.record import RunRecord
    from selftask.report.run_report import write_run_report

    record = RunRecord.read(local_run(words[0]))
    more = _image_sections(record.folder, _number(asked), trust=trust)
    path = write_run_report(record, Path(out).expanduser() if out else None, more=more)
    print(path)
    return 0


def _number(asked: str | None) -> int | None:
    """Return the value of ``images=``: 0 for none, None if it is not given."""
    if asked is None or asked == "true":
        return None
    if asked == "false":
        return 0
    if not asked.isdecimal():
        raise UserError(f"images={asked}: expected a number of images, such as 1000, or false")
    return int(asked)


def _image_sections(run: Path, images: int | None, *, trust: bool) -> list[Section]:
    """Return the sections with images; prints progress to stderr. 0 images: none."""
    if images == 0:
        return []
    from selftask.report.images.sections import DEFAULT_IMAGES, ImageSections

    def tell(text: str) -> None:
        print(f"report: {text}", file=sys.stderr, flush=True)

    made = ImageSections(run=run, images=images or DEFAULT_IMAGES, trust=trust, tell=tell)
    return made.make()
