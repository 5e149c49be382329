"""Share of a step's time that is spent in matrix products, attention and convolutions, on a CPU.

    OMP_NUM_THREADS=1 python tools/bench/products.py [--steps 4] [--recipes mae/images]

Trains each recipe for some steps on one thread, on digits in the sizes of the recipe. torch's
profiler gives the time of each operation without that of those it calls, and FlopCounterMode the
floating-point operations of a step. Reading batches is left out. Other load slows operations and
step alike, so the shares depend little on it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.hooks.base import Hook
from selftask.registry import register_hook
from selftask.task import Task
from selftask.task.loop import train_loop

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product", "mkldnn", "convolution")


@register_hook("bench_products")
@dataclass(eq=False)
class Products(Hook):
    """Recorder of operations: the first step is a warm-up, the second counts, the others time."""

    def on_start(self, task: Task) -> None:
        self.flops = FlopCounterMode(display=False)
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.reading, self.done = 0.0, 0

    def on_step(self, task: Task) -> None:
        self.done += 1
        if self.done == 1:
            self.flops.__enter__()
        elif self.done == 2:
            self.flops.__exit__(None, None, None)
            self.profiler.start()
            self.reading, self.start = 0.0, time.perf_counter()
        elif self.done == task.length.total_steps:
            self.seconds = time.perf_counter() - self.start - self.reading
            self.profiler.stop()

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.reading += time.perf_counter() - start
            if batch is None:
                return
            yield batch


def measure(recipe: str, steps: int, batch: int, out: Path) -> Products:
    """Train a recipe for ``steps`` profiled steps, and return the recorder."""
    words = [
        "data={name: digits, val: null, num_workers: 0}",
        f"train.batch_size={batch}",
        f"train.max_steps={steps + 2}",
        "train.device=cpu",
        "train.precision=float32",
        "train.threads=1",
        "eval.evaluations={}",
        f"out={out}",
        "hooks.bench_products={}",
    ]
    config = load_config(recipe, words)
    task = Task(config, sources=open_data(config.data))
    train_loop(task)
    hook: Any = task.named_hooks["bench_products"]
    return hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--recipes", default="dinov3/images,capi/images")
    options = parser.parse_args()
    print(
        f"{'recipe':24} {'ms':>7} {'products':>9} {'share':>6} {'GFLOP':>7} {'GFLOP/s':>8}  others"
    )
    for recipe in options.recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            run = measure(recipe, options.steps, options.batch, Path(folder))
        ms: Counter[str] = Counter()
        for event in run.profiler.key_averages():
            name = event.key.removeprefix("aten::")
            is_product = event.key != name and name.startswith(PRODUCTS)
            ms["products" if is_product else name] += (
                event.self_cpu_time_total / 1e3 / options.steps
            )
        step, products = run.seconds * 1e3 / options.steps, ms.pop("products")
        flops = run.flops.get_total_flops() / 1e9
        others = ", ".join(f"{name} {value / step:.0%}" for name, value in ms.most_common(6))
        print(
            f"{recipe:24} {step:7.0f} {products:9.0f} {products / step:6.0%} {flops:7.1f} "
            f"{flops / products * 1e3:8.1f}  {others}"
        )


if __name__ == "__main__":
    main()
