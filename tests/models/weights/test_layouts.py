"""Files as other frameworks write them: each is made as that framework does, and loads whole."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from written_files import State, prefixed, resnet, to_detectron2, vit, zeroed

from selftask.errors import UserError
from selftask.models.weights.layouts import LAYOUTS
from selftask.models.weights.load import load_weights
from selftask.models.weights.read import read_state


def lightly_file(model: nn.Module) -> dict[str, Any]:
    """The Lightning checkpoint of lightly's examples: nn.Sequential(*list(resnet.children()))."""
    backbone = nn.Sequential(*list(model.children())[:-1])
    state = prefixed("backbone.", dict(backbone.state_dict()))
    teacher = prefixed("backbone_momentum.", zeroed(dict(backbone.state_dict())))
    head = {"projection_head.layers.0.weight": torch.zeros(4, 4)}
    return {"state_dict": {**state, **teacher, **head}, "epoch": 3, "global_step": 9}


def moco(s: State) -> dict[str, Any]:
    heads = {f"module.encoder_{e}.fc.0.weight": torch.zeros(2, 2) for e in "qk"}
    keys = prefixed("module.encoder_k.", zeroed(s))
    queue = {"module.queue": torch.zeros(2, 3)}
    return {"state_dict": {**keys, **prefixed("module.encoder_q.", s), **heads, **queue}}


def lightly_train(state: State, name: str) -> dict[str, Any]:
    """DINO's Lightning checkpoint: the student is a copy that the optimizer trains."""
    head = {"student_projection_head.layers.0.weight": torch.zeros(2, 2)}
    student, teacher = (name.format(part) for part in ("student", "teacher"))
    networks = {**prefixed(student, zeroed(state)), **prefixed(teacher, state)}
    return {"state_dict": {**networks, **head}, "epoch": 3}


def in_chunks(state: State) -> State:
    """DINOv2's blocks with ``block_chunks``: identities keep the index of a block in its chunk."""
    return {re.sub(r"^blocks\.(\d+)\.", r"blocks.\1.\1.", key): v for key, v in state.items()}


def of_openmmlab(state: State) -> State:
    """The names of a vision transformer of mmpretrain."""
    names = (
        ("patch_embed.proj.", "patch_embed.projection."),
        (r"^blocks\.", "layers."),
        (r"\.norm([12])\.", r".ln\1."),
        (r"^norm\.", "ln1."),
        (r"\.mlp\.fc1\.", ".ffn.layers.0.0."),
        (r"\.mlp\.fc2\.", ".ffn.layers.1."),
    )
    for pattern, replacement in names:
        state = {re.sub(pattern, replacement, key): value for key, value in state.items()}
    return state


def dinov3() -> nn.Module:
    name = "vit_small_patch16_dinov3_qkvb"
    model: nn.Module = timm.create_model(name, img_size=32, depth=2, embed_dim=64, num_heads=2)
    for block in model.blocks:  # type: ignore[union-attr]
        nn.init.normal_(block.attn.q_bias)
        nn.init.normal_(block.attn.v_bias)
    return model


def dinov3_file(model: nn.Module) -> State:
    """The file that Meta publishes: one bias of qkv, of which a mask hides that of k."""
    state: dict[str, Tensor] = {"mask_token": torch.zeros(1, 64)}
    state |= {"rope_embed.periods": torch.ones(8), "local_cls_norm.weight": torch.ones(64)}
    for key, value in model.state_dict().items():
        name = re.sub(r"gamma_(\d)", r"ls\1.gamma", key).replace("reg_token", "storage_tokens")
        if key.endswith("q_bias"):
            part, hidden = key.removesuffix("q_bias"), torch.full_like(value, 3.0)
            v = model.state_dict()[f"{part}v_bias"]
            state[f"{part}qkv.bias"] = torch.cat([value, hidden, v])
            state[f"{part}qkv.bias_mask"] = torch.cat([value * 0 + 1, value * 0, value * 0 + 1])
        elif not key.endswith("v_bias"):
            state[name] = value
    return state


