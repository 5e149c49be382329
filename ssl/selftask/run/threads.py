"""Number of torch's CPU threads of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from selftask.config.schema import Config
from selftask.config.values.auto_values import cores


def num_threads(config: Config, local_size: int = 1) -> int:
    """Return the number of torch's CPU threads per process.

    On a CPU, ``auto`` leaves a quarter of the process's cores free, at least one, for the loader:
    making views takes 0.5 to 5 % of the CPU time of training (``tools/bench/threads.py``). The
    value does not depend on the number of workers, since results depend on it bit for bit. More
    threads than free cores are several times slower: threads synchronize at every operation, so
    all of them wait for one that has lost its core to a worker.

    With an accelerator, ``auto`` uses the cores that the workers leave free.

    Args:
        config: The config of the run.
        local_size: Number of ranks on this machine.
    """
    threads = config.train.threads
    if threads != "auto":
        return int(threads)
    share = cores() // local_size
    if config.train.device != "cpu" and torch.accelerator.is_available():
        return max(1, share - config.data.num_workers)
    return max(1, share - max(1, share // 4))


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Context with ``number`` CPU threads of torch; a script has its own number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
