"""Continue a small transformer on 500 images of other classes: what helps, and what harms.

    python study.py CIFAR10 [--out runs/adaptation] [--seeds 2] [key=value ...]

CIFAR10/train and CIFAR10/test hold one folder of images for each class. A transformer is trained
with SimCLR on 3,000 images of animals, once. `selftask adapt` then continues it on 500 images of
vehicles, in several ways and with several seeds. k-NN finds the class of 1,000 other vehicles from
the 500. Run the command again to continue, or with more seeds to extend it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from selftask.logs import read_metrics

TOOL = Path(__file__).resolve().parents[2] / "tools/subset.py"
CLASSES = {
    "animals": ("bird", "cat", "deer", "dog", "frog", "horse"),
    "vehicles": ("airplane", "automobile", "ship", "truck"),
}
BACKBONE = "{name: vit_micro, img_size: 32, patch_size: 8, pool: avg, class_token: false}"
HERE = ["train.threads=1", "data.num_workers=0"]
FREE = "hooks.preserve.weight=0"
WAYS = {
    "all weights": [FREE],
    "LoRA": [FREE, "backbone.lora={rank: 8}"],
    "biases and norms": [FREE, 'backbone.lora={rank: 0, train: ["*.bias", "*norm*"]}'],
    "all weights, preserved": [],
    "from scratch": [FREE, "init.backbone=null", "optimizer.lr=1e-3", "optimizer.groups=[]"],
    "a rate of 0.01": [FREE, "optimizer.lr=0.01", "optimizer.groups=[]"],
    "harm: a rate of 0.1": [FREE, "optimizer.lr=0.1", "optimizer.groups=[]"],
}
"""Ways to continue: words of `selftask adapt`."""


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/adaptation"))
    parser.add_argument("--seeds", type=int, default=2)
    options, words = parser.parse_known_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    lists = {
        (kind, part): _list(options.data, options.out, kind, part, count)
        for kind, part, count in (
            ("animals", "train", 500),
            ("animals", "test", 50),
            ("vehicles", "train", 125),
            ("vehicles", "test", 250),
        )
    }
    scores: dict[str, list[dict[int, float]]] = {way: [] for way in WAYS}
    start = options.out / "start"
    _selftask(
        "train",
        "simclr/images",
        *_images(lists, "animals"),
        f"backbone={BACKBONE}",
        *("image_size=32", "train.epochs=15", "train.batch_size=64", f"out={start}", *HERE),
    )
    for seed in range(options.seeds):
        for way, changes in WAYS.items():
            name = way.split(":")[0].replace(" ", "_").replace(",", "")
            out = options.out / f"{name}_{seed}"
            _selftask(
                "adapt",
                str(start),
                *_images(lists, "vehicles"),
                *("train.epochs=30", f"train.seed={seed}", f"out={out}", *HERE, *changes, *words),
            )
            rows = read_metrics(out / "metrics.jsonl")
            scores[way].append({int(r["step"]): r["knn_top1"] for r in rows if "knn_top1" in r})
        print_table(scores)


def _list(data: Path, out: Path, kind: str, part: str, count: int) -> Path:
    """Write the list of ``count`` images of each class and return its path."""
    folder = out.resolve() / kind / part
    folder.mkdir(parents=True, exist_ok=True)
    for name in CLASSES[kind]:
        link = folder / name
        if not link.exists():
            link.symlink_to((data / part / name).resolve())
    path = out.resolve() / f"{kind}_{part}.txt"
    subprocess.run([sys.executable, str(TOOL), str(folder), str(count), str(path)], check=True)
    return path


def _images(lists: dict[tuple[str, str], Path], kind: str) -> list[str]:
    return [f"data={lists[kind, 'train']}", f"data.val={lists[kind, 'test']}"]


def _selftask(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "selftask", *words], check=True)


def print_table(scores: dict[str, list[dict[int, float]]]) -> None:
    """Print k-NN at the start, at best and at the end: the mean over seeds, and each seed."""
    print("\n| | start | best | end |\n|---|---|---|---|")
    for way, runs in scores.items():
        columns = [
            [run[min(run)] for run in runs],
            [max(run.values()) for run in runs],
            [run[max(run)] for run in runs],
        ]
        if runs:
            print(f"| {way} | {' | '.join(map(_cell, columns))} |", flush=True)


def _cell(values: list[float]) -> str:
    return f"{mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"


if __name__ == "__main__":
    main(sys.argv[1:])
