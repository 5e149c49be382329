"""Peak memory of train steps: ``grad_cache`` and ``standard``.

    python tools/bench/step_memory.py [--batch-size 256] [--chunks 16]

Trains SimCLR with a ResNet-18 without BatchNorm in its head on views of 32x32, for three steps,
each configuration in a separate process. Shown is the peak resident memory minus that before the
first step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from dataclasses import replace
from functools import partial

import torch
from contestants import run_selftask
from small_models import MODELS, Stamped


def peak(step: str, batch_size: int, queue: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    batches = Stamped(replace(MODELS["resnet18"], batch_size=batch_size), 3)
    batches.pool = batches.pool[:1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_selftask(replace(MODELS["resnet18"], batch_size=batch_size), batches, 50, step=step)
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measure(step: str, batch_size: int) -> float:
    """Return the peak MiB above the start, in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=partial(peak, step, batch_size, queue))
    process.start()
    peak_mib = float(queue.get())
    process.join()
    return peak_mib


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=16)
    options = parser.parse_args()
    for size in (options.batch_size, 2 * options.batch_size):
        whole = measure("standard", size)
        parts = measure(f"{{name: grad_cache, chunks: {options.chunks}}}", size)
        print(f"batch {size}: standard {whole:.0f} MiB, grad_cache {parts:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
