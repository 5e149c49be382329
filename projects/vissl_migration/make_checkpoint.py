"""Write a ResNet in the format of a VISSL checkpoint, to try the migration without one.

    python make_checkpoint.py RUN_OR_MODEL model_final_checkpoint_phase9.torch

The file has all of VISSL's keys (vissl/utils/checkpoint.py): the trunk under ``_feature_blocks``, a
head, the optimizer's state, and the loss with a queue and a momentum encoder. The weights of the
latter are zero and must not be mistaken for the trunk.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from selftask.models.weights.model_source import open_model


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run, or torchvision:NAME with random weights: a ResNet")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    random = {"weights": "none"} if options.model.startswith("torchvision:") else {}
    backbone, _ = open_model(options.model, **random)
    trunk = {f"_feature_blocks.{name}": tensor for name, tensor in backbone.state_dict().items()}
    torch.save(checkpoint(trunk), options.out)
    print(f"{options.out}: {len(trunk)} tensors of the trunk")


def checkpoint(trunk: dict[str, Tensor]) -> dict[str, object]:
    """Return the content of a VISSL checkpoint."""
    width = trunk["_feature_blocks.layer4.1.bn2.weight"].numel()
    heads = {
        "0.clf.0.weight": torch.zeros(width, width),
        "1.clf.0.weight": torch.zeros(128, width),
    }
    encoder = {f"moco_encoder.trunk.{name}": torch.zeros_like(t) for name, t in trunk.items()}
    loss = {**encoder, "queue": torch.zeros(128, 64), "queue_ptr": torch.zeros(1)}
    momentum = {place: {"momentum_buffer": torch.zeros(4)} for place in range(3)}
    return {
        "phase_idx": 9,
        "iteration": 25_000,
        "loss": loss,
        "iteration_num": 0,
        "train_phase_idx": 9,
        "classy_state_dict": {
            "train": True,
            "base_model": {
                "model": {"trunk": trunk, "heads": heads},
                "meta": {"trunk": {}, "heads": []},
            },
            "meters": [],
            "optimizer": {
                "optim": {"state": momentum, "param_groups": []},
                "parameters": {"lr": 0.03},
            },
            "num_updates": 6_400_000.0,
            "losses": [7.1, 7.0],
            "hooks": {},
            "loss": loss,
        },
        "type": "consolidated",
    }


if __name__ == "__main__":
    main()
