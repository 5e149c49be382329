"""Files of Hugging Face's transformers load into timm's models, with the same features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from selftask.errors import UserError
from selftask.models.weights.load import load_weights
from selftask.models.weights.read import read_state

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
DINOV3 = {"patch_size": 8, "intermediate_size": 128, "num_register_tokens": 4}

CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "ViT": (
        "ViT",
        {"patch_size": 8, "intermediate_size": 256, "layer_norm_eps": 1e-6},
        "vit_tiny_patch16_224",
        {"num_classes": 0},
    ),
    "DINOv2": ("Dinov2", {"patch_size": 8}, "vit_small_patch14_dinov2", {}),
    "DINOv2 with registers": (
        "Dinov2WithRegisters",
        {"patch_size": 8},
        "vit_small_patch14_reg4_dinov2",
        {},
    ),
    "DINOv2, SwiGLU": (
        "Dinov2",
        {"patch_size": 8, "use_swiglu_ffn": True},
        "vit_giant_patch14_dinov2",
        {"mlp_ratio": 5.5},
    ),
    "DINOv3": ("DINOv3ViT", DINOV3, "vit_small_patch16_dinov3_qkvb", {"mlp_ratio": 2}),
    "DINOv3, SwiGLU": (
        "DINOv3ViT",
        {**DINOV3, "use_gated_mlp": True, "hidden_act": "silu"},
        "vit_small_plus_patch16_dinov3_qkvb",
        {"mlp_ratio": 2},
    ),
}


def network(name: str, sizes: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, sizes, timm_name, timm_sizes = CASES[case]
    torch.manual_seed(0)
    model = network(name, sizes)
    model.save_pretrained(tmp_path)
    ours = timm.create_model(timm_name, **TIMM, **timm_sizes).eval()
    load_weights(ours, read_state(tmp_path / "model.safetensors"))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images).last_hidden_state
        tokens = ours.forward_features(images)  # type: ignore[operator]
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-4)


def test_a_backbone_of_transformers_loads_its_own_names() -> None:
    model: nn.Module = network("ViT", {"patch_size": 8})
    load_weights(model, {key: value + 1 for key, value in model.state_dict().items()})
    with pytest.raises(UserError, match="another shape"):
        load_weights(network("ViT", {"patch_size": 4}), model.state_dict())
