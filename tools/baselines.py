"""Compare the features of a run with raw pixels and with its untrained network.

    python tools/baselines.py RUN [key=value ...]

Shows k-NN and linear accuracy with 10 labels per class, on the labeled images of the run.
"""

from __future__ import annotations

import sys

from torch import nn

from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.distributed.device import pick_device
from selftask.distributed.world import World
from selftask.evaluate.offline import evaluate_backbone
from selftask.models.build import build_backbone
from selftask.models.weights.model_source import open_model

EVALUATIONS = "eval.evaluations={knn: {}, linear: {few_labels: [10], repeats: 3}}"


def show(run: str, overrides: list[str]) -> None:
    """Print one line each for pixels, the untrained network and the trained network."""
    config = load_config(f"{run}/config.yaml", [EVALUATIONS, *overrides])
    sources = open_data(config.data)
    device = pick_device(config.train.device, World())
    models = {
        "raw pixels": nn.Flatten(),
        "untrained network": build_backbone(config.backbone),
        "trained network": open_model(run)[0],
    }
    print(f"{'':<20}{'k-NN':>8}{'linear, 10 labels a class':>28}")
    for name, model in models.items():
        row = evaluate_backbone(model, config, sources, device=device)
        print(f"{name:<20}{row['knn_top1']:>8.3f}{row['linear_10_labels_top1']:>28.3f}", flush=True)


if __name__ == "__main__":
    show(sys.argv[1], sys.argv[2:])
