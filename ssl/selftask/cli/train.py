"""``selftask train``: train, or resume the run in ``out``."""

from __future__ import annotations

from selftask.cli.options import needs_first
from selftask.cli.verbosity import USAGE as VERBOSITY

USAGE = f"""\
usage: selftask train RECIPE [key=value ...]

Trains a recipe; key=value overrides its values. The same command again resumes the run.

  selftask train simclr data=my_images out=runs/mine train.epochs=100 optimizer.lr=0.01

out=DIR is the run folder; `selftask config RECIPE` shows every key and its value. Others often set:
backbone, image_size, train.batch_size, data.num_workers, launch.processes.
A list with commas (train.seed=1,2,3) is a sweep: each run has its own folder below out, and
launch.parallel_runs=2 trains two at a time.
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Check the config and the data before torch is imported, then train; return the exit code.

    Runs of a sweep, and the ranks of ``launch.processes``, are started as processes of their own.
    """
    needs_first(argv, "train needs a RECIPE", USAGE)
    from selftask.config.checks.locations import check_not_moved
    from selftask.config.compose.sweep import expand_sweep
    from selftask.config.load import load_config
    from selftask.data.loading.open_data import check_data, open_data
    from selftask.logs.startup import lap
    from selftask.run.early_errors import report_early_errors
    from selftask.run.local_ranks import own_command, start, starts_ranks

    points = expand_sweep(argv[1:])
    if len(points) > 1:
        from selftask.run.local_sweep import train_sweep

        return train_sweep(argv[0], points)
    config = load_config(argv[0], argv[1:])
    check_not_moved(argv[0], config)
    lap("config")
    with report_early_errors(config.out_folder):
        sources = open_data(config.data)
        check_data(config, sources.train)
        lap("data")

        if starts_ranks(config):
            return start(config, own_command(argv))

        from selftask.run.run import run  # imports torch, so only after the config is checked

        lap("imports")
        return run(config, sources)
