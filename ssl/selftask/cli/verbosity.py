"""``--quiet`` and ``--verbose`` of long-running commands."""

from __future__ import annotations

import sys

from selftask.errors import UserError
from selftask.logs.verbosity import is_verbose

TALKATIVE = ("train", "adapt", "eval", "finetune", "export", "features", "submit")
OPTIONS = {"--quiet": "quiet", "-q": "quiet", "--verbose": "verbose", "-v": "verbose"}
USAGE = """\
-q, --quiet   print errors and the result only; log.txt is still complete
-v, --verbose also print versions, the origin of each value, and how long start-up takes"""

_SHOWN = ("torch", "torchvision", "timm", "numpy", "hydra-core", "submitit")


def take_verbosity(argv: list[str]) -> tuple[list[str], str | None]:
    """Return the words without these options, and ``quiet``, ``verbose`` or None.

    Raises:
        UserError: If both options are given.
    """
    asked = {OPTIONS[word] for word in argv if word in OPTIONS}
    if len(asked) > 1:
        raise UserError("--quiet and --verbose: give one of them")
    return [word for word in argv if word not in OPTIONS], next(iter(asked), None)


def print_versions() -> None:
    """Print the versions of selftask, Python and the main dependencies to stderr, if verbose."""
    if not is_verbose():
        return
    import platform

    from selftask import __version__
    from selftask.cli.env import installed_version  # slow: takes as long as the rest of --help

    versions = [f"selftask {__version__}", f"python {platform.python_version()}"]
    versions += [f"{name} {installed_version(name) or 'missing'}" for name in _SHOWN]
    print(f"versions: {', '.join(versions)}", file=sys.stderr, flush=True)
