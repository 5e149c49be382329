"""Colorization against the authors' bins, the formulas of the paper, and OpenCV."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from figures import draw
from minitask import loss_of, predicted
from selftask.batch import Batch
from selftask.errors import UserError
from selftask.methods.colorization import (
    Colorization,
    color_loss,
    gamut_bins,
    rebalancing,
    soft_encoding,
)
from selftask.models.heads import transposed_decoder

# a of the authors' 313 bins (pts_in_hull.npy), with the smallest and largest b
AUTHORS = [
    (-90, 50, 90),
    (-80, 20, 90),
    (-70, 0, 90),
    (-60, -20, 90),
    (-50, -30, 100),
    (-40, -40, 100),
    (-30, -50, 100),
    (-20, -50, 100),
    (-10, -60, 100),
    (0, -70, 100),
    (10, -80, 90),
    (20, -80, 90),
    (30, -90, 90),
    (40, -100, 90),
    (50, -100, 80),
    (60, -110, 80),
    (70, -110, 80),
    (80, -110, 70),
    (90, -110, 70),
    (100, -90, 0),
]


def test_bins_are_those_of_the_authors() -> None:
    expected = [(a, b) for a, low, high in AUTHORS for b in range(low, high + 1, 10)]
    assert len(expected) == 313
    assert [tuple(bin) for bin in gamut_bins(10).tolist()] == expected


def _slow_encoding(color: tuple[float, float], bins: list[list[float]]) -> dict[int, float]:
    """The five nearest bins of one color, and their shares, in double precision."""
    distances = sorted((math.dist(color, bin), number) for number, bin in enumerate(bins))
    kernel = {number: math.exp(-(d**2) / (2 * 5**2)) for d, number in distances[:5]}
    return {number: value / math.fsum(kernel.values()) for number, value in kernel.items()}


def test_loss_is_that_of_the_paper() -> None:
    """Equation 2 with the weights of equation 4, in loops over positions and bins."""
    bins = gamut_bins(10).double()
    num_bins = len(bins)
    colors, scores = 40 * draw(0, 2, 2, 3, 4), draw(1, 2, num_bins, 3, 4)
    probs = draw(2, num_bins).softmax(dim=0)
    computed = color_loss(scores, soft_encoding(colors, bins), rebalancing(probs, 0.5))

    mixed = [0.5 * p + 0.5 / num_bins for p in probs.tolist()]
    scale = math.fsum(p / m for p, m in zip(probs.tolist(), mixed, strict=True))
    losses = []
    for image, row, column in np.ndindex(2, 3, 4):
        target = _slow_encoding(tuple(colors[image, :, row, column].tolist()), bins.tolist())
        log_sum = math.log(math.fsum(map(math.exp, scores[image, :, row, column].tolist())))
        entropy = -math.fsum(
            share * (float(scores[image, number, row, column]) - log_sum)
            for number, share in target.items()
        )
        losses.append(entropy / mixed[next(iter(target))] / scale)
    assert computed.item() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)


def test_rare_colors_weigh_more_and_the_mean_weight_is_one() -> None:
    probs = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64)
    weights = rebalancing(probs, 0.5)
    assert (probs * weights).sum().item() == pytest.approx(1)
    assert weights.tolist() == sorted(weights.tolist())
    assert weights[3] / weights[0] == pytest.approx((0.35 + 0.125) / 0.125)
    assert torch.allclose(rebalancing(probs, 1.0), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("stride", [2, 4, 8, 14, 32])
def test_scores_are_those_of_squares_of_at_most_four_pixels(stride: int) -> None:
    scores = transposed_decoder(6, 8, 5, stride=stride, out_stride=4)(draw(0, 2, 6, 3, 3).float())
    enlarged = {2: 1, 4: 1, 8: 2, 14: 4, 32: 8}[stride]
    assert scores.shape == (2, 5, 3 * enlarged, 3 * enlarged)


def _task(tmp_path: Path) -> Any:
    task = tiny.task("colorization", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    task.base_model.eval()
    return task


def _seen(task: Any, pixels: Tensor) -> Batch:
    """The last batch after the forward pass of other images, (B, 3, H, W) of Lab in [0, 1]."""
    batch, method = task.last_batch, task.loss
    batch.views = {"main": [(pixels - method.mean) / method.std]}
    method.prepare_batch(batch, task)
    batch.output = task.base_model(batch.input)
    method.on_forward(task)
    return batch


RED = (torch.tensor([136, 208, 195]) / 255)[:, None, None].expand(2, 3, 32, 32)
"""Red of sRGB in OpenCV's Lab of 8 bits: a 80, b 67."""


