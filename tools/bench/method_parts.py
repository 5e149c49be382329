"""Arguments of methods for which libraries are compared, such as the widths of heads."""

from __future__ import annotations

from typing import Any

_MLP = {"hidden_dim": 2048, "out_dim": 2048}
_SMALL = {"hidden_dim": 512, "out_dim": 128}
_DINO = {"hidden_dim": 2048, "bottleneck": 256, "out_dim": 4096, "freeze_last_layer": 0}
PARTS: dict[str, dict[str, Any]] = {
    "simclr": {"hidden_dim": 512, "out_dim": 128, "norm": True, "temperature": 0.1},
    "dcl": {"hidden_dim": 512, "out_dim": 128, "norm": True, "temperature": 0.1},
    "moco": {**_SMALL, "queue_size": 4096, "temperature": 0.1},
    "nnclr": {
        **_MLP,
        "out_dim": 256,
        "predictor_dim": 4096,
        "queue_size": 4096,
        "temperature": 0.1,
    },
    "byol": {"hidden_dim": 4096, "out_dim": 256},
    "simsiam": {"hidden_dim": 512, "out_dim": 2048},
    "swav": {"hidden_dim": 2048, "out_dim": 128, "num_prototypes": 3000, "freeze_prototypes": 0},
    "dino": _DINO,
    "dinov2": {**_DINO, "targets": "centering", "tied_heads": True, "norm_last_layer": False},
    "barlow": _MLP,
    "vicreg": _MLP,
    "tico": {"hidden_dim": 2048, "out_dim": 256},
    "frossl": {"hidden_dim": 2048, "out_dim": 1024},
    "mae": {"mask_ratio": 0.75, "decoder_dim": 512, "decoder_depth": 8, "decoder_heads": 16},
}
"""Arguments of selftask's methods, from which lightly's parts are built."""
