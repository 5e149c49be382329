"""Gain of a CPU step when the process keeps the memory of freed tensors.

    OMP_NUM_THREADS=1 python tools/bench/freed_memory.py [--batch 128] [--size 32] [--rounds 8]

ResNet-18 with forward, backward and SGD runs in two alternating processes: one with glibc's
defaults, one after ``keep_freed_memory``. Figures are CPU time of a step, pages mapped
in it (minor faults) and peak memory of the process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

import numpy as np
import torch
import torchvision

from selftask.distributed.device import keep_freed_memory


def work(pipe: Connection, keeps: bool, batch: int, size: int) -> None:
    """Run the requested numbers of steps; send CPU seconds, faults and peak memory in MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if keeps:
        keep_freed_memory(torch.device("cpu"))
    model = torchvision.models.resnet18()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    while steps := pipe.recv():
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        seconds, then = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((seconds / steps, (then.ru_minflt - before.ru_minflt) / steps, then.ru_maxrss))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="pixels of a side")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, keeps in {"given back": False, "kept": True}.items():
        pipes[name], theirs = spawn.Pipe()
        job = (theirs, keeps, args.batch, args.size)
        spawn.Process(target=work, args=job, daemon=True).start()
    measurements: dict[str, list[tuple[float, float, int]]] = {name: [] for name in pipes}
    for turn in range(-2, args.rounds):  # the first two rounds are a warm-up
        for name in list(pipes)[:: 1 if turn % 2 else -1]:
            pipes[name].send(args.steps)
            measurement = pipes[name].recv()
            if turn >= 0:
                measurements[name].append(measurement)
    for pipe in pipes.values():
        pipe.send(0)
    print(f"ResNet-18, {args.batch} x 3 x {args.size} x {args.size}, one thread")
    print(f"{'':12}{'ms/step':>10}{'least':>10}{'faults':>10}{'most MiB':>10}")
    for name, turns in measurements.items():
        seconds, faults, memory = np.array(turns).T
        figures = (1e3 * np.median(seconds), 1e3 * seconds.min(), np.median(faults))
        most = memory.max() / 1024
        print(f"{name:12}" + "".join(f"{figure:10.0f}" for figure in (*figures, most)))


if __name__ == "__main__":
    main()