def test_the_network_sees_no_color(tmp_path: Path) -> None:
    """The a and b of its images change the target, and not its output."""
    task = _task(tmp_path)
    pixels = draw(0, 2, 3, 32, 32).sigmoid().float()
    batch = _seen(task, pixels)
    output, target = batch.output.prediction, batch["target"]
    batch = _seen(task, torch.cat([pixels[:, :1], pixels[:, 1:].flip(0)], dim=1))
    assert torch.equal(batch.output.prediction, output)
    torch.testing.assert_close(batch["target"].shares, target.shares.flip(0))
    assert not torch.allclose(batch["target"].shares, target.shares)
    task.close()


def test_colors_have_the_weights_of_their_smoothed_distribution() -> None:
    """Of all colors so far, smoothed by a Gaussian of 5 whose values for a bin add up to 1."""
    method = Colorization(Colorization.Config(bin_size=10)).double()
    bins = method.bins.tolist()
    method.counts.copy_(draw(3, len(bins)).exp() ** 3)
    smooth = torch.zeros(len(bins), dtype=torch.float64)
    for bin, share in zip(bins, (method.counts / method.counts.sum()).tolist(), strict=True):
        near = torch.tensor([math.exp(-(math.dist(bin, other) ** 2) / 50) for other in bins])
        smooth += share * near.double() / near.double().sum()
    scores, colors = draw(1, 2, len(bins), 3, 4), 40 * draw(0, 2, 2, 3, 4)
    target = soft_encoding(colors, method.bins)
    expected = color_loss(scores, target, rebalancing(smooth, 0.5))
    loss = loss_of(method, predicted(scores), target=target)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_colors_of_steps_are_counted(tmp_path: Path) -> None:
    """Each position counts for the bin that is nearest to its mean color."""
    task = _task(tmp_path)
    method, before = task.loss, task.loss.counts.clone()
    positions = _seen(task, RED).output.prediction[:, 0].numel()
    method.on_update(task)
    added = method.counts - before
    (nearest,) = added.nonzero().flatten().tolist()
    distances = [math.dist((80, 67), bin) for bin in method.bins.tolist()]
    assert nearest == min(range(len(distances)), key=distances.__getitem__)
    assert added[nearest] == positions
    task.close()


def test_a_report_shows_the_colors_of_the_image(tmp_path: Path) -> None:
    """Red of Lab is shown as red of RGB."""
    task = _task(tmp_path)
    batch = _seen(task, RED)
    shown = task.loss.visualize(batch.output, batch)
    pixels = shown["image"] * task.loss.std + task.loss.mean
    torch.testing.assert_close(pixels[0, :, 5, 5], torch.tensor([1.0, 0, 0]), atol=0.01, rtol=0)
    assert list(shown) == ["image", "lightness", "colorized"]
    assert {image.shape for image in shown.values()} == {(2, 3, 32, 32)}
    task.close()


def test_views_must_be_in_lab(tmp_path: Path) -> None:
    task = tiny.task("colorization", tmp_path, "run", "views.main.transforms=[normalize]")
    with pytest.raises(UserError, match=r"views: colorization .* end the transforms by lab"):
        task.prepare()
