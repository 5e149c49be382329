"""Precision, pooling, regions, whitening of retrieval, against slow loops and scikit-learn."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import timm
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.evaluate.retrieval.descriptors import (
    DescriptorOptions,
    Descriptors,
    gem,
    regions,
    rmac,
)
from selftask.evaluate.retrieval.metrics import (
    average_precision,
    precision_at,
    ranks_of_positives,
    trapezoidal_average_precision,
)
from selftask.evaluate.retrieval.whitening import Whitening
from selftask.models.features.extract import extract
from selftask.models.features.tokens import Features, from_map

NONE = np.array([], dtype=np.int64)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of 50 images, all different, 8 positives and 6 ignored ones."""
    draws = np.random.default_rng(seed)
    order = draws.permutation(50)
    return draws.permutation(50) / 50.0, order[:8], order[8:14]


def ranked(scores: np.ndarray, positives: np.ndarray, ignored: np.ndarray) -> list[bool]:
    """Whether each image is right, best first, of those that count."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [i in positives for i in order if i not in ignored]


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_scikit_learns_without_junk(seed: int) -> None:
    scores, positives, ignored = drawn(seed)
    ranks = ranks_of_positives(scores, positives, ignored)
    right = np.isin(np.arange(50), positives)
    counted = ~np.isin(np.arange(50), ignored)
    expected = average_precision_score(right[counted], scores[counted])
    assert average_precision(ranks) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_trapezoids_are_those_of_a_walk_down_the_list(seed: int) -> None:
    """Precision and recall after each image; the area between neighboring points."""
    scores, positives, ignored = drawn(seed)
    hits = ranked(scores, positives, ignored)
    area, num_right, recall, precision = 0.0, 0, 0.0, 1.0
    for seen, is_right in enumerate(hits, start=1):
        num_right += is_right
        new_recall, new_precision = num_right / sum(hits), num_right / seen
        area += (new_recall - recall) * (precision + new_precision) / 2
        recall, precision = new_recall, new_precision
    ranks = ranks_of_positives(scores, positives, ignored)
    assert trapezoidal_average_precision(ranks) == pytest.approx(area, abs=1e-12)


def test_trapezoids_of_one_image() -> None:
    assert trapezoidal_average_precision(np.array([0])) == 1.0
    assert trapezoidal_average_precision(np.array([3])) == pytest.approx((0 / 3 + 1 / 4) / 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 5, 10, 40])
def test_precision_at_k_is_counted(seed: int, k: int) -> None:
    scores, positives, ignored = drawn(seed)
    hits = ranked(scores, positives, ignored)
    depth = min(k, max(place for place, is_right in enumerate(hits, start=1) if is_right))
    ranks = ranks_of_positives(scores, positives, ignored)
    assert precision_at(ranks, k) == pytest.approx(sum(hits[:depth]) / depth)


def test_of_equal_scores_the_irrelevant_come_first() -> None:
    scores = np.array([0.5, 0.5, 0.5, 0.9, 0.5])
    assert ranks_of_positives(scores, np.array([0, 3]), NONE).tolist() == [0, 4]
    assert ranks_of_positives(scores, np.array([0, 3]), np.array([1, 3])).tolist() == [2]


def test_gem_lies_between_mean_and_maximum() -> None:
    dense = torch.rand(7, 4, 5, generator=torch.Generator().manual_seed(0)) * 30
    assert torch.allclose(gem(dense, 1.0), dense.mean(dim=(1, 2)))
    assert torch.allclose(gem(dense, 3000.0), dense.amax(dim=(1, 2)), rtol=2e-3)
    values = dense.double().flatten(1)
    expected = values.pow(3).mean(dim=1).pow(1 / 3)
    assert torch.allclose(gem(dense, 3.0).double(), expected, rtol=1e-5)
    assert gem(-dense, 3.0).amax() < 1e-5, "only the positive part counts"


@pytest.mark.parametrize(("height", "width"), [(7, 7), (6, 10), (10, 6), (5, 23), (3, 4), (1, 1)])
def test_regions_are_as_the_paper_draws_them(height: int, width: int) -> None:
    """In fractions: how many along each side, how large, evenly spread from edge to edge."""
    shorter, longer = min(height, width), max(height, width)
    most = 1
    if longer > shorter:  # the number along the longer side whose overlap is nearest to 40 %
        gaps = {}
        for number in range(2, 8):
            step = Fraction(longer - shorter, number - 1)
            gaps[number] = abs((shorter - step) / shorter - Fraction(2, 5))
        most = min(gaps, key=lambda number: gaps[number])
    expected = []
    for level in (1, 2, 3):
        side = math.floor(Fraction(2 * shorter, level + 1))
        starts = []
        for length in (height, width):
            count = level if length == shorter else level + most - 1
            steps = Fraction(length - side, count - 1) if count > 1 else 0
            starts.append([math.floor(number * steps) for number in range(count)])
        if side:
            expected += [(y, x, side) for y in starts[0] for x in starts[1]]
    assert regions(height, width, 3) == expected
    assert all(y + side <= height and x + side <= width for y, x, side in expected)


def test_rmac_is_the_maximum_of_each_region() -> None:
    dense = torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(0))
    areas = regions(6, 9, 3)
    assert len(areas) == 1 * 2 + 2 * 3 + 3 * 4
    got = rmac(dense, 3)
    for number, (top, left, side) in enumerate(areas):
        for channel in range(3):
            largest = -math.inf
            for y in range(top, top + side):
                for x in range(left, left + side):
                    largest = max(largest, float(dense[channel, y, x]))
            assert float(got[number, channel]) == largest


def test_whitened_descriptors_are_uncorrelated() -> None:
    draws = torch.Generator().manual_seed(0)
    mixed = torch.randn(400, 6, generator=draws) @ torch.randn(6, 6, generator=draws) + 3
    whitening = Whitening.fit(mixed.split(37))
    white = whitening(mixed).double()
    assert white.mean(dim=0).abs().max() < 1e-4
    assert torch.allclose(torch.cov(white.T), torch.eye(6, dtype=torch.float64), atol=1e-3)
    two = Whitening.fit([mixed], 2)(mixed).double()
    assert torch.allclose(two, white[:, :2], atol=1e-4)
    values, vectors = np.linalg.eigh(np.cov(mixed.double().numpy().T))
    largest = (mixed - mixed.mean(dim=0)).double().numpy() @ vectors[:, -1] / values[-1] ** 0.5
    assert np.allclose(np.abs(white[:, 0].numpy()), np.abs(largest), atol=1e-3)


def test_whitening_needs_descriptors() -> None:
    rows = torch.randn(5, 9)
    assert Whitening.fit([rows]).matrix.shape == (9, 4)
    with pytest.raises(UserError, match="whiten_dim=5: 5 descriptors of 9 features have 4"):
        Whitening.fit([rows], 5)
    with pytest.raises(UserError, match="1 descriptors are too few"):
        Whitening.fit([rows[:1]])


class Map(nn.Module):
    """A backbone whose last map is the image, and whose output is twice its mean."""

    offers = frozenset({"dense"})

    def forward(self, images: Tensor) -> Tensor:
        return 2 * images.mean(dim=(2, 3))

    def extract(self, images: Tensor) -> Features:
        return Features(self(images), from_map(images), {})


def test_scales_are_averaged_after_normalization() -> None:
    image = torch.rand(1, 3, 24, 36, generator=torch.Generator().manual_seed(0))
    options = DescriptorOptions(pool="gem", scales=[1.0, 0.5])
    model = Descriptors(Map(), options, torch.device("cpu"))
    got = model.combine(model.vectors(image))
    half = torch.nn.functional.interpolate(
        image, (12, 18), mode="bilinear", align_corners=False, antialias=True
    )
    parts = [gem(x[0], 3.0) for x in (image, half)]
    mean = sum(part / part.norm() for part in parts)
    assert torch.allclose(got, mean / mean.norm(), atol=1e-6)
    mirrored = Descriptors(Map(), DescriptorOptions(pool="rmac", flip=True), torch.device("cpu"))
    regions = [rmac(x[0], 3) for x in (image, image.flip(3))]
    sums = [(rows / rows.norm(dim=1, keepdim=True)).sum(dim=0) for rows in regions]
    mean = sum(part / part.norm() for part in sums)
    assert torch.allclose(mirrored.combine(mirrored.vectors(image)), mean / mean.norm(), atol=1e-6)
    pooled = Descriptors(Map(), DescriptorOptions(), torch.device("cpu"))
    expected = image.mean(dim=(2, 3))[0]
    assert torch.allclose(pooled.combine(pooled.vectors(image)), expected / expected.norm())


@pytest.mark.parametrize("value", [math.nan, 1e20])
def test_descriptors_without_a_finite_norm_are_an_error(value: float) -> None:
    model = Descriptors(Map(), DescriptorOptions(), torch.device("cpu"))
    with pytest.raises(UserError, match="the features are not finite, or too large"):
        model.vectors(torch.full((1, 3, 8, 8), value))


@pytest.mark.parametrize("dynamic", [False, True])
def test_images_are_fitted_to_the_patches_of_a_transformer(dynamic: bool) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=dynamic, depth=1).eval()
    model = Descriptors(vit, DescriptorOptions(pool="mean"), torch.device("cpu"))
    image = torch.rand(1, 3, 50, 70, generator=torch.Generator().manual_seed(0))
    (got,) = model.vectors(image)
    fitted = torch.nn.functional.interpolate(
        image, (48, 64), mode="bilinear", align_corners=False, antialias=True
    )
    with torch.no_grad():
        expected = extract(vit, fitted).tokens.patches.mean(dim=1)
    assert torch.allclose(got, expected / expected.norm(), atol=1e-6)


def test_regions_are_whitened_before_they_are_summed() -> None:
    draws = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, 6, 9, generator=draws)
    model = Descriptors(Map(), DescriptorOptions(pool="rmac"), torch.device("cpu"))
    model.whitening = Whitening.fit([torch.rand(50, 3, generator=draws)])
    total = torch.zeros(3)
    for row in rmac(image[0], 3):
        white = model.whitening((row / row.norm())[None])[0]
        total += white / white.norm()
    assert torch.allclose(model.combine(model.vectors(image)), total / total.norm(), atol=1e-5)
