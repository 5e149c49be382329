"""Train on CIFAR-10 for a wall-clock budget, then measure k-NN and linear accuracy, for each seed.

    python run.py DATA [--recipe patches] [--minutes 15] [--seeds 3] [--out runs/speedrun]
                       [--evaluate] [key=value ...] [patches:key=value ...]

DATA/train and DATA/test hold one folder of images for each class. Recipes: patches (k-means on
whitened patches; it needs less than the budget), network (SimCLR, low resolution first), both
(patches, the network in the rest of the budget, and their features together) and gpu. Pretraining
reads no labels. The speed of each stage is measured in a few steps, which are part of the budget,
and determines its number of steps. Evaluations run after the budget and are timed separately;
``--evaluate`` repeats them. A value with the name of a recipe before it is for that part of
``both``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.distributed.device import pick_device
from selftask.distributed.world import World
from selftask.evaluate.offline import evaluate_backbone
from selftask.logs import read_metrics
from selftask.models.backbones.small_resnet import SmallResNet
from selftask.models.build import build_backbone
from selftask.models.weights.model_source import open_model
from selftask.random.process_state import seed_all

HERE = Path(__file__).resolve().parent
PROBE_STEPS = 30
QUIET = "eval.evaluations={knn: null, linear: null}"  # evaluated after training, see below


@dataclass(frozen=True)
class Stage:
    """Training at one image size for a share of the budget; None for the length in the recipe."""

    share: float | None = None
    size: int | None = None


STAGES = {
    "patches": [Stage()],
    "network": [Stage(0.25, 16), Stage(0.35, 24), Stage(0.4, 32)],
    "gpu": [Stage(0.25, 16), Stage(0.35, 24), Stage(0.4, 32)],
}
PARTS = {name: (name,) for name in STAGES} | {"both": ("patches", "network")}


@dataclass(frozen=True)
class Result:
    name: str
    seed: int
    train_s: float | None  # None: not trained by this command
    eval_s: float
    knn: float
    linear: float


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--recipe", choices=[*PARTS], default="patches")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun"))
    parser.add_argument("--evaluate", action="store_true", help="evaluate the runs in --out again")
    options, overrides = parser.parse_known_args(argv)
    images = [f"data.path={options.data / 'train'}", f"data.val.path={options.data / 'test'}"]
    sys.path.insert(0, str(HERE))  # for patches.py
    results: list[Result] = []
    for seed in range(1, options.seeds + 1):
        out = options.out / f"{options.recipe}_seed_{seed}"
        words = [*images, *overrides, f"train.seed={seed}"]
        seconds = None
        if not options.evaluate:
            started = time.monotonic()
            shutil.rmtree(out, ignore_errors=True)  # a wall-clock budget cannot resume
            pretrain(options.recipe, words, out, started + options.minutes * 60)
            seconds = time.monotonic() - started
        recipe = HERE / f"{options.recipe}.yaml"
        config = load_config(str(recipe), _for_part(options.recipe, words))
        if not results:
            results.append(evaluate("untrained", untrained(options.recipe, words), config))
        result = evaluate(options.recipe, trained(options.recipe, out), config)
        results.append(replace(result, train_s=seconds))
        print_table(results)


def pretrain(recipe: str, words: list[str], out: Path, deadline: float) -> None:
    """Train all parts of a recipe, one after the other; the last one ends at ``deadline``."""
    for part in PARTS[recipe]:
        previous: Path | None = None
        for place, stage in enumerate(STAGES[part]):
            overrides = _for_part(part, words)
            if stage.size is not None:
                overrides.append(f"views.main.transforms.0.size={stage.size}")
            if previous is not None:
                overrides.append(f"init.backbone={previous}")
            if stage.share is not None:
                remaining = sum(s.share or 0.0 for s in STAGES[part][place:])
                ends = time.monotonic() + (deadline - time.monotonic()) * stage.share / remaining
                steps = _steps_until(ends, part, overrides, out / part / f"probe_{place}")
                overrides += [f"train.max_steps={steps}", "train.epochs=null"]
            previous = _folder(out, part, place)
            _train(part, [*overrides, f"out={previous}"])


def _for_part(part: str, words: list[str]) -> list[str]:
    """Return the settings for all parts, and those for this one."""
    kept = []
    for word in words:
        name, _, setting = word.partition(":")
        if name not in PARTS:
            kept.append(word)
        elif name == part:
            kept.append(setting)
    return kept


def _folder(out: Path, part: str, place: int) -> Path:
    return out / part / f"stage_{place}"


def _steps_until(ends: float, part: str, words: list[str], out: Path) -> int:
    """Return the number of steps that end at a time, by the speed of a few."""
    began = time.monotonic()
    _train(part, [*words, f"train.max_steps={PROBE_STEPS}", f"out={out}"])
    took = time.monotonic() - began
    step_s = _seconds_per_step(out)
    start_up = max(0.0, took - PROBE_STEPS * step_s)  # imports, reading the images
    steps = max(1, int((ends - time.monotonic() - start_up) / step_s))
    print(f"{out}: {step_s:.3f} s a step, {steps} steps", flush=True)
    return steps


def _train(recipe: str, words: list[str]) -> None:
    command = [sys.executable, "-m", "selftask", "train", str(HERE / f"{recipe}.yaml")]
    subprocess.run([*command, QUIET, *words], check=True)


def _seconds_per_step(run: Path) -> float:
    """Return the time of a step, from the speed in the last row."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "images_per_s" in row]
    config = load_config(str(run / "config.yaml"), [])
    return config.train.batch_size / float(rows[-1]["images_per_s"])


