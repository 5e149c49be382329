"""Compare methods on a small set of images: k-NN and linear accuracy, with intervals.

    python compare.py DATA [--images 1000] [--test-images 2000] [--methods simclr,byol] [--seeds 3]
                           [--out runs/small_data] [key=value ...]

DATA/train and DATA/test hold one folder of images for each class. Every method trains on the same
images, once for each seed, as a local sweep. Run the command again to continue, or with more seeds
to extend it. Training reads no labels; k-NN and the linear probe use the labels of the same images.
The interval is Student's t interval for the mean over seeds; the images do not change.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats
from torch import nn

from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.distributed.device import pick_device
from selftask.distributed.world import World
from selftask.evaluate.offline import evaluate_backbone
from selftask.logs import read_metrics

HERE = Path(__file__).resolve().parent
METHODS = sorted(path.stem for path in HERE.glob("*.yaml") if path.stem != "small_images")
METRICS = {"knn_top1": "k-NN", "linear_top1": "linear"}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--images", type=int, default=1000, help="in training, of all classes")
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--methods", default=",".join(METHODS), help="recipes beside this file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/small_data"))
    options, overrides = parser.parse_known_args(argv)
    methods = options.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        parser.error(f"no recipe for {', '.join(sorted(unknown))}; known: {', '.join(METHODS)}")
    if options.seeds < 2:
        parser.error("--seeds: an interval needs at least 2")

    options.out.mkdir(parents=True, exist_ok=True)
    images = [
        f"data.path={_list(options.data / 'train', options.images, options.out)}",
        f"data.val.path={_list(options.data / 'test', options.test_images, options.out)}",
    ]
    rows: list[tuple[str, list[dict[str, float]]]]
    rows = [("raw pixels", [raw_pixels(methods[0], [*images, *overrides])])]
    for method in methods:
        out = options.out / method
        _sweep(method, [*images, *overrides, f"out={out}"], options.seeds)
        runs = [evaluations(out / f"seed_{seed}") for seed in range(1, options.seeds + 1)]
        if len(rows) == 1:
            rows.append(("untrained network", [first for first, _ in runs]))
        rows.append((method, [last for _, last in runs]))
        print_table(rows)


def _list(folder: Path, count: int, out: Path) -> Path:
    """Write the list of a class-balanced subset and return its path."""
    classes = sum(path.is_dir() for path in folder.iterdir()) if folder.is_dir() else 0
    if not classes:
        sys.exit(f"error: {folder}: no folder of images for each class")
    path = out / f"{folder.name}_{count}.txt"
    subset = HERE.parents[1] / "tools/subset.py"
    words = [sys.executable, subset, folder, str(max(1, count // classes)), path]
    subprocess.run([*map(str, words)], check=True)
    return path.resolve()


def _sweep(method: str, overrides: list[str], seeds: int) -> None:
    """Train one run for each seed in folders ``seed_1`` and so on; finished ones are reported."""
    words = [sys.executable, "-m", "selftask", "train", str(HERE / f"{method}.yaml"), *overrides]
    numbers = ",".join(str(seed) for seed in range(1, seeds + 1))
    subprocess.run([*words, f"train.seed={numbers}"], check=True)


def raw_pixels(method: str, overrides: list[str]) -> dict[str, Any]:
    """Return the accuracies of the normalized raw pixels."""
    config = load_config(str(HERE / f"{method}.yaml"), overrides)
    device = pick_device(config.train.device, World())
    return evaluate_backbone(nn.Flatten(), config, open_data(config.data), device=device)


def evaluations(run: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the accuracies of a run before the first step and after the last one."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if METRICS.keys() <= row.keys()]
    return rows[0], rows[-1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval; NaN for a single value."""
    count, mean = len(values), sum(values) / len(values)
    if count < 2:
        return mean, float("nan")
    error = float(stats.sem(values))
    return mean, float(stats.t.ppf(0.975, count - 1)) * error


def print_table(rows: list[tuple[str, list[dict[str, float]]]]) -> None:
    """Print mean and interval of each metric, one line per method, in Markdown."""
    print(
        f"\n| {'features':<18} | seeds | " + " | ".join(f"{n:^15}" for n in METRICS.values()) + " |"
    )
    print("|---" * (2 + len(METRICS)) + "|")
    for name, runs in rows:
        cells = [_cell([run[metric] for run in runs]) for metric in METRICS]
        print(f"| {name:<18} | {len(runs):>5} | " + " | ".join(cells) + " |", flush=True)


def _cell(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}  " if len(values) > 1 else f"{mean:<15.3f}"


if __name__ == "__main__":
    main(sys.argv[1:])
