"""``selftask data``: inspect images before training on them."""

from __future__ import annotations

from selftask.cli.options import HELP, run_subcommand
from selftask.errors import check_known

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
    """Run ``data check``, ``stats`` or ``show``, or print the usage; return the exit code."""
    if not argv or argv[0] in HELP:
        print(USAGE)
        return 0
    check_known(argv[0], COMMANDS, f"there is no command `data {argv[0]}`")
    return run_subcommand(COMMANDS, argv)
