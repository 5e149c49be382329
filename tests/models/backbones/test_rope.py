"""Rotary positions against the figures of the authors' code, and their draws in training."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from timm.layers import RotaryEmbeddingDinoV3, apply_rot_embed_cat
from torch import Tensor, nn

from figures import draw
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.backbones.rope import CapiRope, border_coordinates
from selftask.models.backbones.vit import ViTMicro
from selftask.models.build import build_backbone
from selftask.models.dropout import disable_stochastic_depth, draw_per_sample
from selftask.models.features.extract import extract
from selftask.random.keyed import LAYER_DRAWS

CPU = torch.device("cpu")

# facebookresearch/dinov3, layers/rope_position_encoding.py: 4 heads of 16 features, 3 x 5 patches
ROPE_SIN, ROPE_COS = 0.0, 145.09990525298798
ROPE_FIRST = [
    *(0.8660254037844388, -0.9698493223620398, -0.4067366430758002, -0.13207415673896092),
    *(0.9510565162951536, -0.9998244526419302, -0.4817536741017153, -0.15828489957005887),
] * 2
# rotation of 16 tokens, the first of which is the class token: norm of the difference, and sum
ROTATED = {
    0: (28.445669002674656, 27.196300065708943),
    500: (25.860844361470317, -64.33811456137357),
}
# facebookresearch/capi, model.py: norm and sum of rotated features
CAPI = {0: (8.685336514570746, -1.0174542542974674), 500: (9.6987713410088, -23.565473493475707)}


def _vit(**args: Any) -> Any:
    args = {"depth": 2, "layer_scale": 0.5, "registers": 4, **args}
    torch.manual_seed(0)
    return build_backbone(Component(name="vit_micro", args=args))


@pytest.fixture(autouse=True)
def _no_layers_afterwards() -> Iterator[None]:
    yield
    LAYER_DRAWS.reset(0)


def test_rope_is_that_of_dinov3() -> None:
    """timm computes periods in float32."""
    vit = _vit(positions="rope")
    rope = vit.rope
    assert rope.temperature == 100 and rope.rotate_half
    sin, cos = RotaryEmbeddingDinoV3(16, rope.temperature).get_embed((3, 5)).chunk(2, dim=-1)
    assert sin[0].tolist() == pytest.approx(ROPE_FIRST, rel=1e-5)
    assert sin.sum().item() == pytest.approx(ROPE_SIN, abs=1e-5)
    assert cos.sum().item() == pytest.approx(ROPE_COS, rel=1e-6)
    for seed, (norm, total) in ROTATED.items():
        q = draw(seed + 9, 1, 4, 16, 16)
        patches = apply_rot_embed_cat(q[:, :, 1:], torch.cat([sin, cos], dim=1).double(), half=True)
        rotated = torch.cat([q[:, :, :1], patches], dim=2)
        assert (rotated - q).norm().item() == pytest.approx(norm, rel=1e-6)
        assert rotated.sum().item() == pytest.approx(total, rel=1e-5)


def test_rope_is_that_of_capi() -> None:
    for seed, (norm, total) in CAPI.items():
        rope = CapiRope(16, 0, (2, 3)).double()
        angular = 7 * 1e4 ** -torch.linspace(0, 1, 4, dtype=torch.float64) * 2 * math.pi
        assert torch.allclose(rope.angular[0, :4], angular, rtol=1e-6)
        embedding = rope.embed(draw(seed + 6, 6, 2))
        rotated = apply_rot_embed_cat(draw(seed + 5, 6, 16), embedding, half=True)
        assert rotated.norm().item() == pytest.approx(norm, rel=1e-5)
        assert rotated.sum().item() == pytest.approx(total, rel=1e-5)
    edge = [0, 0, 0.25, 0, 0.5, 0, 0.75, 0, 1, 0, 1, 0.25, 1, 0.5, 1, 0.75]
    edge += [1, 1, 0.75, 1, 0.5, 1, 0.25, 1, 0, 1, 0, 0.75, 0, 0.5, 0, 0.25]
    assert border_coordinates(16).flatten().tolist() == edge


def test_capi_is_built_on_the_meta_device_after_transformers_loaded_a_model() -> None:
    """transformers replaces torch.linspace meanwhile, and torch remembers the replacement."""
    code = """
import torch
original = torch.linspace
torch.linspace = lambda *args, **kwargs: original(*args, **{"device": "cpu", **kwargs})
with torch.device("meta"):
    torch.empty(1)
torch.linspace = original
from selftask.models.backbones.rope import CapiRope
with torch.device("meta"):
    assert torch.linspace(0, 1, 2).device.type == "cpu"  # otherwise this test is superfluous
    assert CapiRope(16, 4, (2, 2)).angular.device.type == "meta"
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_capis_angles_are_not_rounded_by_autocast() -> None:
    """A product in bfloat16 would change sines and cosines by up to 0.1."""
    rope = CapiRope(64, 4, (14, 14))
    exact = rope.get_embed()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rope.get_embed(), exact)


def test_capis_registers_lie_on_the_border_of_the_kept_patches() -> None:
    rope = CapiRope(16, 4, (3, 3))
    keep = torch.tensor([[4, 5, 8]])  # center, right, corner: from 0.5 to 1
    corners = torch.tensor([[0.5, 0.5], [1, 0.5], [1, 1], [0.5, 1]])
    kept = torch.tensor([[0.5, 0.5], [0.5, 1], [1, 1]])
    expected = rope.embed(torch.cat([corners, kept]))
    assert torch.allclose(rope.of_kept((3, 3), keep, None)[0, 0], expected)
    padded = torch.tensor([[4, 5, 8, 0]])
    actual = rope.of_kept((3, 3), padded, torch.tensor([[False, False, False, True]]))
    assert torch.allclose(actual[0, 0, :7], expected)


