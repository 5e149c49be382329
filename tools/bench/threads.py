"""Share of a training's CPU time for making views, as left free by ``train.threads=auto``.

    python tools/bench/threads.py [--steps 5] [--recipes simclr/digits,dino/images]

Trains each recipe for some steps on one thread, without workers, and measures the CPU time of this
process inside and outside of reading a batch, which depends little on other load. On several cores
the same work is shared: a loader that needs 5 % of it occupies one core of 20. Images are
generated: JPEGs of 500x375 and, for the recipes of CIFAR-10 and digits, PNGs of 32x32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from augment import arrays, jpegs
from PIL import Image

from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.hooks.base import Hook
from selftask.registry import register_hook
from selftask.task import Task
from selftask.task.loop import train_loop

RECIPES = {  # name -> images per step
    "simclr/digits": 64,
    "simclr/resnet18_cifar10": 32,
    "simclr/images": 16,
    "dino/images": 16,
    "mae/images": 32,
    "supervised/linear_resnet50_imagenet": 16,
}


@register_hook("bench_cpu_time")
@dataclass(eq=False)
class CpuTime(Hook):
    """Recorder of the CPU seconds of each step: reading, and total."""

    def on_start(self, task: Task) -> None:
        self.reading: list[float] = []
        self.ends = [time.process_time()]

    def on_step(self, task: Task) -> None:
        self.ends.append(time.process_time())

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.process_time()
            batch = next(batches, None)
            if batch is None:
                return
            if task.train:
                self.reading.append(time.process_time() - start)
            yield batch


def measure(recipe: str, images: Path, steps: int, folder: Path) -> tuple[float, float]:
    """Return the medians over steps of CPU milliseconds per image: making views, and the rest."""
    batch = RECIPES[recipe]
    words = [
        f"data={{name: folder, path: {images}, val: null, num_workers: 0}}",
        f"train.batch_size={batch}",
        f"train.max_steps={steps + 1}",
        "train.device=cpu",
        "train.precision=float32",
        "train.threads=1",
        "eval.evaluations={}",
        "meters={}",
        f"out={folder / recipe}",
        "resume=never",
        "hooks.bench_cpu_time={}",
    ]
    config = load_config(recipe, words)
    task = Task(config, sources=open_data(config.data))
    train_loop(task)
    hook = task.named_hooks["bench_cpu_time"]
    of_step = [b - a for a, b in zip(hook.ends, hook.ends[1:], strict=False)]
    reading = statistics.median(hook.reading[1:])  # the first step includes a warm-up
    whole = statistics.median(of_step[1:])
    return 1e3 * reading / batch, 1e3 * (whole - reading) / batch


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos, small = folder / "photos", folder / "small"
        for number, (photo, pixels) in enumerate(zip(jpegs(64), arrays(64), strict=True)):
            for images in (photos, small):
                (images / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
            (photos / f"class{number % 2}/{number}.jpg").write_bytes(photo)
            Image.fromarray(pixels).save(small / f"class{number % 2}/{number}.png")
        table = [f"{'CPU ms an image':<38}{'views':>8}{'step':>10}{'share':>8}"]
        for recipe in options.recipes.split(","):
            images = small if "cifar10" in recipe or "digits" in recipe else photos
            views, step = measure(recipe, images, options.steps, folder)
            share = views / (views + step)
            table.append(f"{recipe:<38}{views:>8.2f}{step:>10.2f}{share:>8.1%}")
            print(table[-1], flush=True)
        print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