FILES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "MoCo": (resnet, lambda m: moco(dict(m.state_dict()))),
    "MoCo v3": (
        vit,
        lambda m: {
            "state_dict": {
                **prefixed("module.momentum_encoder.", zeroed(m.state_dict())),
                **prefixed("module.base_encoder.", m.state_dict()),
                "module.base_encoder.head.0.weight": torch.zeros(2, 2),
                "module.predictor.0.weight": torch.zeros(2, 2),
            },
            "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}},
        },
    ),
    "DINO, DINOv2": (
        vit,
        lambda m: {
            "student": prefixed("module.backbone.", zeroed(m.state_dict())),
            "teacher": {
                **prefixed("backbone.", m.state_dict()),
                "head.mlp.0.weight": torch.zeros(2, 2),
            },
            "args": pickle_of_namespace(),
        },
    ),
    "DINOv2, blocks in chunks": (
        vit,
        lambda m: {
            "teacher": {
                **prefixed("backbone.", in_chunks(m.state_dict())),
                "dino_head.mlp.0.weight": torch.zeros(2, 2),
            }
        },
    ),
    "DINOv3": (dinov3, dinov3_file),
    "I-JEPA": (
        vit,
        lambda m: {
            "encoder": prefixed("module.", zeroed(m.state_dict())),
            "predictor": prefixed("module.predictor_", m.state_dict()),
            "target_encoder": prefixed("module.", m.state_dict()),
            "opt": {"state": {}},
        },
    ),
    "BYOL": (
        resnet,
        lambda m: {
            **prefixed("target_encoder.net.", zeroed(m.state_dict())),
            **prefixed("online_encoder.net.", m.state_dict()),
            "online_predictor.net.0.weight": torch.zeros(2, 2),
        },
    ),
    "SwAV, DeepCluster v2": (
        resnet,
        lambda m: {
            **prefixed("module.", m.state_dict()),
            "module.projection_head.0.weight": torch.zeros(2, 2),
            "module.prototypes.weight": torch.zeros(2, 2),
        },
    ),
    "MAE": (
        vit,
        lambda m: {
            "model": {
                **m.state_dict(),
                "mask_token": torch.zeros(1, 1, 2),
                "decoder_pos_embed": torch.zeros(1, 5, 2),
                "decoder_blocks.0.norm1.weight": torch.zeros(2),
            },
            "args": pickle_of_namespace(),
            "scaler": {"scale": 65536.0},
        },
    ),
    "Barlow Twins, VICReg": (
        resnet,
        lambda m: {
            "model": {
                **prefixed("module.backbone.", m.state_dict()),
                "module.projector.0.weight": torch.zeros(2, 2),
            },
            "optimizer": {"state": {0: {"mu": torch.zeros(2)}}},
        },
    ),
    "solo-learn, MMSelfSup": (
        resnet,
        lambda m: {
            "state_dict": {
                **prefixed("momentum_backbone.", zeroed(m.state_dict())),
                **prefixed("backbone.", m.state_dict()),
                "classifier.weight": torch.zeros(2, 2),
            },
        },
    ),
    "MMSelfSup, MMPretrain, vision transformer": (
        vit,
        lambda m: {
            "meta": {"epoch": 3},
            "state_dict": {
                **prefixed("backbone.", of_openmmlab(m.state_dict())),
                "neck.mask_token": torch.zeros(1, 1, 2),
                "neck.decoder_blocks.0.ln1.weight": torch.zeros(2),
            },
        },
    ),
    "lightly": (resnet, lightly_file),
    "lightly-train": (
        resnet,
        lambda m: lightly_train(
            dict(m.state_dict()), "{}_embedding_model.wrapped_model._features."
        ),
    ),
    "lightly-train, DINOv2 of 2025": (
        vit,
        lambda m: lightly_train(dict(m.state_dict()), "{}_embedding_model_wrapper._model."),
    ),
    "detectron2": (resnet, lambda m: {"model": to_detectron2(dict(m.state_dict()))}),
    "an unknown framework": (
        vit,
        lambda m: {"run": {"ours": prefixed("trunk.the-net.", m.state_dict())}},
    ),
    "torch.compile and FSDP": (
        vit,
        lambda m: {
            "_orig_mod." + key.replace("blocks.0.", "blocks.0._fsdp_wrapped_module."): value
            for key, value in m.state_dict().items()
        },
    ),
}


def pickle_of_namespace() -> Any:
    from argparse import Namespace

    return Namespace(lr=0.1, arch="vit")


@pytest.mark.parametrize("writer", FILES)
def test_every_layout_loads_whole(writer: str, tmp_path: Path) -> None:
    make, wrap = FILES[writer]
    model = make()
    torch.save(wrap(model), tmp_path / "w.pth")
    fresh = make()
    load_weights(fresh, read_state(tmp_path / "w.pth"))
    own = fresh.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(own[key], value) or "num_batches" in key, key


