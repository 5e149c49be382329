"""``selftask replay``: repeat a dumped step and find where NaN or infinity first occurs."""

from __future__ import annotations

from pathlib import Path

from selftask.cli.options import is_setting
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError, printable_line

USAGE = f"""\
usage: selftask replay RUN/failures/step_N [key=value ...]

Repeats the step of a run in which loss or gradient was not finite, on one process: the state
before it, the batches of all ranks, the random states. Names images and weights that are not
finite, the first module whose output is not, and gradients. The loss of a run of one process on a
CPU is the same bit for bit. data=... if the images have moved; they are opened, not read.
Exit code 1: the loss differs from that of the run.
import=[MODULE]  a plug-in of the run
{TRUST}"""


def main(argv: list[str]) -> int:
    """Print the report; return 1 if the loss differs from the recorded one."""
    words, trust = take_trust(argv)
    folders = [word for word in words if not is_setting(word)]
    if len(folders) != 1:
        raise UserError(f"replay needs one folder\n{USAGE}")
    from selftask.task.replay import replay  # takes seconds to import

    result = replay(Path(folders[0]), [word for word in words if is_setting(word)], trust=trust)
    print("\n".join(map(printable_line, result.lines())))
    return 0 if result.same else 1
