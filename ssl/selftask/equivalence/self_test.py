"""Self-test of the collectives between the processes of this machine (``selftask env``)."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from selftask.equivalence.on_ranks import on_ranks
from selftask.errors import RunError

_MIB = 64  # of the tensor whose exchange is timed
_TIMEOUT_S = 60.0


def check_collectives() -> str:
    """Test collectives between all GPUs if there are several, else between two CPU processes.

    Returns:
        A summary in one line, with the rate of an all_reduce.

    Raises:
        RunError: If a collective fails, hangs or gives a wrong result; the message names the ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend, ranks = ("nccl", gpus) if gpus > 1 else ("gloo", 2)
    took = max(on_ranks(exchange, ranks, timeout_s=_TIMEOUT_S, backend=backend))
    rate = _MIB / 2**10 / took
    return (
        f"{backend}, {ranks} ranks: results are right; all_reduce of {_MIB} MiB: {rate:.1f} GiB/s"
    )


def exchange(rank: int) -> float:
    """Check the results of collectives, and return the time of an all_reduce in seconds.

    Every rank of the default process group must call this function.

    Raises:
        RunError: If a result is wrong.
    """
    size = dist.get_world_size()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    mine = torch.full((3,), float(rank + 1), device=device)
    total, first, every = mine.clone(), mine.clone(), mine.new_empty(size * 3)
    dist.all_reduce(total)
    dist.broadcast(first, 0)
    dist.all_gather_into_tensor(every, mine)
    expected = torch.arange(1.0, size + 1, device=device)
    for name, value, right in (
        ("all_reduce", total, expected.sum().expand(3)),
        ("broadcast", first, expected[:1].expand(3)),
        ("all_gather", every, expected.repeat_interleave(3)),
    ):
        if not torch.equal(value, right):
            raise RunError(f"{name} gave {value.tolist()}; {right.tolist()} is right")
    large = torch.ones(_MIB * 2**18, device=device)
    dist.all_reduce(large)  # the first one sets up connections
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(large)
    float(large[0])  # waits for the device
    return time.perf_counter() - started