def test_biases_of_dinov3_that_are_0_need_no_name(tmp_path: Path) -> None:
    """timm has models with biases of q and v and models without; most released ones are all 0."""
    model = dinov3()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_bias", "v_bias")):
            nn.init.zeros_(parameter)
    name = "vit_small_patch16_dinov3"
    plain = timm.create_model(name, img_size=32, depth=2, embed_dim=64, num_heads=2)
    load_weights(plain, dinov3_file(model))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(plain.eval()(images), model.eval()(images))
    with pytest.raises(UserError, match=r"unexpected: blocks\.0\.attn\.q_bias"):
        load_weights(plain, dinov3_file(dinov3()))


def test_every_row_of_the_table_has_its_file() -> None:
    elsewhere = ("VISSL", "Classy Vision", "Caffe2")  # test_vissl_files.py, test_converters.py
    writers = {row.writer for row in LAYOUTS if not row.writer.startswith(elsewhere)}
    assert writers <= set(FILES)


def test_two_networks_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    state = dict(resnet().state_dict())
    torch.save({"left": state, "right": zeroed(state)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"several networks that fit \('left\.', 'right\.'\)"):
        load_weights(resnet(), read_state(tmp_path / "w.pth"), what="w.pth")
    torch.save({"left": state, "right": state}, tmp_path / "w.pth")
    load_weights(resnet(), read_state(tmp_path / "w.pth"))


def test_networks_of_another_architecture_are_not_said_to_fit(tmp_path: Path) -> None:
    """Two encoders of bottlenecks for a ResNet-18: the first differences, with their shapes."""
    bottleneck = torchvision.models.resnet.Bottleneck
    state = dict(torchvision.models.ResNet(bottleneck, [1, 1, 1, 1]).state_dict())
    torch.save({"left": state, "right": zeroed(state)}, tmp_path / "w.pth")
    with pytest.raises(UserError) as error:
        load_weights(resnet(), read_state(tmp_path / "w.pth"), what="w.pth", option="prefix")
    message = str(error.value)
    assert "several networks" not in message
    assert "layer1.0.conv1.weight is (64, 64, 1, 1), wanted (64, 64, 3, 3)" in message
    assert "as many match without: 'right.'" in message


@pytest.mark.parametrize(
    ("make", "key", "num_prefix"),
    [
        (
            lambda size: timm.create_model("vit_tiny_patch16_224", depth=1, img_size=size),
            "pos_embed",
            1,
        ),
        (
            lambda size: timm.create_model(
                "deit_tiny_distilled_patch16_224", depth=1, img_size=size
            ),
            "pos_embed",
            2,
        ),
        (
            lambda size: torchvision.models.VisionTransformer(size, 32, 1, 2, 24, 48),
            "encoder.pos_embedding",
            1,
        ),
    ],
)
def test_positions_are_interpolated_to_the_module_s_grid(
    make: Callable[[int], nn.Module], key: str, num_prefix: int
) -> None:
    """A plane over the patches stays one: bicubic interpolation is exact on it, off the border."""
    patch = 32 if key.startswith("encoder") else 16
    old, new = make(6 * patch), make(12 * patch)
    state = OrderedDict(old.state_dict())
    y, x = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    plane = (2 * x + 3 * y).reshape(1, 36, 1).expand(1, 36, state[key].shape[2])
    state[key] = torch.cat([state[key][:, :num_prefix], plane], dim=1)
    load_weights(new, state)
    actual = new.state_dict()[key]
    assert torch.equal(actual[:, :num_prefix], state[key][:, :num_prefix])
    grid = actual[0, num_prefix:, 0].view(12, 12)
    at = (torch.arange(12.0) + 0.5) / 2 - 0.5  # pixel centers of the finer grid in the coarser
    expected = 2 * at[None, :] + 3 * at[:, None]
    torch.testing.assert_close(grid[4:8, 4:8], expected[4:8, 4:8], rtol=1e-4, atol=1e-4)


def test_the_shard_of_one_rank_is_named_as_such() -> None:
    flat = "teacher.backbone._fsdp_wrapped_module.blocks.0._fsdp_wrapped_module._flat_param"
    with pytest.raises(UserError, match="shard of one rank") as error:
        load_weights(vit(), {flat: torch.zeros(9)}, what="model_0000003.rank_0.pth")
    assert "another architecture" not in str(error.value)
