"""Interpolation of positions by matrices, beside torch's own, which is not deterministic on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from imagined_device import NAME, ImaginedDevice, NotDeterministic, in_process
from selftask.models.features import tokens
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
    "torchvision": lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 24, 48),
}


def two_sizes(name: str) -> float:
    """Forward and backward of two crop sizes under ``train.deterministic=true``."""
    torch.manual_seed(0)
    with ImaginedDevice():
        network = Network(BACKBONES[name](), nn.Identity()).to(NAME)
        views = [torch.randn(2, 3, size, size).to(NAME) for size in (32, 48)]
        torch.use_deterministic_algorithms(True)
        try:
            network(views).square().mean().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        positions = dict(network.named_parameters())
        key = next(key for key in positions if "pos_embed" in key)
        return float(positions[key].grad.abs().sum())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", BACKBONES)
def test_two_crop_sizes_in_deterministic_mode(name: str) -> None:
    assert in_process(two_sizes, name) > 0


def interpolates_itself() -> None:
    with ImaginedDevice():
        x = torch.randn(1, 16, 8).to(NAME).requires_grad_()
        torch.use_deterministic_algorithms(True)
        try:
            torchs(x, (3, 5), (2, 2)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_imagined_device_refuses_torchs_interpolation() -> None:
    with pytest.raises(NotDeterministic, match="_upsample_bicubic2d_aa_backward"):
        in_process(interpolates_itself)
