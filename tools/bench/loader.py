"""Cost of worker processes in addition to augmentation: collating, sending, receiving.

    python tools/bench/loader.py [--workers 2] [--batch 32] [--batches 2] [--rounds 40]

The views are those of ``augment.py simclr``: two of 224 from JPEGs in memory. Figures are CPU time
per image of all processes together, and mapped pages (minor faults), which do not depend on other
load. Workers exist for the whole run. Entries take turns; a turn begins and ends when all workers
are idle, so that exactly its batches are made in it. ``here`` makes the same views in as many
processes and discards them; ``beyond`` is the additional cost of an entry.

    selftask    bytes from the workers, floats on arrival (included in the time)
    bytes       the same without the floats, as with a GPU
    torch       the same bytes by torch's DataLoader and its default_collate
    floats      normalized float32 from the workers by torch's DataLoader, as in other libraries
    bytes-only, torch-only    as above with precomputed views that are copied: the cost of the
                loader only, which is not a noisy difference of two large figures
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

import numpy as np
import torch
from augment import CONTESTS, jpegs, view_configs
from torch.utils.data import DataLoader, Dataset

from selftask.data.loading.dataset import ViewDataset
from selftask.data.loading.loader import Batches
from selftask.data.loading.sample import Sample
from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.reading.image import decode_image
from selftask.data.source import Source
from selftask.data.views import Views
from selftask.distributed.device import keep_freed_memory

_IDLE_S = 0.005  # between two checks that a process is asleep


class InMemory(Source):
    """JPEGs in memory, repeated."""

    def __init__(self, count: int) -> None:
        self.files = jpegs(40)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return decode_image(self.files[index % len(self.files)], self.path(index)), NO_LABEL

    def path(self, index: int) -> str:
        return f"jpeg {index % len(self.files)}"

    def describe(self) -> str:
        return f"{self.count} JPEGs in memory"


class Ready(ViewDataset):
    """Data set that returns the precomputed views of image 0."""

    def __init__(self, dataset: ViewDataset) -> None:
        super().__init__(dataset.source, dataset.views, dataset.seed)
        self.made = dataset[0, 0]

    def sample(self, key: tuple[int, int], out: Sequence[np.ndarray] = ()) -> Sample:
        return self.made


class Bytes(Dataset[list[torch.Tensor]]):
    """Data set of the views as tensors."""

    def __init__(self, dataset: ViewDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.from_numpy(view) for view in self.dataset[0, index].views]


class Floats(Bytes):
    """Data set of views that are normalized in the worker."""

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        views = self.dataset[0, index].views
        batches = [torch.from_numpy(view)[None] for view in views]
        return [make(b)[0] for make, b in zip(self.dataset.to_float, batches, strict=True)]


class Here:
    """Processes that make the views of whole batches and discard them."""

    def __init__(self, dataset: ViewDataset, workers: int, batch: int) -> None:
        fork = multiprocessing.get_context("fork")
        self.batch = batch
        self.pipes = []
        for first in range(workers):
            mine, theirs = fork.Pipe()
            job = (dataset, theirs, range(first * batch, len(dataset)))
            fork.Process(target=self._work, args=job, daemon=True).start()
            self.pipes.append(mine)
        self.turn = 0

    def _work(self, dataset: ViewDataset, pipe: Any, indices: range) -> None:
        torch.set_num_threads(1)
        todo = iter(indices)
        while True:
            pipe.recv()
            for _ in range(self.batch):
                _ = dataset[0, next(todo)].views

    def __iter__(self) -> Iterator[None]:
        while True:
            self.pipes[self.turn].send(None)
            self.turn = (self.turn + 1) % len(self.pipes)
            yield


class Entry:
    """A loader with its processes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        others = set(multiprocessing.active_children())
        self.batches = iter(make())
        next(self.batches)
        workers = set(multiprocessing.active_children()) - others
        self.processes = [process.pid for process in workers if process.pid]
        self.found: list[tuple[float, float]] = []  # CPU seconds and faults of each turn

    def take(self, count: int) -> None:
        """Run one turn of ``count`` batches."""
        seconds, faults = self._spent()
        for _ in range(count):
            next(self.batches)
        then = self._spent()
        self.found.append((then[0] - seconds, then[1] - faults))

    def _spent(self) -> tuple[float, float]:
        """Return CPU seconds and minor faults of this process and its workers, once idle."""
        looks = 0
        while looks < 3:
            time.sleep(_IDLE_S)
            looks = 0 if any(map(_is_running, self._tasks())) else looks + 1
        everyone = [os.getpid(), *self.processes]
        seconds = sum(time.clock_gettime(_cpu_clock(process)) for process in everyone)
        return seconds, sum(int(_stat(Path(f"/proc/{process}"))[7]) for process in everyone)

    def _tasks(self) -> Iterator[Path]:
        """Yield all threads except this one; other threads of this process feed the queues."""
        for process in (os.getpid(), *self.processes):
            yield from Path(f"/proc/{process}/task").iterdir()


