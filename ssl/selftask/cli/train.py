"""``selftask train``: train, or go on with the run in ``out``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selftask.errors import UserError
from selftask.world import read_world

if TYPE_CHECKING:
    from selftask.config.schema import Config

USAGE = """\
usage: selftask train RECIPE [key=value ...]

Trains what the recipe says, with key=value on top; the same command again goes on after a stop.
The run's folder is out=DIR; `selftask config RECIPE` shows every key and its value."""


def main(argv: list[str]) -> int:
    """Check all that can be checked without torch, then train."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    if not argv or "=" in argv[0]:
        raise UserError(f"train needs a RECIPE before any key=value\n{USAGE}")
    from selftask.config.load import load_config
    from selftask.data.dataset import check_sizes, open_data

    config = load_config(argv[0], argv[1:])
    sources = open_data(config.data)
    check_sizes(config, sources.train)

    if starts_ranks(config):
        from selftask.launch import local

        return local.start(config, local.own_command(argv))

    from selftask.launch.run import run  # imports torch: not before the config is known to be right

    return run(config, sources)


def starts_ranks(config: Config) -> bool:
    """Whether this process is to start the ranks, and not to be one.

    Raises UserError if the launcher around this process has started another number of ranks than
    the config asks for.
    """
    world, asked = read_world(), config.launch.world_size
    if world.launcher != "python" or asked == 1:
        if asked not in (1, world.size):
            raise UserError(
                f"launch.nodes x launch.processes is {asked}, but {world.launcher} has started "
                f"{world.size} processes; leave launch out, or make it {world.size}"
            )
        return False
    if config.launch.nodes > 1:
        raise UserError(
            f"launch.nodes={config.launch.nodes}: this command starts processes on one machine; "
            "use `selftask submit`, srun, or torchrun on each node"
        )
    return True
