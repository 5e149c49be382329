"""How long a save of a checkpoint holds up the training loop: sync, async, and what limits both.

    python tools/bench/checkpoint.py [--megabytes 100,300,1000] [--rounds 5] [--device cpu]

The state looks like a network and its AdamW: three times 160 tensors, half of them matrices, half
vectors. The loop takes equal small steps (matrix products) that share nothing with the state but
the machine. A round is one turn of each entry:

    memcpy      one copy of the bytes, in one piece, into memory that is there (pinned for a GPU):
                no consistent snapshot can hold up the loop for less
    torch.save  into a file, as many scripts do: not durable, not atomic, no checksum
    sync        selftask with train.async_checkpoints=false: written, checksummed, on disk
    async       selftask as it is: copied, and written by a thread
    process     the same write by another process, which has its own state: what of the loop's
                loss is only the machine's, and not the thread's holding python's lock

``call`` is how long the call keeps the loop from its next step; ``loop`` adds by how much the steps
are slower than those before the call until the file is on disk: what the training loses in all.
``on disk`` is when that is. ``ratio`` compares calls with memcpy, medians and minima. ``first`` is
the first call of an async writer, which also gets the memory.
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
    """Seconds, one entry a round."""

    call: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    on_disk: list[float] = field(default_factory=list)


def make_state(megabytes: int, device: torch.device) -> dict[str, Any]:
    """A model, and two moments of each of its tensors."""
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
    """Equal steps of a few milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.matrix = torch.randn(128, 128, device=device)
        self.quiet()  # warms up

    def step(self) -> float:
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            self.matrix @ self.matrix
        wait_for(self.device)
        return time.perf_counter() - start

    def quiet(self) -> float:
        """Seconds of a step while nothing is written, the mean: what disturbs it counts as well."""
        return statistics.fmean(self.step() for _ in range(QUIET_STEPS))

    def lost(self, quiet: float, until: Callable[[], bool]) -> float:
        """By how much the steps up to then were slower than quiet ones."""
        lost = 0.0
        while not until():
            lost += self.step() - quiet
        return lost


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(loop: Loop, times: Times, save: Callable[[], None], done: Callable[[], bool]) -> None:
    """One turn: the call, then steps until the file is on disk."""
    gc.collect()
    quiet = loop.quiet()
    start = time.perf_counter()
    save()
    called = time.perf_counter() - start
    lost = loop.lost(quiet, done)
    times.call.append(called)
    times.loop.append(called + lost)
    times.on_disk.append(time.perf_counter() - start)


def write_when_told(told: Connection, megabytes: int, folder: Path) -> None:
    """The child process of the entry ``process``; answers when the file is on disk."""
    torch.set_num_threads(1)
    state = make_state(megabytes, torch.device("cpu"))
    writer = CheckpointWriter(folder, keep=1, background=False)
    writer.save(state, 0)
    told.send("ready")
    while told.recv():
        writer.save(state, 1)
        told.send("written")


class Child:
    """A process that writes a state of that size."""

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
    """The lines of the table for one size."""
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
    """Median and minimum in milliseconds."""
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
