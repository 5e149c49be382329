"""Compare methods for dense features with their image-level counterparts, on photographs.

    python tools/dense_ranking.py data=DIR data.val=DIR [--seconds 150] [--out DIR]

Each method trains for the same CPU time on crops of 64 pixels. Patches are then matched between
views of the images of data.val (`selftask eval correspondence`), and their classes predicted by
k-NN. Prints the table of docs/league.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.evaluate.correspondence import Correspondence, evaluate_correspondence
from selftask.logs import read_metrics
from selftask.models.features.tokens import Features, from_map

PATCH, SIZE = 8, 64
VIT = ["backbone={name: vit_micro, patch_size: 8}", "train.batch_size=32"]
HEAD = ["method.out_dim=1024", "method.hidden_dim=512", *VIT]
NETWORKS = {  # method -> words
    "dino": HEAD,
    "ibot": HEAD,
    "dinov2": HEAD,
    "moco": ["backbone={name: small_resnet}"],
    "densecl": ["backbone={name: small_resnet}"],
    "vicreg": ["backbone={name: small_resnet}"],
    "vicregl": ["backbone={name: small_resnet}"],
}
COLUMNS = ("correspondence_pck_0.1", "correspondence_pck_0.2", "knn_top1")


class Pixels(nn.Module):
    """Features of a patch are its pixels."""

    offers = frozenset({"dense"})

    def extract(self, images: Tensor) -> Features:
        maps = nn.functional.pixel_unshuffle(images, PATCH)
        return Features(maps.mean(dim=(2, 3)), from_map(maps), {})


def grid_size(method: str) -> int:
    """Return the side of images for correspondence: 8 x 8 patches for either network."""
    return SIZE if NETWORKS[method] is HEAD else 2 * SIZE


def words_of(method: str, data: list[str], out: Path, *more: str) -> list[str]:
    """Return the command that trains a method."""
    dense = f"correspondence: {{size: {grid_size(method)}, images: 400}}"
    return [
        *(sys.executable, "-m", "selftask", "train", f"{method}/images", *data),
        *(f"image_size={SIZE}", "data.num_workers=0", "train.threads=1", *NETWORKS[method]),
        *(f"eval.evaluations={{knn: {{}}, {dense}}}", "eval.every=1000000 steps"),
        *(f"out={out}", *more),
    ]


def cpu_seconds(words: list[str]) -> float:
    """Run a command; return the CPU time of its threads."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return used() - before


def train(method: str, data: list[str], seconds: float, out: Path) -> list[dict[str, float]]:
    """Train a method for a CPU time; return the rows of its evaluations, the first untrained."""
    with tempfile.TemporaryDirectory() as folder:
        without = "eval.evaluations={knn: null, correspondence: null}"
        times = [
            cpu_seconds(
                words_of(method, data, Path(folder, str(n)), f"train.max_steps={n}", without)
            )
            for n in (2, 12)
        ]
    steps = max(10, round(seconds * 10 / (times[1] - times[0])))
    cpu_seconds(words_of(method, data, out / method, f"train.max_steps={steps}"))
    return [row for row in read_metrics(out / method / "metrics.jsonl") if COLUMNS[0] in row]


def pixels(data: list[str]) -> dict[str, float]:
    """Return the correspondence of raw pixels."""
    config = load_config("moco/images", [*data, f"image_size={SIZE}"])
    options = Correspondence(size=SIZE, images=400)
    sources = open_data(config.data)
    device = torch.device("cpu")
    return evaluate_correspondence(Pixels(), config, sources, options, device=device)


def line(name: str, row: dict[str, float]) -> str:
    cells = [f"{row[column]:.3f}" if column in row else "-" for column in COLUMNS]
    return "| " + " | ".join([name, f"{row['step']:.0f}" if "step" in row else "-", *cells]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/dense_ranking"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| | steps | PCK at 0.1 | PCK at 0.2 | k-NN top-1 |\n|---|---|---|---|---|")
    print(line("raw pixels", pixels(options.data)), flush=True)
    for method in NETWORKS:
        untrained, *_, trained = train(method, options.data, options.seconds, options.out)
        if method in ("dino", "moco"):
            network = "ViT" if NETWORKS[method] is HEAD else "ResNet"
            print(line(f"{network}, untrained", untrained), flush=True)
        print(line(f"`{method}`", trained), flush=True)


if __name__ == "__main__":
    main()
