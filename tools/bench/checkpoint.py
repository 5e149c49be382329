"""Time for which saving a checkpoint blocks training: sync, async, and their lower bounds.

    python tools/bench/checkpoint.py [--megabytes 100,300,1000] [--rounds 5] [--device cpu]

The state resembles a network with AdamW: three times 160 tensors, half of them matrices, half
vectors. The loop runs equal small steps (matrix products) that share only the machine with the
state. Each round runs every entry once:

    memcpy      one copy of the bytes, in one piece, into allocated memory (pinned for a GPU):
                no consistent snapshot can block the loop for less time
    torch.save  into a file, as in many scripts: not durable, not atomic, no checksum
    sync        selftask with train.async_checkpoints=false: written, checksummed, on disk
    async       selftask's default: copied, and written by a thread
    process     the same write by another process with its own state: shows how much of the loop's
                loss is caused by the machine, and not by the thread that holds Python's lock

``call`` is the time for which the call blocks the loop. ``loop`` adds the slowdown of the steps
until the file is on disk, compared with steps before the call: the total loss of training. ``on
disk`` is the time until the file is on disk. ``ratio`` compares calls with memcpy: medians and
minima. ``first`` is the first call of an async writer, which also allocates the memory.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.checkpoint.writer import CheckpointWriter

QUIET_STEPS, PRODUCTS = 200, 40


@dataclass
class Times:
    """Seconds, one entry per round."""

    call: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    on_disk: list[float] = field(default_factory=list)


def make_state(megabytes: int, device: torch.device) -> dict[str, Any]:
    """Return a state of a model and two moments for each of its tensors."""
    weights = range(1, 81)
    vectors = 80 * 256
    unit = (megabytes * 1e6 / 4 / 3 - vectors) / sum(weights)
    shapes = [(max(1, int(unit * weight / 256)), 256) for weight in weights] + [(256,)] * 80
    return {
        part: {f"layer{n}": torch.randn(shape, device=device) for n, shape in enumerate(shapes)}
        for part in ("model", "exp_avg", "exp_avg_sq")
    }


def tensors(state: dict[str, Any]) -> Iterator[Tensor]:
    for part in state.values():
        yield from part.values()


class Loop:
    """Loop of equal steps of a few milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.matrix = torch.randn(128, 128, device=device)
        self.quiet()  # warm-up

    def step(self) -> float:
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            self.matrix @ self.matrix
        wait_for(self.device)
        return time.perf_counter() - start

    def quiet(self) -> float:
        """Return the mean seconds of a step while nothing is written, including disturbances."""
        return statistics.fmean(self.step() for _ in range(QUIET_STEPS))

    def lost(self, quiet: float, until: Callable[[], bool]) -> float:
        """Return the excess time of the steps over quiet ones, until ``until`` returns True."""
        lost = 0.0
        while not until():
            lost += self.step() - quiet
        return lost


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(loop: Loop, times: Times, save: Callable[[], None], done: Callable[[], bool]) -> None:
    """Run one turn: the call, then steps until the file is on disk."""
    gc.collect()
    quiet = loop.quiet()
    start = time.perf_counter()
    save()
    called = time.perf_counter() - start
    lost = loop.lost(quiet, done)
    times.call.append(called)
    times.loop.append(called + lost)
    times.on_disk.append(time.perf_counter() - start)


def write_when_told(pipe: Connection, megabytes: int, folder: Path) -> None:
    """Run the child process of the entry ``process``; answer when the file is on disk."""
    torch.set_num_threads(1)
    state = make_state(megabytes, torch.device("cpu"))
    writer = CheckpointWriter(folder, keep=1, background=False)
    writer.save(state, 0)
    pipe.send("ready")
    while pipe.recv():
        writer.save(state, 1)
        pipe.send("written")


class Child:
    """A process that writes a state of a given size."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, told = spawn.Pipe()
        self.process = spawn.Process(target=write_when_told, args=(told, megabytes, folder))
        self.process.start()
        self.pipe.recv()

    def save(self) -> None:
        self.pipe.send(True)

    def done(self) -> bool:
        return self.pipe.poll() and bool(self.pipe.recv())

    def close(self) -> None:
        self.pipe.send(False)
        self.process.join()


def contest(megabytes: int, rounds: int, device: torch.device, folder: Path) -> list[str]:
    """Return the lines of the table for one size."""
    state = make_state(megabytes, device)
    pinned = device.type == "cuda"
    flat = torch.cat([tensor.flatten() for tensor in tensors(state)])
    copy = torch.zeros(flat.shape, pin_memory=pinned)
    sync = CheckpointWriter(folder / "sync", keep=1, background=False)
    later = CheckpointWriter(folder / "async", keep=1)
    start = time.perf_counter()
    later.save(state, 0)
    first = time.perf_counter() - start
    later.wait()
    child = Child(megabytes, folder / "process")

    def memcpy() -> None:
        copy.copy_(flat)
        wait_for(device)

    def at_once() -> bool:
        return True

    entries: dict[str, tuple[Callable[[], None], Callable[[], bool]]] = {
        "memcpy": (memcpy, at_once),
        "torch.save": (lambda: torch.save(state, folder / "plain.pt"), at_once),
        "sync": (lambda: sync.save(state, 1), at_once),
        "async": (lambda: later.save(state, 1), lambda: not later.busy),
        "process": (child.save, child.done),
    }
    loop = Loop(device)
    times = {name: Times() for name in entries}
    for _ in range(rounds):
        for name, (save, done) in entries.items():
            measure(loop, times[name], save, done)
            later.wait()
    child.close()
    return [*table(times), f"{'first':<12}{1e3 * first:>10.1f}"]


def table(times: dict[str, Times]) -> Iterator[str]:
    kinds = ("call", "min", "ratio", "min", "loop", "on disk", "min")
    yield f"{'ms':<12}" + "".join(f"{kind:>10}" for kind in kinds)
    base = times["memcpy"].call
    for name, entry in times.items():
        ratios = (
            statistics.median(entry.call) / statistics.median(base),
            min(entry.call) / min(base),
        )
        cells = [*both(entry.call), *(f"{ratio:.2f}" for ratio in ratios)]
        cells += [f"{1e3 * statistics.median(entry.loop):.1f}", *both(entry.on_disk)]
        yield f"{name:<12}" + "".join(f"{cell:>10}" for cell in cells)


def both(seconds: list[float]) -> Iterator[str]:
    """Yield median and minimum in milliseconds."""
    yield f"{1e3 * statistics.median(seconds):.1f}"
    yield f"{1e3 * min(seconds):.1f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", default="100,300,1000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", help="on the disk to measure; default: a temporary one")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for megabytes in options.megabytes.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(f"\n{megabytes} MB on {options.device}, {options.rounds} rounds")
            device = torch.device(options.device)
            for line in contest(int(megabytes), options.rounds, device, Path(folder)):
                print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
