"""``selftask repro``: compare the current environment with that of a run."""

from __future__ import annotations

from pathlib import Path

from selftask.cli.options import is_setting
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError, printable_line

USAGE = f"""\
usage: selftask repro RUN [import=[MODULE]]

Compares packages, code, machine and config of the run with those here, and prints the commands that
repeat it. Exit code 1 if anything differs. The commands run what the run names: read them first.
import=[MODULE]  a plug-in of the run
{TRUST}"""

SHOWN = 20  # largest number of differences printed for a topic


def main(argv: list[str]) -> int:
    """Print the differences and the commands that repeat the run; return 1 if anything differs."""
    words, trust = take_trust(argv)
    typed = [word for word in words if word.startswith("import=")]
    words = [word for word in words if word not in typed]
    if len(words) != 1 or is_setting(words[0]):
        raise UserError(f"repro needs one RUN\n{USAGE}")
    from selftask.run.reproduction import command, differences, read_environment

    run = Path(words[0])
    there = read_environment(run)
    topics = differences(run, typed, trust=trust)
    for topic, lines in topics.items():
        print(f"{topic}: {'the same' if not lines else ''}".rstrip())
        for line in lines[:SHOWN]:
            print(f"  {printable_line(line)}")
        if len(lines) > SHOWN:
            print(f"  and {len(lines) - SHOWN} more")
    if "config" not in topics:
        print("config: not compared; the run was not started by `selftask train RECIPE`")
    print("to repeat it:")
    for line in command(run, there):
        print(f"  {printable_line(line)}")
    return 1 if any(topics.values()) else 0
