"""Commands that torchrun, srun or mpirun has started several times."""

from __future__ import annotations

import sys

from selftask.distributed.world import read_world
from selftask.errors import UserError


def refuse_ranks(command: str) -> None:
    """End this process if it is one of several ranks: raise UserError on rank 0, else exit.

    Args:
        command: The command, which would do its work once on each rank.
    """
    world = read_world()
    if world.size == 1:
        return
    if world.rank:
        sys.exit(UserError.exit_code)  # one message is enough
    raise UserError(
        f"{command} runs in one process, and {world.launcher} has started {world.size}; start it "
        "without the launcher (train, finetune, features and eval knn|linear|svm share the work)"
    )
