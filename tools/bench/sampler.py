"""Start-up time and memory of an epoch's order: selftask's sampler and others.

    python tools/bench/sampler.py [--sizes 1e6,1e7,1e8,1e9] [--world 8] [--rounds 3] [--all]
    python tools/bench/sampler.py --prove [--sizes 1e9] [--ranks 4096]

``first`` is the CPU time until rank 0 has the first index of epoch 1, and ``resume`` until it has
the middle one. ``memory`` is the peak memory for it, and ``each`` the CPU time of every further
index. Each figure is measured in a separate process, forked from one that has imported everything.
Each round runs every entry once, and medians are shown.

    selftask     BatchSampler over FeistelOrder, batches of 64
    distributed  torch.utils.data.DistributedSampler; to resume, it is read up to there
    random       torch.utils.data.RandomSampler over all samples
    epoch        one seeded permutation, of which each rank takes every W-th (as in DINOv2)
    shard        a permutation of the rank's own fixed W-th part (as in VISSL)
    mmengine     mmengine's DefaultSampler, if installed

Above 1e7 only selftask is measured unless --all is given, since the others need gigabytes.

--prove reads a whole epoch, rank by rank, and checks in a table of one byte per sample that each
sample occurs exactly once.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.data.sampling.sampler import BatchSampler, Pool
from selftask.data.sampling.shuffled import Shuffled

BATCH = 64  # per rank
MAX_OF_OTHERS = 10**7
MORE = 100_000  # number of indices read to time one

Entry = Callable[[int, int, int], Iterator[int]]  # n, world size, start: this rank's indices


def of_selftask(n: int, world: int, start: int) -> Iterator[int]:
    sampler = Shuffled(None, Pool(n, BATCH * world, seed=0))
    steps = BatchSampler(sampler).steps_per_epoch
    batches = BatchSampler(sampler, world_size=world, start=steps + start // BATCH)
    return (index for batch in batches for _, index in batch)


def of_distributed(n: int, world: int, start: int) -> Iterator[int]:
    sampler = DistributedSampler(range(n), num_replicas=world, rank=0)
    sampler.set_epoch(1)
    return itertools.islice(iter(sampler), start, None)


def of_random(n: int, world: int, start: int) -> Iterator[int]:
    del world
    generator = torch.Generator().manual_seed(1)
    return itertools.islice(iter(RandomSampler(range(n), generator=generator)), start, None)


def of_epoch(n: int, world: int, start: int) -> Iterator[int]:
    order = np.random.default_rng(1).permutation(n)
    return (int(index) for index in itertools.islice(order, start * world, None, world))


def of_shard(n: int, world: int, start: int) -> Iterator[int]:
    indices = torch.arange(0, n, world)
    generator = torch.Generator().manual_seed(1)
    return iter(indices[torch.randperm(len(indices), generator=generator)].tolist()[start:])


def of_mmengine(n: int, world: int, start: int) -> Iterator[int]:
    from mmengine.dataset import DefaultSampler

    sampler = DefaultSampler(range(n))
    sampler.world_size, sampler.num_samples = world, -(-n // world)
    sampler.set_epoch(1)
    return itertools.islice(iter(sampler), start, None)


ENTRIES: dict[str, Entry] = {
    "selftask": of_selftask,
    "distributed": of_distributed,
    "random": of_random,
    "epoch": of_epoch,
    "shard": of_shard,
    "mmengine": of_mmengine,
}


def measure(name: str, n: int, world: int) -> tuple[float, ...]:
    """Return seconds to the first index and to resume, bytes, and seconds per index."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        first, _, memory = begin(ENTRIES[name], n, world, 0)
        resume, indices, _ = begin(ENTRIES[name], n, world, n // world // 2 // BATCH * BATCH)
        started = time.process_time()
        read = sum(1 for _ in itertools.islice(indices, MORE))
        sender.send((first, resume, memory, (time.process_time() - started) / max(read, 1)))

    process = context.Process(target=work)
    process.start()
    process.join()
    if not receiver.poll():
        return (float("nan"),) * 4
    figures: tuple[float, ...] = receiver.recv()
    return figures


def begin(entry: Entry, n: int, world: int, start: int) -> tuple[float, Iterator[int], int]:
    """Return CPU seconds to the index at ``start``, the iterator after it, and peak bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    before = _memory("VmRSS")
    started = time.process_time()
    indices = entry(n, world, start)
    next(indices)
    return time.process_time() - started, indices, _memory("VmHWM") - before


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def compare(sizes: list[int], world: int, rounds: int, everybody: bool) -> None:
    """Print the table: sizes in order, entries in turn."""
    installed = {n for n in ENTRIES if n != "mmengine" or importlib.util.find_spec("mmengine")}
    print(f"rank 0 of {world}; medians of {rounds} rounds; load {os.getloadavg()[0]:.1f}")
    head = ("first, ms", "resume, ms", "memory, MB", "each, ns")
    print(f"{'samples':<9}{'':<12}" + "".join(f"{word:>12}" for word in head))
    for n in sizes:
        names = [name for name in ENTRIES if name in installed]
        if n > MAX_OF_OTHERS and not everybody:
            names = names[:1]
        taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                taken[name].append(measure(name, n, world))
        for name, figures in taken.items():
            values = [statistics.median(column) for column in zip(*figures, strict=True)]
            scaled = [v * f for v, f in zip(values, (1e3, 1e3, 1e-6, 1e9), strict=True)]
            print(f"{n:<9.0e}{name:<12}" + "".join(f"{value:>12.1f}" for value in scaled))


def prove(n: int, ranks: int) -> None:
    """Read the part of every rank of an epoch, and check that every sample occurs exactly once."""
    sampler = Shuffled(None, Pool(n, BATCH * ranks, seed=0))
    steps = BatchSampler(sampler).steps_per_epoch
    order = sampler.order(1)
    seen = np.zeros(n, dtype=np.uint8)
    started = time.process_time()
    shown = 0
    for rank in range(ranks):
        places = rank * BATCH + np.arange(BATCH)
        for first in range(0, steps, 128):
            batches = np.arange(first, min(first + 128, steps))
            indices = order.at(batches[:, None] * (BATCH * ranks) + places)
            seen[indices] += 1
            shown += indices.size
        if rank % max(1, ranks // 16) == 0:
            print(f"rank {rank} of {ranks}: {time.process_time() - started:.0f} s", flush=True)
    left_over = order.at(np.arange(steps * BATCH * ranks, n))
    assert not seen[left_over].any(), "what fills no batch was shown"
    seen[left_over] += 1
    counts = np.bincount(seen, minlength=2)
    assert counts.tolist() == [0, n], f"how often samples came: {counts.tolist()}"
    print(
        f"{n:,} samples, {ranks:,} ranks, {steps:,} steps: {shown:,} samples came exactly once, "
        f"the other {n - shown:,} fill no batch ({time.process_time() - started:.0f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", help="numbers of samples; 1e6,1e7,1e8,1e9, or 1e9 to prove")
    parser.add_argument("--world", type=int, default=8, help="ranks, of which the first is timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="all entries at every size")
    parser.add_argument("--prove", action="store_true", help="go through a whole epoch")
    parser.add_argument("--ranks", type=int, default=4096, help="of --prove")
    args = parser.parse_args()
    default = "1e9" if args.prove else "1e6,1e7,1e8,1e9"
    sizes = [int(float(size)) for size in (args.sizes or default).split(",")]
    if args.prove:
        for n in sizes:
            prove(n, args.ranks)
    else:
        compare(sizes, args.world, args.rounds, args.all)


if __name__ == "__main__":
    main()