def _training(index: Tensor, views: int, vit: Any, images: Tensor) -> Tensor:
    LAYER_DRAWS.start(torch.stack([torch.full_like(index, 2), index], dim=1), CPU)
    return extract(vit, images[:, index].flatten(0, 1)).pooled.unflatten(0, (views, -1))


RANDOM = {"rope_shift": 0.2, "rope_jitter": 1.5, "rope_rescale": 2.0}


def _timm_random() -> Any:
    args = {f"{name}_coords": value for name, value in RANDOM.items()}
    small = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    args |= {**small, "init_values": 0.5}
    model = "vit_small_patch16_dinov3"
    return build_backbone(Component(name="timm", args={"model": model, "args": args}))


@pytest.mark.parametrize("build", [lambda: _vit(positions="rope", **RANDOM), _timm_random])
@torch.no_grad()
def test_a_rank_draws_the_coordinates_of_its_part_of_the_batch(build: Any) -> None:
    vit = build().train()
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3)
    draw_per_sample([vit], seed=7)
    images = torch.randn(1, 6, 3, 32, 32).expand(2, -1, -1, -1, -1)
    before = torch.get_rng_state()
    whole = _training(torch.arange(6), 2, vit, images)
    parts = [_training(torch.arange(n, n + 2), 2, vit, images) for n in (0, 2, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert not torch.allclose(whole[0], whole[1], atol=1e-4), "views draw for themselves"
    LAYER_DRAWS.start(torch.stack([torch.full((6,), 2), torch.arange(6)], dim=1), CPU)
    assert vit(images.flatten(0, 1)).shape[0] == 12, "without extract, views are counted too"
    disable_stochastic_depth(vit)  # of a teacher
    fixed = vit(images.flatten(0, 1)).unflatten(0, (2, -1))
    torch.testing.assert_close(fixed[0], fixed[1])


def test_the_law_of_random_coordinates_is_that_of_dinov3() -> None:
    """Shift, then a factor for each axis, then one for both: all log-uniform but the shift."""
    vit = _vit(positions="rope", **RANDOM).train()
    draw_per_sample([vit], seed=0)
    LAYER_DRAWS.start(torch.stack([torch.zeros(4000).long(), torch.arange(4000)], dim=1), CPU)
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    moved = vit.rope._moved(corners).double()
    scale = torch.stack([moved[:, 1, 0] - moved[:, 0, 0], moved[:, 2, 1] - moved[:, 0, 1]], dim=1)
    shift, logs = moved[:, 0] / scale, scale.log()
    assert shift.abs().max().item() == pytest.approx(0.2, rel=0.01)
    assert shift.std().item() == pytest.approx(0.2 / 3**0.5, rel=0.03)
    assert logs.abs().max() <= math.log(1.5) + math.log(2) + 1e-5
    jitter, rescale = math.log(1.5) ** 2 / 3, math.log(2) ** 2 / 3  # variances of the logarithms
    assert logs.var().item() == pytest.approx(jitter + rescale, rel=0.06)
    assert logs.T.cov()[0, 1].item() == pytest.approx(rescale, rel=0.08)
    assert shift.mean().abs() < 0.01 and logs.mean().abs() < 0.03


def test_random_coordinates_of_another_form_are_refused() -> None:
    args = {"img_size": 28, "depth": 1, "rope_shift_coords": 0.1}
    component = Component(name="timm", args={"model": "eva02_tiny_patch14_224", "args": args})
    with pytest.raises(UserError, match="for RoPE of DINOv3's form only"):
        build_backbone(component)


@torch.no_grad()
def test_our_vit_takes_the_weights_of_timms_dinov3() -> None:
    """Names and features are timm's, so Meta's files load as they do for timm's model."""
    size = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 96, "num_heads": 3}
    name = "vit_small_patch16_dinov3_qkvb"
    theirs: nn.Module = timm.create_model(name, global_pool="token", num_classes=0, **size)
    ours = _vit(positions="rope", dynamic_img_size=True)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.1)
    ours.load_state_dict(theirs.state_dict())
    for side in (32, 48):
        images = torch.randn(2, 3, side, side)
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize("positions", ["learned", "rope", "rope_capi", "rope_eva"])
def test_blocks_of_a_vit_of_the_present_day(positions: str) -> None:
    vit = _vit(positions=positions, swiglu=True, registers=4)
    assert vit.num_prefix_tokens == 5
    assert type(vit.blocks[0].mlp).__name__ == "SwiGLU"
    assert vit.blocks[0].mlp.fc1_g.weight.shape == (256, 96)  # 8 / 3 of 96, in steps of 64
    names = [name for name, p in vit.named_parameters() if torch.all(p == 0.5)]
    assert len(names) == 4, "two factors a block"
    if positions != "learned":
        assert vit.blocks[0].attn.q_bias is not None and vit.blocks[0].attn.k_bias.eq(0).all()
    output = extract(vit, torch.randn(2, 3, 40, 24), keep=torch.tensor([[0, 3], [7, 5]]))
    output.pooled.sum().backward()
    assert all(p.grad is not None for p in vit.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"positions": "rope_capi", "registers": 6}, r"registers: 6 .* try 8"),
        ({"positions": "rope_eva", "rope_shift": 0.1}, r"rope_shift: only positions: rope "),
        ({"rope_rescale": 2.0}, r"rope_rescale: only positions: rope .* is learned"),
    ],
)
def test_options_that_contradict(args: dict[str, Any], message: str) -> None:
    (problem,) = ViTMicro(**args).problems({})
    assert re.search(message, problem)
