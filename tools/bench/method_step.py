"""Time of a train step: selftask's methods beside lightly's, with equal networks and views.

    pip install lightly
    python tools/bench/method_step.py [METHOD ...] [--rounds 5] [--batch 64] [--precision auto]

ResNet-18 for images of 32x32 (CIFAR stem); ViT-S with patches of 4 for ``mae`` and ``dinov2``.
Random images in memory, heads of the same widths, SGD with momentum. selftask runs its trainer with
default hooks; lightly's modules run in the loop of its examples. Rounds take turns in one process
with one thread. Shown is CPU time per step: least of all steps, and the median over rounds of the
ratio of both medians, with its 95 % interval by bootstrap. Parameters are those that are trained.
With ``--precision auto``, lightly computes in float32, as in its examples.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightly_methods
import torch
from contestants import LR, MOMENTUM, train_in_memory
from method_parts import PARTS
from rounds import in_turns, median_and_interval
from small_models import Stamped

from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.models.build import build_backbone

STEPS = 5  # per turn; the first one does not count
_CROPS = [32, 32, 16, 16, 16, 16]
_VIEWS = {"mae": [32], "dino": _CROPS, "dinov2": _CROPS}  # sizes in pixels; others: two of 32


class _Batches(Stamped):
    """Views of random images, and labels; records the time of every request."""

    def __init__(self, name: str, batch: int, steps: int) -> None:
        draw = torch.Generator().manual_seed(0)
        sizes = _VIEWS.get(name, [32, 32])
        self.views = [torch.randn(batch, 3, size, size, generator=draw) for size in sizes]
        groups = {
            group: [view for view in self.views if view.shape[-1] == size]
            for group, size in (("main", 32), ("small", 16))
        }
        labels = torch.zeros(batch, dtype=torch.long)
        self.pool: list[Any] = [({k: v for k, v in groups.items() if v}, labels)]
        self.steps, self.wall, self.cpu = steps, [], []


def _config(name: str, batch: int, precision: str, folder: Path) -> Config:
    large = _VIEWS.get(name, [32, 32]).count(32)
    views = f"{{main: {{count: {large}, transforms: [{{name: resize, size: 32}}, normalize]}}"
    if name in ("dino", "dinov2"):
        views += ", small: {count: 4, transforms: [{name: resize, size: 16}, normalize]}"
    backbone = (
        "{name: vit_small, img_size: 32, patch_size: 4, dynamic_img_size: true}"
        if name in ("mae", "dinov2")
        else "{name: resnet18, stem: cifar}"
    )
    parts = ", ".join(f"{key}: {str(value).lower()}" for key, value in PARTS[name].items())
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"data: digits\nviews: {views}}}\neval: {{transforms: [normalize]}}\n"
        f"backbone: {backbone}\nmethod: {{name: {name}, {parts}}}\n"
        f"train: {{max_steps: {STEPS}, batch_size: {batch}, precision: {precision}}}\n"
        f"optimizer: {{name: sgd, lr: {LR}, sgd_momentum: {MOMENTUM}}}\n"
    )
    words = [f"out={folder / 'run'}", "train.device=cpu", "train.threads=1"]
    return load_config(str(recipe), words)


class Pair:
    """One method, in both libraries."""

    def __init__(self, name: str, batch: int, precision: str) -> None:
        self.name, self.batch, self.precision = name, batch, precision
        with tempfile.TemporaryDirectory() as folder:
            config = _config(name, batch, precision, Path(folder))
        self.theirs = lightly_methods.build(name, build_backbone(config.backbone), PARTS[name])
        trained = [p for p in self.theirs.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)
        self.parameters = {"lightly": _numel(self.optimizer)}

    def lightly(self, batches: _Batches) -> None:
        """Train in the loop of lightly's examples."""
        half = self.precision == "bfloat16"
        for _ in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = self.theirs(batches.views)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def selftask(self, batches: _Batches) -> None:
        """Train with selftask's trainer."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            config = _config(self.name, self.batch, self.precision, Path(folder))
            Path(config.out).mkdir()
            task = train_in_memory(config, batches)
        self.parameters["selftask"] = _numel(task.optimizer)

    def measure(self, rounds: int) -> str:
        """Return a line of the table, after ``rounds`` rounds."""
        times: dict[str, list[list[float]]] = {"selftask": [], "lightly": []}
        for number in range(rounds):
            for side in in_turns([*times], number):
                batches = _Batches(self.name, self.batch, STEPS)
                gc.collect()
                getattr(self, side)(batches)
                times[side].append(batches.step_times()[1].tolist())
        medians = [list(map(statistics.median, side)) for side in times.values()]
        ratio, low, high = median_and_interval([a / b for a, b in zip(*medians, strict=True)])
        ours, theirs = (1e3 * min(map(min, side)) for side in times.values())
        millions = " / ".join(f"{self.parameters[side] / 1e6:.2f}" for side in times)
        return (
            f"| {self.name} | {ours:.0f} | {theirs:.0f} | {ratio:.2f} [{low:.2f}, {high:.2f}] "
            f"| {millions} |"
        )


def _numel(optimizer: Any) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", choices=("float32", "bfloat16", "auto"), default="float32")
    options = parser.parse_args()
    for name in options.methods:
        if name not in PARTS:
            parser.error(f"{name}: none of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| method | selftask, ms | lightly, ms | ratio | parameters, millions |")
    print("|---|---|---|---|---|")
    for name in options.methods or PARTS:
        print(Pair(name, options.batch, options.precision).measure(options.rounds), flush=True)


if __name__ == "__main__":
    main()
