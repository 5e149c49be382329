"""``backbone.lora``: adapters, what is frozen, merging, and exact runs."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import tiny
from selftask.checkpoint import rotation, store
from selftask.config.load import load_config, to_yaml
from selftask.config.schema.component import LoRAConfig
from selftask.errors import ConfigError, UserError
from selftask.methods.families.block_prediction import initialize as as_ijepa
from selftask.methods.families.masked_patches import initialize_as_mae
from selftask.models.backbones.vit import ViTMicro
from selftask.models.weights.averages import kept_average
from selftask.models.weights.lora import LowRank, adapt, adapted_state, merged, merged_state
from selftask.models.weights.model_source import open_model, read_weights


def vit() -> nn.Module:
    return timm.create_model("test_vit", num_classes=0)


MODELS = {
    "qkv": (vit, 160),
    "weights used without their layer": (
        lambda: timm.create_model("beit_base_patch16_224", num_classes=0, depth=1, embed_dim=48,
                                  num_heads=4, img_size=32),
        32,
    ),
    "weights used without their layer, rotary": (
        lambda: timm.create_model("eva02_tiny_patch14_224", num_classes=0, depth=1, img_size=28,
                                  patch_size=14, embed_dim=48, num_heads=4, qkv_fused=True),
        28,
    ),
    "DINOv3": (lambda: timm.create_model("vit_small_patch16_dinov3", num_classes=0, depth=1,
                                         embed_dim=48, num_heads=4, img_size=32,
                                         init_values=1.0), 32),
    "rope": (lambda: ViTMicro(positions="rope", depth=1).build(), 32),
    "rope_eva": (lambda: ViTMicro(positions="rope_eva", depth=1).build(), 32),
    "rope_capi": (lambda: ViTMicro(positions="rope_capi", depth=1).build(), 32),
    "multi-head attention": (
        lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 24, 48),
        32,
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten()),
        8,
    ),
}  # fmt: skip


def moved(model: nn.Module, seed: int = 0) -> nn.Module:
    """Adapters with random values, as after training."""
    draw = torch.Generator().manual_seed(seed)
    for part in model.modules():
        if isinstance(part, LowRank):
            part.lora_b.data = torch.randn(part.lora_b.shape, generator=draw) * 0.1
    return model


def expected(model: nn.Module, rank: int, alpha: float) -> dict[str, Tensor]:
    """The base's weights with alpha / r * B A added, by hand."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        where, mark, part = name.partition(".parametrizations.")
        if not mark and not name.startswith("parametrizations."):
            state[name] = value
        elif part.endswith(".original"):
            key = part.removesuffix(".original")
            a, b = (model.state_dict()[f"{where}{mark}{key}.0.lora_{x}"] for x in "ab")
            update = torch.einsum("or,ri->oi", b.double(), a.double()) * alpha / rank
            state[f"{where}.{key}"] = (value.double() + update.reshape(value.shape)).float()
    return state


@pytest.mark.parametrize("kind", MODELS)
def test_merged_weights_are_the_adapter_applied_to_the_base(kind: str) -> None:
    build, side = MODELS[kind]
    torch.manual_seed(0)
    model = build().eval()
    images, before = torch.rand(2, 3, side, side), model.state_dict()
    plain = model(images)
    adapt(model, LoRAConfig(rank=3, alpha=6.0))
    if kind == "weights used without their layer":  # torch then leaves its fused attention
        torch.testing.assert_close(model(images), plain, atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(model(images), plain), "B is 0 at first"
    moved(model)
    alone, features = merged(model), model(images)
    assert (features - plain).abs().max() > 1e-3, "the adapters have an effect"
    torch.testing.assert_close(alone(images), features, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(model(images), features, atol=0, rtol=0)  # unchanged by its copy
    wanted = expected(model, 3, 6.0)
    for state in (alone.state_dict(), merged_state(model.state_dict())):
        assert state.keys() == before.keys() == wanted.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=1e-6)
    fresh = build()
    fresh.load_state_dict(alone.state_dict())  # the library's own model takes them


@pytest.mark.parametrize("kind", MODELS)
def test_every_adapter_gets_the_gradient_of_its_weight(kind: str) -> None:
    """By the chain rule: that of B is alpha / r * G A^T, of A alpha / r * B^T G."""
    build, side = MODELS[kind]
    torch.manual_seed(0)
    model = build().eval()
    adapt(model, LoRAConfig(rank=3, alpha=6.0))
    plain, images = merged(moved(model)), torch.rand(2, 3, side, side)
    weight = torch.randn_like(plain(images))
    for network in (model, plain.requires_grad_(True)):
        (network(images) * weight).sum().backward()
    adapters = [(n, part) for n, part in model.named_modules() if isinstance(part, LowRank)]
    for name, adapter in adapters:
        gradient = plain.get_parameter(name.replace("parametrizations.", "")[:-2]).grad
        assert gradient is not None and gradient.abs().max() > 0, name
        gradient = gradient.flatten(1).double()
        expected_b = 2 * gradient @ adapter.lora_a.double().T
        expected_a = 2 * adapter.lora_b.double().T @ gradient
        for value, wanted in ((adapter.lora_a.grad, expected_a), (adapter.lora_b.grad, expected_b)):
            assert value is not None, name
            close = {"atol": 1e-5 * wanted.abs().max().item(), "rtol": 1e-5}
            torch.testing.assert_close(value.double(), wanted, **close)
    names = {name for name, value in model.named_parameters() if value.grad is not None}
    assert names and all(".lora_" in name or name.startswith("parametr") for name in names)


def test_a_copy_follows_alone() -> None:
    """An EMA teacher is a copy; merging one network leaves the other as it was."""
    model = vit()
    adapt(model, LoRAConfig(rank=2))
    teacher, images = deepcopy(model), torch.rand(1, 3, 160, 160)
    before = teacher.eval()(images)
    merged(moved(model))
    assert torch.equal(teacher(images), before) and not torch.equal(model.eval()(images), before)


def names_trained(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if value.requires_grad}


def test_what_is_trained() -> None:
    model = vit()
    adapt(model, LoRAConfig(rank=2, layers=["*.attn.qkv"], train=["norm"]))
    trained = names_trained(model)
    adapters = {name for name in trained if ".lora_" in name}
    assert adapters and all(".attn.qkv.parametrizations.weight.0." in name for name in adapters)
    assert trained - adapters == {"norm.weight", "norm.bias"}
    model = vit()
    adapt(model, LoRAConfig(rank=0, train=["*.bias"]))
    names = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    assert names_trained(model) == names and merged(model) is model


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rank": 0}, "nothing of the backbone would be trained"),
        ({"layers": ["*.kqv"]}, r"backbone.lora.layers: '\*.kqv' matches nothing"),
        ({"train": ["*.bais"]}, r"backbone.lora.train: '\*.bais' matches nothing"),
        ({"layers": ["norm"]}, "backbone.lora.layers: 'norm' matches nothing"),
    ],
)
def test_mistaken_names_are_errors(config: dict[str, Any], text: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=text):
        adapt(vit(), LoRAConfig(**config))


