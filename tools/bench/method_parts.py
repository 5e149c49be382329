"""Methods that are compared with those of other libraries: arguments, backbone and views.

``CONTESTS[library][method]`` has the options of selftask, from which the library's parts are built.
They are chosen such that both do the same work, as far as the methods are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PATCH = 4  # side of a patch of the transformers, in pixels
_TOKENIZER = "random_tokenizer:RandomTokenizer"


@dataclass(frozen=True)
class Contest:
    """A method of two libraries."""

    parts: dict[str, Any]
    """Arguments of selftask's method."""
    backbone: str = "{name: resnet18, stem: cifar}"
    """selftask's backbone, in yaml."""
    views: dict[str, tuple[int, int]] = field(default_factory=lambda: {"main": (2, 32)})
    """Name of a group -> number of its views, and their size in pixels."""


def _vit(options: str = "") -> str:
    return f"{{name: vit_small, img_size: 32, patch_size: {PATCH}{options}}}"


_ANY_SIZE = _vit(", dynamic_img_size: true")
_ROTARY = ", positions: rope, layer_scale: 1.0e-5, swiglu: true"
_CAUSAL = f"{{name: causal_vit, patch_size: {PATCH}, embed_dim: 384, depth: 12, num_heads: 6}}"
_ONE = {"main": (1, 32)}
_TWO = {"main": (2, 32)}
_CROPS = {"main": (2, 32), "small": (4, 16)}

_MLP = {"hidden_dim": 2048, "out_dim": 2048}
_SMALL = {"hidden_dim": 512, "out_dim": 128}
_NORMED = {**_SMALL, "norm": True, "temperature": 0.1}
_MAE = {"mask_ratio": 0.75, "decoder_dim": 512, "decoder_depth": 8, "decoder_heads": 16}
_DINO = {"hidden_dim": 2048, "bottleneck": 256, "out_dim": 4096, "freeze_last_layer": 0}
_MASKED = {
    **_DINO,
    "tied_heads": False,
    "norm_last_layer": False,
    "mask_probability": 1.0,
    "mask_ratio": [0.3, 0.3],
}
_CENTERED = {**_DINO, "targets": "centering", "tied_heads": True, "norm_last_layer": False}
_NNCLR = {"hidden_dim": 2048, "out_dim": 256, "predictor_dim": 4096}

_LIGHTLY = {
    "simclr": Contest(_NORMED),
    "dcl": Contest(_NORMED),
    "moco": Contest({**_SMALL, "queue_size": 4096, "temperature": 0.1}),
    "nnclr": Contest({**_NNCLR, "queue_size": 4096, "temperature": 0.1}),
    "byol": Contest({"hidden_dim": 4096, "out_dim": 256}),
    "simsiam": Contest({"hidden_dim": 512, "out_dim": 2048}),
    "swav": Contest(
        {"hidden_dim": 2048, "out_dim": 128, "num_prototypes": 3000, "freeze_prototypes": 0}
    ),
    "dino": Contest(_DINO, views=_CROPS),
    "dinov2": Contest(_CENTERED, _ANY_SIZE, _CROPS),
    "barlow": Contest(_MLP),
    "vicreg": Contest(_MLP),
    "tico": Contest({"hidden_dim": 2048, "out_dim": 256}),
    "frossl": Contest({"hidden_dim": 2048, "out_dim": 1024}),
    "mae": Contest(_MAE, _ANY_SIZE, _ONE),
}
_STABLE = {
    "beit": Contest({"tokenizer": _TOKENIZER, "mask_ratio": 0.4}, _vit(), _ONE),
    "cmae": Contest(
        {
            "mask_ratio": 0.75,
            "decoder_dim": 384,
            "decoder_depth": 1,
            "decoder_heads": 6,
            "feature_depth": 1,
            "hidden_dim": 384,
            "out_dim": 256,
        },
        _vit(),
        _TWO,
    ),
    "crossmae": Contest(
        {
            "mask_ratio": 0.75,
            "predicted_ratio": 0.25,
            "decoder_dim": 256,
            "decoder_depth": 12,
            "decoder_heads": 8,
        },
        _vit(),
        _ONE,
    ),
    "data2vec": Contest({"mask_ratio": 0.6, "top_blocks": 6}, _vit(), _ONE),
    "dinov2": Contest({**_MASKED, "koleo_weight": 0.0}, _ANY_SIZE, _CROPS),
    "dinov3": Contest(
        {**_MASKED, "koleo_weight": 0.1, "gram_start": "100%"},
        _vit(", dynamic_img_size: true, registers: 4"),
        _CROPS,
    ),
    "ibot": Contest(_MASKED, _vit(), _TWO),
    "igpt": Contest({}, _CAUSAL, _ONE),
    "ijepa": Contest(
        {
            "predictor_dim": 384,
            "predictor_depth": 6,
            "predictor_heads": 6,
            "max_context": 0.35,  # the mean share of theirs
        },
        _vit(", class_token: false, pool: avg"),
        _ONE,
    ),
    "lejepa": Contest({**_MLP, "out_dim": 512, "num_slices": 1024}, _ANY_SIZE, _CROPS),
    "maskfeat": Contest({"mask_ratio": 0.4, "cell_size": PATCH, "num_bins": 9}, _vit(), _ONE),
    "mocov3": Contest(
        {"hidden_dim": 4096, "out_dim": 256, "predictor_norm": False}, _ANY_SIZE, _TWO
    ),
    "msn": Contest(
        {**_MLP, "out_dim": 256, "norm": False, "num_prototypes": 1024, "mask_ratio": 0.6},
        _vit(),
        _TWO,
    ),
    "nepa": Contest({}, _vit(f", class_token: false, pool: avg{_ROTARY}"), _ONE),
    "pirl": Contest(
        {"out_dim": 128, "num_negatives": 4096}, views={"image": (1, 32), "tiles": (4, 16)}
    ),
    "simmim": Contest({"mask_ratio": 0.6, "mask_size": PATCH}, _vit(), _ONE),
    "vicregl": Contest({**_MLP, "local_dim": 2048, "num_matches": 1}, _vit(), _TWO),
    "wmse": Contest({"hidden_dim": 1024, "out_dim": 16, "sub_batch": 32}),
}
CONTESTS: dict[str, dict[str, Contest]] = {"lightly": _LIGHTLY, "stable-pretraining": _STABLE}
