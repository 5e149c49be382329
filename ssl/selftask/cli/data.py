"""``selftask data``: inspect images before training on them."""

from __future__ import annotations

import importlib

from selftask.cli.options import HELP, asks_for_help
from selftask.errors import UserError, nearest

COMMANDS = {
    "check": (
        "selftask.cli.inspect_data.check",
        "read every image: what is broken, what is a duplicate?",
    ),
    "stats": ("selftask.cli.inspect_data.stats", "mean and std of the pixels, sizes of the images"),
    "show": ("selftask.cli.inspect_data.show", "an image of the views that the network sees"),
}  # name -> module with USAGE and main(argv) -> exit code, description in one line

USAGE = """\
usage: selftask data check SOURCE [--workers N] [--out FILE] [--json] [key=value ...]
       selftask data stats SOURCE [--workers N] [--max N] [--seed 0] [--json] [key=value ...]
       selftask data show  RECIPE [--images 8] [--out views.png] [key=value ...]

SOURCE is what data= takes: a folder, list.txt, x.npz, torchvision:CIFAR10, package.module:Dataset.
`selftask data COMMAND --help` says more."""


def main(argv: list[str]) -> int:
    """Run ``data check``, ``stats`` or ``show``."""
    if not argv or argv[0] in HELP:
        print(USAGE)
        return 0
    if argv[0] not in COMMANDS:
        hint = nearest(argv[0], COMMANDS)
        raise UserError(f"there is no command `data {argv[0]}`; {hint}\n{USAGE}")
    command = importlib.import_module(COMMANDS[argv[0]][0])
    if asks_for_help(argv):
        print(command.USAGE)
        return 0
    return int(command.main(argv[1:]))
