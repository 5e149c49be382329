"""Train from a checkout: ``python tools/train.py simclr out=runs/mine``; again: resume.

The steps of ``selftask train``, as a script to modify.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ssl"))

from selftask.cli.main import guarded
from selftask.config.load import load_config
from selftask.data.loading.open_data import check_data, open_data
from selftask.run.early_errors import report_early_errors
from selftask.run.local_ranks import start, starts_ranks


def main(argv: list[str]) -> int:
    """Read the config, open the data and train; return the exit code."""
    config = load_config(argv[0] if argv else "simclr", argv[1:])
    with report_early_errors(config.out):
        sources = open_data(config.data)
        check_data(config, sources.train)

        if starts_ranks(config):
            return start(config, [sys.executable, *sys.argv])

        from selftask.run.run import run

        return run(config, sources)


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
