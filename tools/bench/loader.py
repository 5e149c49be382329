"""What worker processes cost beyond the augmentation itself: collating, handing over, receiving.

    python tools/bench/loader.py [--workers 2] [--batch 32] [--batches 20] [--rounds 5]

The views are those of ``augment.py simclr``: two of 224 from JPEGs in memory. Figures are CPU time
per image of all processes together, by the difference between a long and a short pass, so that
starting the workers does not count; entries take turns. ``here`` makes the same views in the main
process and does nothing else with them; ``beyond`` is what an entry takes more than that.

    selftask    bytes from the workers, floats on arrival (the floats are counted)
    bytes       the same without the floats, as where a GPU makes them
    floats      normalised float32 from the workers by torch's DataLoader: how others do it
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

import numpy as np
import torch
from augment import CONTESTS, jpegs, view_configs
from torch.utils.data import DataLoader, Dataset

from selftask.data.dataset import ViewDataset
from selftask.data.image import decode_image
from selftask.data.loader import Batches
from selftask.data.source import NO_LABEL, Source
from selftask.data.views import Views


class InMemory(Source):
    """JPEGs in memory, over and over."""

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


class Floats(Dataset[list[torch.Tensor]]):
    """Each view normalised where it is made."""

    def __init__(self, dataset: ViewDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        views = self.dataset[0, index].views
        batches = [torch.from_numpy(view)[None] for view in views]
        return [make(b)[0] for make, b in zip(self.dataset.to_float, batches, strict=True)]


class Contest:
    def __init__(self, workers: int, batch: int) -> None:
        self.workers, self.batch = workers, batch
        self.dataset = ViewDataset(InMemory(100_000), Views(view_configs(CONTESTS["simclr"])), 0)

    def here(self) -> Iterator[Any]:
        for index in range(10**6):
            views = self.dataset[0, index].views
            if index % self.batch == self.batch - 1:
                yield views

    def selftask(self) -> Iterator[Any]:
        batches = Batches(self.dataset, batch_size=self.batch, seed=0, num_workers=self.workers)
        try:
            yield from batches
        finally:
            batches.close()

    def bytes(self) -> Iterator[Any]:
        batches = Batches(self.dataset, batch_size=self.batch, seed=0, num_workers=self.workers)
        batches.start(0)
        assert batches._reader is not None
        try:
            yield from batches._reader
        finally:
            batches.close()

    def floats(self) -> Iterator[Any]:
        loader = DataLoader(Floats(self.dataset), self.batch, num_workers=self.workers)
        yield from loader


def cpu_seconds() -> float:
    """Of this process and of those children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def spend(make: Callable[[], Iterator[Any]], batches: int) -> float:
    """CPU seconds of a pass of so many batches, workers included."""
    start = cpu_seconds()
    iterator = make()
    for _ in range(batches):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    del iterator
    return cpu_seconds() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    contest = Contest(args.workers, args.batch)
    entries = {name: getattr(contest, name) for name in ("here", "selftask", "bytes", "floats")}
    times: dict[str, list[float]] = {name: [] for name in entries}
    names = list(entries)
    for turn in range(args.rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            short, long = (spend(entries[name], n * args.batches) for n in (1, 3))
            times[name].append(1e3 * (long - short) / (2 * args.batches * args.batch))
    alone = statistics.median(times["here"])
    least = min(times["here"])
    print(f"{args.workers} workers, batches of {args.batch}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':12}{'ms/image':>10}{'beyond':>10}{'least':>10}{'beyond':>10}")
    for name, found in times.items():
        middle, low = statistics.median(found), min(found)
        print(f"{name:12}{middle:10.3f}{middle - alone:10.3f}{low:10.3f}{low - least:10.3f}")


if __name__ == "__main__":
    main()