def _cpu_clock(process: int) -> int:
    """Return the CPU clock of a process, as defined in clock_getcpuclockid(3)."""
    return ~process << 3 | 2


def _stat(process: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; the first one is the state."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _is_running(task: Path) -> bool:
    return task.name != str(threading.get_native_id()) and _stat(task)[0] in "RD"


def bytes_of(batches: Batches) -> Iterator[Any]:
    """Return an iterator over received batches, before conversion to floats."""
    batches.start(0)
    assert batches._reader is not None
    return iter(batches._reader)


def entries(workers: int, batch: int) -> dict[str, Callable[[], Any]]:
    """Return functions that start each entry."""
    dataset = ViewDataset(InMemory(1_000_000), Views(view_configs(CONTESTS["simclr"])), 0)

    def ours(made: ViewDataset) -> Batches:
        return Batches(made, batch_size=batch, seed=0, num_workers=workers)

    def torchs(made: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(made, batch, num_workers=workers, prefetch_factor=3)

    return {
        "here": lambda: Here(dataset, workers, batch),
        "selftask": lambda: ours(dataset),
        "bytes": lambda: bytes_of(ours(dataset)),
        "torch": lambda: torchs(Bytes(dataset)),
        "floats": lambda: torchs(Floats(dataset)),
        "bytes-only": lambda: bytes_of(ours(Ready(dataset))),
        "torch-only": lambda: torchs(Bytes(Ready(dataset))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=2, help="of a turn")
    parser.add_argument("--only", nargs="+", default=[], help="entries, besides here")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    contest = {
        name: Entry(make)
        for name, make in entries(args.workers, args.batch).items()
        if name == "here" or not args.only or name in args.only
    }
    for turn in range(-2, args.rounds):  # the first two rounds are a warm-up
        for place in range(len(contest)):
            entry = list(contest.values())[(turn + place) % len(contest)]
            entry.take(args.batches)
            if turn < 0:
                entry.found.clear()
    images = args.batches * args.batch
    print(f"{args.workers} workers, batches of {args.batch}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':12}{'ms/image':>10}{'beyond':>10}{'least':>10}{'beyond':>10}{'faults':>10}")
    times = {
        name: np.array([1e3 * seconds / images for seconds, _ in entry.found])
        for name, entry in contest.items()
    }
    for name, own in times.items():
        here = np.zeros(args.rounds) if name.endswith("-only") else times["here"]
        beyond = np.median(own - here)  # within a round, with equal load for both
        faults = np.median([count for _, count in contest[name].found]) / images
        figures = (np.median(own), beyond, own.min(), own.min() - here.min(), faults)
        print(f"{name:12}" + "".join(f"{figure:10.3f}" for figure in figures))


if __name__ == "__main__":
    main()
