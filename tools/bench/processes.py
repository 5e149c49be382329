"""Wall time of a training on all cores of a CPU: a process with a thread a core, or one a core.

    python tools/bench/processes.py PHOTOS [--rounds 3] [--steps 10] [--models ViT]

PHOTOS is a folder of classes with JPEGs. Each entry is ``selftask train`` with a worker a process,
the same batch over all processes, and the default precision of this CPU. Entries take turns.
Figures are milliseconds an image: the least of all steps, which other load disturbs little, and in
brackets the median. The first two steps of a run do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rounds import in_turns

CORES = len(os.sched_getaffinity(0))
ENTRIES = {  # processes, threads
    "one thread": (1, 1),
    f"{CORES} threads": (1, CORES),
    f"{CORES} processes": (CORES, 1),
}
MODELS = {  # recipe, what differs, and images of a step
    "small_resnet, SimCLR, 2x32": ("simclr/digits", 128),
    "ResNet-18, SimCLR, 2x32": ("simclr/resnet18_cifar10", 32),
    "ResNet-18, SimCLR, 2x224": ("simclr/resnet50_imagenet backbone.name=resnet18", 16),
    "ResNet-50, SimCLR, 2x224": ("simclr/resnet50_imagenet", 8),
    "ViT-Ti/16, MAE, 224": ("mae/vit_base_imagenet backbone=vit_tiny", 16),
    "ViT-Ti/16, DINO, 2x224 + 8x96": ("dino/vit_small_imagenet backbone.name=vit_tiny", 8),
}


def measure(model: str, entry: str, photos: Path, steps: int, folder: Path) -> list[float]:
    """Return the milliseconds an image of each step of a short training."""
    (words, batch), (processes, threads) = MODELS[model], ENTRIES[entry]
    data = "val=null" if "digits" in words else f"{{name: folder, path: {photos}, val: null}}"
    command = [sys.executable, "-m", "selftask", "train", *words.split(), f"out={folder}"]
    command += [f"data.{data}" if data == "val=null" else f"data={data}", "data.num_workers=1"]
    command += [f"launch.processes={processes}", f"train.threads={threads}", "train.device=cpu"]
    command += [f"train.batch_size={batch}", f"train.max_steps={steps + 2}", "train.log_every=1"]
    command += ["eval.evaluations={}", "train.report=false"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [1e3 * row["step_s"] / batch for row in rows if "step_s" in row][2:]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--models", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(f"| | {' | '.join(ENTRIES)} | processes / threads |\n|---|---|---|---|---|", flush=True)
    for model in MODELS:
        if not model.startswith(tuple(options.models)):
            continue
        steps: dict[str, list[float]] = {entry: [] for entry in ENTRIES}
        for number in range(options.rounds):
            for entry in in_turns(list(ENTRIES), number):
                with tempfile.TemporaryDirectory() as folder:
                    run = Path(folder) / "run"
                    steps[entry] += measure(model, entry, options.photos, options.steps, run)
        _, threads, processes = (min(times) for times in steps.values())
        cells = [f"{min(times):.3g} ({statistics.median(times):.3g})" for times in steps.values()]
        print(f"| {model} | {' | '.join(cells)} | {processes / threads:.2f} |", flush=True)


if __name__ == "__main__":
    main()
