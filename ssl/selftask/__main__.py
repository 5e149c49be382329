"""``python -m selftask``, and the script ``selftask``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from selftask.cli.main import main

PRINTING = ("plan", "model-summary")  # commands that import torch, print, and start nothing


def run() -> NoReturn:
    """Run the command of ``sys.argv`` and leave the process with its exit code.

    To free each object of torch takes as long as to import half of it, so that commands which only
    print leave at once.
    """
    code = main()
    if sys.argv[1:2] and sys.argv[1] in PRINTING:
        _leave_at_once(code)
    sys.exit(code)


def _leave_at_once(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `selftask plan simclr | head`: nobody reads on
        code = 1
    os._exit(code)


if __name__ == "__main__":
    run()
