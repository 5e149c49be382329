"""Interpolation of positions by matrices, whose backward pass is deterministic on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from imagined_device import NAME, ImaginedDevice, in_process
from selftask.errors import UserError
from selftask.models.features import tokens
from selftask.models.features.extract import extract
from selftask.models.features.tokens import resample
from selftask.models.network import Network


def torchs(positions: Tensor, built: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Interpolate as timm does, in the precision of ``positions``, after one prefix token."""
    as_map = positions[:, 1:].unflatten(1, built).permute(0, 3, 1, 2)
    resized = F.interpolate(as_map, grid, mode="bicubic", antialias=True)
    return torch.cat([positions[:, :1], resized.flatten(2).mT], dim=1)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("grid", [(2, 2), (7, 6), (14, 3), (1, 8), (9, 10)])
def test_values_and_gradients_are_those_of_torchs_interpolation(
    grid: tuple[int, int], dtype: torch.dtype, limit: float
) -> None:
    built, generator = (7, 5), torch.Generator().manual_seed(0)
    positions = torch.randn(1, 1 + 35, 6, dtype=dtype, generator=generator, requires_grad=True)
    toward = torch.randn(1, 1 + grid[0] * grid[1], 6, dtype=dtype, generator=generator)
    ours, theirs = resample(positions, built, grid, num_prefix=1), torchs(positions, built, grid)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=limit)
    gradients = [torch.autograd.grad(x, positions, toward)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=10 * limit)  # sums of up to 90 terms


def test_autocast_rounds_no_position() -> None:
    positions = torch.randn(1, 16, 8)
    expected = resample(positions, (4, 4), (3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(resample(positions, (4, 4), (3, 3)), expected)


def test_matrices_are_kept_by_size_and_usable_after_inference_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens, "_MATRICES", {})
    positions = torch.randn(1, 20, 8, requires_grad=True)
    with torch.inference_mode():
        resample(positions, (4, 5), (3, 3))
    kept = dict(tokens._MATRICES)
    assert {key[:2] for key in kept} == {(4, 3), (5, 3)}
    resample(positions, (4, 5), (3, 3)).sum().backward()
    assert all(tokens._MATRICES[key] is matrix for key, matrix in kept.items())


BACKBONES: dict[str, Any] = {
    "fixed": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, depth=1),
    "dynamic": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=32, num_classes=0, depth=1, dynamic_img_size=True
    ),
    "torchvision": lambda: headless(torchvision.models.VisionTransformer(32, 16, 1, 2, 24, 48)),
}


def headless(vit: Any) -> Any:
    vit.heads = nn.Identity()  # torchvision's head begins with zeros: no gradient
    return vit


@contextmanager
def deterministic() -> Iterator[list[str]]:
    """Context of ``train.deterministic=true``; yields the operations that CUDA would refuse."""
    torch.use_deterministic_algorithms(True)
    try:
        with ImaginedDevice() as device:
            yield device.nondeterministic
    finally:
        torch.use_deterministic_algorithms(False)


def two_sizes(name: str) -> tuple[list[str], bool]:
    """Forward and backward of two crop sizes; return what is refused, and if positions learn."""
    with deterministic() as refused:
        network = Network(BACKBONES[name](), nn.Identity()).to(NAME)
        views = [torch.randn(2, 3, size, size).to(NAME) for size in (32, 48)]
        network(views[1:]).square().mean().backward()
        network(views).square().mean().backward()
        key, positions = next(p for p in network.named_parameters() if "pos_embed" in p[0])
        assert positions.grad is not None, key
        return refused, bool(positions.grad.cpu().abs().sum() > 0)


@pytest.mark.parametrize("name", BACKBONES)
def test_two_crop_sizes_in_deterministic_mode(name: str) -> None:
    assert in_process(two_sizes, name) == ([], True)


def interpolates_itself() -> list[str]:
    with deterministic() as refused:
        positions = torch.randn(1, 16, 8).to(NAME).requires_grad_()
        torchs(positions, (3, 5), (2, 2)).sum().backward()
        return refused


def test_the_imagined_device_reports_torchs_interpolation() -> None:
    refused = in_process(interpolates_itself)
    assert [line.split(": ")[-1] for line in refused] == [
        "aten._upsample_bicubic2d_aa_backward.default"
    ]


@pytest.mark.parametrize("layout", [{}, {"reg_tokens": 2, "no_embed_class": True}])
@torch.no_grad()
def test_other_sizes_are_those_of_timms_dynamic_model(layout: dict[str, Any]) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
    fixed, dynamic = (
        timm.models.VisionTransformer(num_classes=0, dynamic_img_size=any_size, **sizes, **layout)
        for any_size in (False, True)
    )
    dynamic.eval()
    dynamic.load_state_dict(fixed.eval().state_dict())
    images = torch.randn(2, 3, 24, 40)
    features = extract(fixed, images)
    assert features.tokens.grid == (3, 5)
    assert torch.allclose(features.pooled, dynamic(images), atol=1e-6)
    assert torch.equal(extract(dynamic, images).pooled, features.pooled)
    with pytest.raises(UserError, match=r"30x32 pixels .* patches of 8x8 .* such as 32$"):
        extract(fixed, torch.zeros(1, 3, 30, 32))
