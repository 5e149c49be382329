"""PixMIM and U-MAE, options of MAE, against the figures of their authors' code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from figures import draw
from selftask.cli.main import main
from selftask.methods.mae import mean_squared_cosine, patchify
from selftask.models.frequencies import without

# zhangq327/U-MAE for seeds 0 and 500: term, gradient
UMAE = [(0.21214217394073395, 0.04167074377087433), (0.23081703362258285, 0.04558686060818821)]
# open-mmlab/mmselfsup: norm and sum of the target, before patches are normalized
PIXMIM = [(17.099762213366553, 31.78363084360768), (15.416426992806048, -21.566446285805196)]
MEAN = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64)[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64)[:, None, None]


@pytest.mark.parametrize("case", [0, 1])
def test_uniformity_is_that_of_the_authors_code(case: int) -> None:
    features = draw(500 * case + 4, 6, 12).requires_grad_()
    term = mean_squared_cosine(features)
    (gradient,) = torch.autograd.grad(term, features)
    assert (term.item(), gradient.norm().item()) == pytest.approx(UMAE[case], rel=1e-9)


@pytest.mark.parametrize("case", [0, 1])
def test_filtered_images_are_those_of_published_code(case: int) -> None:
    """Its disc lies around frequency -1/2 of 16, in the order of fftshift."""
    images = draw(500 * case, 2, 3, 16, 16) * STD + MEAN
    squares = (torch.arange(16) - 7.5).square()
    disc = torch.fft.ifftshift(squares[:, None] + squares < 4**2)
    target = (without(images, ~disc).abs() - MEAN) / STD
    assert (target.norm().item(), target.sum().item()) == pytest.approx(PIXMIM[case], rel=1e-9)


def test_targets_have_the_low_frequencies_of_the_image_alone(tmp_path: Path) -> None:
    """Against a discrete Fourier transform by its definition."""
    task = tiny.task("mae", tmp_path, "run", "method.low_pass=3", "method.normalize_pixels=false")
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, mean, std = task.last_batch, task.loss.mean, task.loss.std
    images = (batch.all_views[0] * std + mean).double().numpy()
    size = images.shape[-1]
    number = np.arange(size)
    wave = np.exp(-2j * np.pi * np.outer(number, number) / size)
    signed = (number + size // 2) % size - size // 2
    low = signed[:, None] ** 2 + signed**2 < 9
    spectrum = (wave @ images @ wave) * low
    filtered = torch.from_numpy(np.abs(wave.conj() @ spectrum @ wave.conj()) / size**2)
    patches = patchify((filtered - mean.double()) / std.double(), task.loss.patch_size)
    predict = batch["mask"].predict[:, 0]
    expected = torch.stack(
        [image[numbers] for image, numbers in zip(patches, predict, strict=True)]
    )
    torch.testing.assert_close(batch["pixels"].double(), expected, atol=1e-5, rtol=1e-5)
    task.close()


def test_both_options_are_the_same_on_one_and_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method.uniformity_weight=0.01", "method.low_pass=3", "--ranks=1,2"]
    assert main(["check", "mae", *words]) == 0, capsys.readouterr().out


def test_uniformity_is_a_term_of_the_loss(tmp_path: Path) -> None:
    task = tiny.train("mae", tmp_path, "run", "method.uniformity_weight=0.5", "train.max_steps=1")
    (row,) = [row for row in tiny.rows(task.out) if "squared_cosine" in row]
    assert row["loss"] == pytest.approx(row["masked_pixels"] + row["squared_cosine"], rel=1e-5)
    assert 0 < row["squared_cosine"] <= 0.5
    assert "chance_ratio" not in row
