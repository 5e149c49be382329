"""Two minutes of self-supervised learning: SimCLR on handwritten digits, and what came of it.

The images are rotated, scaled, shifted and of any contrast, so that comparing raw pixels or the
features of an untrained network says little about the digit. No label is used in training.

    python tools/demo.py [OUT]          (`make demo` does it all)
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from torch import nn

from selftask.cli.main import main as selftask
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.dataset import Sources, open_data
from selftask.environment import World, pick_device
from selftask.evaluate.offline import evaluate_backbone
from selftask.models.address import open_model
from selftask.models.build import build_backbone
EVALUATIONS = "eval.evaluations={knn: {}, linear: {few_labels: [10], repeats: 3}}"


def main(out: str) -> int:
    """Train, then show k-NN and few-labels accuracy of pixels, untrained and trained network."""
    shutil.rmtree(out, ignore_errors=True)
    code = selftask(["train", "simclr", f"out={out}"])
    if code:
        return code
    config = load_config(f"{out}/config.yaml", [EVALUATIONS])
    sources = open_data(config.data)
    models = {
        "raw pixels": nn.Flatten(),
        "untrained network": build_backbone(config.backbone),
        "trained network": open_model(out)[0],
    }
    print(f"\n{'':<22}{'k-NN':>8}{'linear, 10 labels a class':>28}")
    for name, model in models.items():
        print(_line(name, model, config, sources))
    print(f"\nthe weights: {Path(out) / 'export' / 'backbone.pt'}")
    return 0


def _line(name: str, model: nn.Module, config: Config, sources: Sources) -> str:
    row = evaluate_backbone(model, config, sources, device=pick_device("auto", World()))
    return f"{name:<22}{row['knn_top1']:>8.2f}{row['linear_10_labels_top1']:>28.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
