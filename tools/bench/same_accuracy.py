"""Compare the accuracy of methods trained by selftask with that of lightly at equal settings.

    pip install lightly
    python tools/bench/same_accuracy.py TRAIN VAL [--methods simclr byol] [--seeds 3] [--epochs 10]

TRAIN and VAL are folders of classes with images of 32 pixels (CIFAR-10). Both libraries train the
same small ResNet with the same head, crop, flip and color changes, batch size, SGD and cosine
schedule, in float32. lightly's parts are in a loop such as those of its examples. Only what each
library makes itself differs: decoding, views, order of images, heads, loss, teacher and queue.

selftask evaluates both backbones, raw pixels and the untrained network, with the same images.
Prints k-NN and linear accuracy of each run, their means, and the mean difference with its 95 %
interval by Student's t (Welch).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightly.data import LightlyDataset
from lightly.transforms import SimCLRTransform
from scipy import stats
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

import lightly_methods

import selftask
from selftask.api.model import Model
from selftask.models.backbones.small_resnet import SmallResNetConfig

WIDTH = 32  # of the small ResNet, in channels
WEIGHT_DECAY = 5e-4
PARTS: dict[str, dict[str, Any]] = {  # options of selftask's methods, and of lightly's parts
    "simclr": {"hidden_dim": 256, "out_dim": 128, "norm": True, "temperature": 0.5},
    "moco": {"hidden_dim": 256, "out_dim": 128, "queue_size": 4096, "temperature": 0.1},
    "byol": {"hidden_dim": 1024, "out_dim": 256},
    "barlow": {"hidden_dim": 1024, "out_dim": 1024},
    "vicreg": {"hidden_dim": 1024, "out_dim": 1024},
}
TEACHER = {"moco": {"momentum": 0.99}, "byol": {"momentum": 0.99}}
LOSS_SCALE = {"byol": 4.0}  # of the paper's loss to lightly's
LR = {"simclr": 0.12, "moco": 0.12, "byol": 0.12, "barlow": 0.06, "vicreg": 0.06}

RECIPE = """
data: {name: folder, path: %(train)s, num_workers: 0, val: {name: folder, path: %(val)s}}
views:
  main:
    count: 2
    transforms:
      - {name: random_resized_crop, size: 32, scale: [0.08, 1.0]}
      - horizontal_flip
      - {name: color_jitter, brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1, p: 0.8}
      - {name: grayscale, p: 0.2}
      - {name: normalize, stats: imagenet}
eval: {transforms: [{name: normalize, stats: imagenet}], evaluations: {knn: null, linear: null}}
"""


def train_selftask(method: str, seed: int, args: argparse.Namespace, out: Path) -> Model:
    """Return the backbone that selftask has trained."""
    out.mkdir()
    recipe = out / "recipe.yaml"
    paths = {"train": Path(args.train).resolve(), "val": Path(args.val).resolve()}
    recipe.write_text(RECIPE % paths)
    selftask.train(
        str(recipe),
        out=str(out / "run"),
        backbone={"name": "small_resnet", "width": WIDTH},
        method={"name": method, **PARTS[method], **TEACHER.get(method, {})},
        optimizer={
            "name": "sgd",
            "lr": LR[method],
            "sgd_momentum": 0.9,
            "weight_decay": WEIGHT_DECAY,
            "decay_1d": True,
            "schedule": "cosine",
            "warmup": 0,
        },
        train={
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "seed": seed,
            "precision": "float32",
            "device": "cpu",
            "report": False,
        },
        hooks={"progress": None},
    )
    return selftask.load(str(out / "run"))


def train_lightly(method: str, seed: int, args: argparse.Namespace) -> nn.Module:
    """Return the backbone that a loop with lightly's parts has trained."""
    torch.manual_seed(seed)
    transform = SimCLRTransform(input_size=32, cj_strength=0.5, gaussian_blur=0.0)
    loader = torch.utils.data.DataLoader(
        LightlyDataset(args.train, transform=transform),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    backbone = SmallResNetConfig(width=WIDTH).build()
    model = lightly_methods.build(method, backbone, PARTS[method])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, LR[method], momentum=0.9, weight_decay=WEIGHT_DECAY)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(args.epochs):
        for views, *_ in loader:
            loss = LOSS_SCALE.get(method, 1.0) * model(views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return backbone.eval()


def accuracies(model: Model, args: argparse.Namespace) -> tuple[float, float]:
    """Return k-NN and linear top-1."""
    folders = {"data": args.train, "data_val": args.val}
    knn = selftask.evaluate(model, "knn", **folders, k=[200], temperature=0.1)
    return knn["knn_top1"], selftask.evaluate(model, "linear", **folders)["linear_top1"]


def difference(ours: list[float], theirs: list[float]) -> str:
    """Return the mean difference with its 95 % interval."""
    mean = statistics.mean(ours) - statistics.mean(theirs)
    if len(ours) < 2:
        return f"{mean:+.3f}"
    low, high = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("--methods", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for method in args.methods:
            ours, theirs = [], []
            for seed in range(args.seeds):
                model = train_selftask(method, seed, args, Path(scratch) / f"{method}_{seed}")
                if not ours and method == args.methods[0]:
                    untrained = SmallResNetConfig(width=WIDTH).build().eval()
                    for name, network in (("raw pixels", nn.Flatten()), ("untrained", untrained)):
                        print(
                            f"{name}: {accuracies(Model(network, model.facts), args)}", flush=True
                        )
                ours.append(accuracies(model, args))
                network = train_lightly(method, seed, args)
                theirs.append(accuracies(Model(network, model.facts), args))
                print(
                    f"{method} seed {seed}: selftask {ours[-1]}, lightly {theirs[-1]}", flush=True
                )
            for index, name in enumerate(("k-NN", "linear")):
                columns = [[row[index] for row in rows] for rows in (ours, theirs)]
                means = " ".join(f"{statistics.mean(column):.3f}" for column in columns)
                print(f"{method} {name}: {means} difference {difference(*columns)}", flush=True)


if __name__ == "__main__":
    main()