class LastMaps(nn.Module):
    """The maps of the last two blocks as features; the network returns the mean of the last one."""

    def __init__(self, network: SmallResNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, D) of images (B, C, H, W)."""
        last = self.network.num_layers - 1
        hidden = self.network.extract(images, layers=(last - 1, last)).hidden
        return torch.cat([tokens.patches.flatten(1) for tokens in hidden.values()], dim=1)


class Together(nn.Module):
    """The features of several backbones, each part with length 1."""

    def __init__(self, backbones: list[nn.Module]) -> None:
        super().__init__()
        self.backbones = nn.ModuleList(backbones)

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, D) of images (B, C, H, W)."""
        parts = [F.normalize(backbone(images), dim=1) for backbone in self.backbones]
        return torch.cat(parts, dim=1)


def untrained(recipe: str, words: list[str]) -> list[nn.Module]:
    """Return the backbones of a recipe with random weights."""
    configs = [
        load_config(str(HERE / f"{part}.yaml"), _for_part(part, words)) for part in PARTS[recipe]
    ]
    seed_all(configs[0].train.seed, 0)
    return [build_backbone(config.backbone) for config in configs]


def trained(recipe: str, out: Path) -> list[nn.Module]:
    """Return the backbones at the end of the last stage of each part of a recipe."""
    runs = [_folder(out, part, len(STAGES[part]) - 1) for part in PARTS[recipe]]
    return [open_model(str(run), trust=True)[0] for run in runs]


def evaluate(name: str, backbones: list[nn.Module], config: Config) -> Result:
    """Return k-NN and linear accuracy on the test images."""
    parts = [LastMaps(part) if isinstance(part, SmallResNet) else part for part in backbones]
    backbone = parts[0] if len(parts) == 1 else Together(parts)
    device = pick_device(config.train.device, World())
    started = time.monotonic()
    row = evaluate_backbone(backbone, config, open_data(config.data), device=device)
    seconds = time.monotonic() - started
    return Result(name, config.train.seed, None, seconds, row["knn_top1"], row["linear_top1"])


def print_table(results: list[Result]) -> None:
    """Print one line per run, and the means, in Markdown."""
    print(f"\n{os.cpu_count()} CPU cores")
    print("| features | seed | training, min | evaluation, min | k-NN | linear |")
    print("|---|---|---|---|---|---|")
    trained = [result for result in results if result.name != "untrained"]
    for r in results:
        training = "" if r.train_s is None else f"{r.train_s / 60:.1f}"
        times = f"{training} | {r.eval_s / 60:.1f}"
        print(f"| {r.name} | {r.seed} | {times} | {r.knn:.3f} | {r.linear:.3f} |")
    knn, linear = ([getattr(r, key) for r in trained] for key in ("knn", "linear"))
    if len(trained) > 1:
        means = f"{sum(knn) / len(knn):.3f} | {sum(linear) / len(linear):.3f}"
        print(f"| mean of {len(trained)} seeds | | | | {means} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
