"""Compare training with different view engines: k-NN after equal steps, by engine and seed.

    python tools/bench/same_learning.py TRAIN VAL [--seeds 3] [--epochs 10] [--parallel 1]

SimCLR with a small ResNet on images of 32x32 (CIFAR-10: TRAIN and VAL are folders or lists), with
crop, flip, color jitter and gray made by

    cpu          data.augment_on=cpu: the compiled kernel, or OpenCV
    device       data.augment_on=device: whole batches, in torch
    torchvision  torchvision's transforms on Pillow images, as a custom transform

Prints the k-NN accuracy of every run, and mean and standard deviation of each engine. Engines
should not differ by more than seeds do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OURS = """
      - {name: random_resized_crop, size: 32, scale: [0.08, 1.0]}
      - horizontal_flip
      - {name: color_jitter, p: 0.8, brightness: 0.8, contrast: 0.8, saturation: 0.8, hue: 0.2}
      - {name: grayscale, p: 0.2}"""
THEIRS = """
      - torchvision_simclr"""

RECIPE = """
import: [torchvision_simclr]
data: {{name: {source}, path: {train}, val: {{name: {val_source}, path: {val}}}, engine: {engine}}}
views:
  main:
    count: 2
    transforms:{transforms}
      - {{name: normalize, stats: cifar10}}
backbone: {{name: small_resnet, width: 32}}
method: {{name: simclr, hidden: 256, dim: 64, temperature: 0.2}}
train: {{epochs: {epochs}, batch_size: 256, seed: {seed}}}
optimizer: {{name: adamw, lr: 2.0e-3, weight_decay: 1.0e-4, schedule: cosine, warmup: 5%}}
eval:
  transforms: [{{name: normalize, stats: cifar10}}]
  evaluations: {{knn: {{}}}}
"""

MODULE = '''
"""torchvision's transforms on Pillow images, drawing from a generator that the sample seeds."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as tv

from selftask.registry import register_transform

PIPELINE = tv.Compose([
    tv.RandomResizedCrop(32, scale=(0.08, 1.0)),
    tv.RandomHorizontalFlip(),
    tv.RandomApply([tv.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
    tv.RandomGrayscale(0.2),
])

@register_transform("torchvision_simclr")
@dataclass(frozen=True)
class TorchvisionSimCLR:
    def __call__(self, image, rng):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**62)))
            return np.array(PIPELINE(Image.fromarray(image)))
'''

WAYS = {"cpu": ("cpu", OURS), "device": ("device", OURS), "torchvision": ("cpu", THEIRS)}


def run(way: str, seed: int, args: argparse.Namespace, folder: Path) -> float:
    """Return the k-NN accuracy at the end of one run."""
    engine, transforms = WAYS[way]
    recipe, out = folder / f"{way}-{seed}.yaml", folder / f"{way}-{seed}"
    text = RECIPE.format(
        source="folder" if Path(args.train).is_dir() else "list",
        train=os.path.abspath(args.train),
        val_source="folder" if Path(args.val).is_dir() else "list",
        val=os.path.abspath(args.val),
        engine=engine,
        transforms=transforms,
        epochs=args.epochs,
        seed=seed,
    )
    recipe.write_text(text)
    command = [sys.executable, "-W", "ignore", "-m", "selftask", "train", str(recipe), f"out={out}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "ssl"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}, seed {seed}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return float(next(row["knn_top1"] for row in reversed(rows) if "knn_top1" in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.parallel) as pool:
        folder = Path(scratch)
        (folder / "torchvision_simclr.py").write_text(MODULE)
        jobs = {
            (w, s): pool.submit(run, w, s, args, folder) for s in range(args.seeds) for w in WAYS
        }
        for way in WAYS:
            scores = [jobs[way, seed].result() for seed in range(args.seeds)]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            listed = " ".join(f"{score:.4f}" for score in scores)
            print(f"{way:12} {listed}   {statistics.mean(scores):.4f} +- {spread:.4f}", flush=True)


if __name__ == "__main__":
    main()