@pytest.mark.parametrize("norm", [spectral_norm, weight_norm])
def test_parametrizations_of_the_backbone_itself_are_kept(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 4)).eval()
    keys, images = model.state_dict().keys(), torch.randn(2, 4)
    assert merged(model) is model and merged_state(model.state_dict()).keys() == keys
    adapt(model, LoRAConfig(rank=2))
    moved(model)
    plain = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 4)).eval()
    plain.load_state_dict(merged_state(model.state_dict()))
    assert merged(model).state_dict().keys() == keys
    for other in (merged(model), plain):
        torch.testing.assert_close(other(images), model(images))


@pytest.mark.parametrize("initialize", [initialize_as_mae, partial(as_ijepa, std=None)])
def test_a_method_initializes_the_weights_below_the_adapters(initialize: Any) -> None:
    plain, adapted = (ViTMicro(depth=2).build() for _ in range(2))
    adapt(adapted, LoRAConfig(rank=2))
    for network in (plain, adapted):
        torch.manual_seed(0)
        initialize(network)
    state = merged(adapted).state_dict()
    for name in ("patch_embed.proj.weight", "blocks.1.attn.qkv.weight", "blocks.1.mlp.fc2.weight"):
        assert torch.equal(state[name], plain.state_dict()[name]), name


def test_weights_for_the_plain_network_load_into_the_base() -> None:
    model, plain = vit(), vit()
    adapt(model, LoRAConfig(rank=2))
    model.load_state_dict(adapted_state(model, plain.state_dict()))
    for name, value in merged(model).state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


def test_the_section_reads_and_writes(tmp_path: Path) -> None:
    config = load_config("mae/digits", ["backbone.lora={rank: 4, train: ['*.bias']}"])
    assert config.backbone.lora == LoRAConfig(rank=4, train=["*.bias"])
    assert "lora" not in config.backbone.args
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(str(tmp_path / "again.yaml"), []).backbone == config.backbone
    assert load_config("mae/digits", ["backbone.lora=null"]).backbone.lora is None
    with pytest.raises(ConfigError, match=r"did you mean 'backbone\.lora\.rank'"):
        load_config("mae/digits", ["backbone.lora.rnk=4"])


LORA = "backbone.lora={rank: 2, train: ['*norm*']}"


@pytest.mark.slow
def test_a_run_resumes_exactly_and_exports_merged_weights(tmp_path: Path) -> None:
    whole = tiny.train("dinov2", tmp_path, "whole", LORA)
    tiny.train("dinov2", tmp_path, "half", LORA, "train.stop_at=7")
    task = tiny.train("dinov2", tmp_path, "half", LORA)
    for ours, theirs in ((task.base_model, whole.base_model), (task.loss, whole.loss)):
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), name
    student, teacher = whole.base_model.backbone, whole.loss.teacher.network.backbone
    for name, value in teacher.named_parameters():
        same = torch.equal(value, student.get_parameter(name))
        assert same != (".lora_" in name or "norm" in name), name  # only what is trained differs
    optimized = {id(p) for group in whole.optimizer.param_groups for p in group["params"]}
    of_base = [p for name, p in student.named_parameters() if name.endswith("original")]
    assert of_base and optimized.isdisjoint(map(id, of_base))

    exported = expected(teacher, 2, 8.0)
    run = str(tmp_path / "whole")
    newest = rotation.checkpoints(tmp_path / "whole/checkpoints")[0]
    from_export, facts = open_model(run)
    assert "lora" not in facts["architecture"]["args"]
    for state in (from_export.state_dict(), read_weights(f"{run}@{tiny.STEPS}")):
        assert state.keys() == exported.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, exported[name], atol=1e-6, rtol=1e-6)
    saved = store.load(newest)["model"]  # base and adapters
    assert any(key.endswith(".original") for key in saved)


def test_the_average_of_adapters_is_that_of_the_plain_network() -> None:
    """``export --weights ema`` loads it into a backbone without adapters."""
    network = nn.Sequential(nn.Linear(3, 4))
    adapt(network, LoRAConfig(rank=2))
    state = {f"backbone.{name}": value for name, value in network.state_dict().items()}
    average = kept_average({"model": state, "hooks": {"ema": {"weights": state}}}, "ema")
    assert average.keys() == merged(network).state_dict().keys()
