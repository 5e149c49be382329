"""Entry point of ``python -m selftask`` and of the script ``selftask``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from selftask.cli.main import main

PRINTING = ("plan", "model-summary")  # commands that import torch but only print


def run() -> NoReturn:
    """Run the command of ``sys.argv`` and exit with its exit code.

    Commands that only print exit without freeing memory, since freeing the objects of torch takes
    about half as long as importing it.
    """
    code = main()
    if sys.argv[1:2] and sys.argv[1] in PRINTING:
        _leave_at_once(code)
    sys.exit(code)


def _leave_at_once(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `selftask plan simclr | head`: the reader has exited
        code = 1
    os._exit(code)


if __name__ == "__main__":
    run()
