"""Time from the command to an answer, or to the first optimizer step: selftask and a script.

    python tools/bench/startup.py [--rounds 5] [--only help,config,error,step]

``help``, ``config`` and ``error`` are commands that answer without torch. ``step`` is a whole
training of one step, SimCLR with ResNet-18 on a folder of 32x32 images made here (batch 16, no
workers, no evaluation), against a bare script that does the same: imports torch and torchvision,
reads and augments the images with Pillow and torchvision, one SGD step. Rounds are interleaved.
Times are the CPU time of the child process and its threads as counted by the kernel (``wait4``),
which depends less on other load than wall time. Both run with one thread.

For the time to the end of the step, both exit immediately (``os._exit``), without the shutdown of
the interpreter, and selftask skips checkpoint and export. For the time to exit, both end normally:
selftask has then written a checkpoint and the exported weights, the script nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BATCH = 16

BARE = """
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torchvision import transforms

torch.manual_seed(0)
augment = transforms.Compose([
    transforms.RandomResizedCrop(32, scale=(0.2, 1.0)),
    transforms.RandomHorizontalFlip(),
    transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
    transforms.RandomGrayscale(0.2),
    transforms.ToTensor(),
    transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
])
files = sorted(Path(sys.argv[1]).rglob("*.jpg"))


class Views(torch.utils.data.Dataset):
    def __len__(self):
        return len(files)

    def __getitem__(self, i):
        image = Image.open(files[i]).convert("RGB")
        return augment(image), augment(image)


backbone = torchvision.models.resnet18()
backbone.fc = torch.nn.Identity()
network = torch.nn.Sequential(
    backbone,
    torch.nn.Linear(512, 512, bias=False), torch.nn.BatchNorm1d(512), torch.nn.ReLU(),
    torch.nn.Linear(512, 128, bias=False), torch.nn.BatchNorm1d(128),
)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(Views(), batch_size=16, shuffle=True, drop_last=True)
first, second = next(iter(loader))
output = F.normalize(network(torch.cat([first, second])), dim=1)
logits = output @ output.T / 0.1
logits.fill_diagonal_(-torch.inf)
rows = torch.arange(len(logits))
loss = F.cross_entropy(logits, (rows + len(first)) % len(logits))
optimizer.zero_grad()
loss.backward()
optimizer.step()
print("loss", loss.item(), flush=True)
if "leave" in sys.argv:
    os._exit(0)
"""

RECIPE = """
data: {{name: folder, path: {images}, num_workers: 0}}
views:
  main:
    count: 2
    transforms:
      - {{name: random_resized_crop, size: 32, scale: [0.2, 1.0]}}
      - horizontal_flip
      - {{name: color_jitter, brightness: 0.4, contrast: 0.4, saturation: 0.2, hue: 0.1, p: 0.8}}
      - {{name: grayscale, p: 0.2}}
      - {{name: normalize, stats: imagenet}}
backbone: resnet18
method: {{name: simclr, temperature: 0.1}}
train: {{max_steps: 1, batch_size: {batch}, threads: 1}}
optimizer: {{name: sgd, lr: 0.1}}
eval: {{transforms: [normalize]}}
"""

FIRST_STEP = """
import os
from dataclasses import dataclass

from selftask.hooks.base import Hook
from selftask.registry import register_hook


@register_hook("leave_at_first_step")
@dataclass(eq=False, kw_only=True)
class LeaveAtFirstStep(Hook):
    def on_step(self, task):
        os._exit(0)
"""


def make_images(folder: Path) -> None:
    """Write 64 JPEGs of 32x32 to two folders."""
    from PIL import Image

    draws = np.random.default_rng(0)
    for number in range(64):
        place = folder / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg")


def cpu_seconds(command: list[str], folder: Path, expected: int) -> float:
    """Return CPU seconds of a child process; raise RuntimeError on an unexpected exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "ssl"), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("wb") as output:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != expected:
        text = (folder / "output.txt").read_text(errors="replace")
        raise RuntimeError(f"{' '.join(command)}: exit code {child.returncode}\n{text}")
    return used.ru_utime + used.ru_stime


def commands(folder: Path) -> dict[str, dict[str, Callable[[], float]]]:
    """Return contest -> entry -> function that measures it once."""
    images, count = folder / "images", iter(range(10_000))
    make_images(images)
    (folder / "bare.py").write_text(BARE)
    (folder / "recipe.yaml").write_text(RECIPE.format(images=images, batch=BATCH))
    (folder / "leave_at_first_step.py").write_text(FIRST_STEP)
    python = [sys.executable]
    selftask = [sys.executable, "-m", "selftask"]
    leave = ["import=[leave_at_first_step]", "hooks.leave_at_first_step={}"]

    def run(command: list[str], expected: int = 0) -> Callable[[], float]:
        return lambda: cpu_seconds(command, folder, expected)

    def train(*more: str) -> Callable[[], float]:
        def once() -> float:
            out = f"out={folder}/run{next(count)}"
            return cpu_seconds([*selftask, "train", "recipe.yaml", out, *more], folder, 0)

        return once

    python_only = run([*python, "-c", "pass"])
    return {
        "help": {"python": python_only, "selftask --help": run([*selftask, "--help"])},
        "config": {
            "python": python_only,
            "selftask config simclr": run([*selftask, "config", "simclr"]),
        },
        "error": {
            "python": python_only,
            "train simclr train.epoch=3": run([*selftask, "train", "simclr", "train.epoch=3"], 2),
        },
        "step": {
            "bare script, to the end of the step": run([*python, "bare.py", str(images), "leave"]),
            "selftask, to the end of the step": train(*leave),
            "bare script, to its exit": run([*python, "bare.py", str(images)]),
            "selftask, to its exit": train(),
        },
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="help,config,error,step")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        contests = commands(Path(folder))
        for contest in options.only.split(","):
            entries = contests[contest]
            times: dict[str, list[float]] = {name: [] for name in entries}
            for _ in range(options.rounds):
                for name, measure in entries.items():
                    times[name].append(measure())
            print_table(contest, times)
    return 0


def print_table(contest: str, times: dict[str, list[float]]) -> None:
    """Print minimum and median, and their ratios to those of the first entry."""
    print(f"\n{contest:<38}{'CPU s, min':>12}{'ratio':>8}{'median':>10}{'ratio':>8}")
    first = next(iter(times.values()))
    for name, seconds in times.items():
        least, middle = min(seconds), statistics.median(seconds)
        print(
            f"{name:<38}{least:>12.3f}{least / min(first):>8.2f}"
            f"{middle:>10.3f}{middle / statistics.median(first):>8.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
