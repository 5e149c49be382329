"""Label-free measures: figures of their authors' code, extremes, and runs without labels."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

import tiny
from figures import draw
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.evaluate.features import Features
from selftask.evaluate.spectrum import Spectrum, _eigenvalues, alpha, rankme, uniformity

# seeds 0 and 500: RankMe of the paper, alpha over ranks 3 to 20, NESum
FIGURES = [
    (27.771356924709647, 1.0303584118708429, 4.123649660311925),
    (27.64377333382013, 1.0544117048380557, 4.205082323087812),
]


@pytest.mark.parametrize("case", [0, 1])
def test_measures_are_those_of_the_authors(case: int) -> None:
    features = draw(500 * case, 200, 32) * torch.arange(1, 33, dtype=torch.float64) ** -0.5
    variances = _eigenvalues(features - features.mean(dim=0))
    nesum = float(variances.sum() / variances[0])
    computed = (rankme(features), alpha(variances, 3, 20), nesum)
    assert computed == pytest.approx(FIGURES[case], rel=1e-9)


def test_only_eigenvalues_are_of_centered_features() -> None:
    """All measures of features far from zero, by NumPy's and SciPy's decompositions."""
    x = 3 + draw(4, 150, 120).float() * torch.arange(1, 121) ** -0.4
    images = Features(x, torch.zeros(150).long(), torch.arange(150))
    singular = np.linalg.svd(x.double().numpy(), compute_uv=False)
    share = singular / singular.sum() + 1e-7
    variances = np.linalg.eigvalsh(np.cov(x.double().numpy().T))[::-1]
    rank = np.arange(3, 101)
    slope, _ = np.polyfit(np.log(rank), np.log(variances[2:100]), 1, w=rank**-0.5)
    units = torch.nn.functional.normalize(x.double(), dim=1)
    kernel = np.exp(-2 * pdist(units.numpy(), "sqeuclidean"))
    assert Spectrum()(images, images) == pytest.approx(
        {
            "rankme": np.exp(-(share * np.log(share)).sum()),
            "alpha": -slope,
            "nesum": variances.sum() / variances[0],
            "feature_uniformity": np.log(kernel.mean()),
        },
        rel=1e-6,
    )


def test_rankme_of_equal_and_of_single_directions() -> None:
    assert rankme(torch.eye(16, dtype=torch.float64)) == pytest.approx(16, rel=1e-4)
    assert rankme(torch.ones(50, 16, dtype=torch.float64)) == pytest.approx(1, rel=1e-4)


def test_alpha_is_the_exponent_of_a_power_law() -> None:
    rank = torch.arange(1, 201, dtype=torch.float64)
    assert alpha(3.0 * rank**-1.7, 3, 100) == pytest.approx(1.7, rel=1e-12)


def test_alpha_leaves_out_eigenvalues_that_are_zero() -> None:
    scale = torch.arange(1, 121) ** -0.5
    few = draw(1, 90, 120).float() * scale  # centered, so that the last of 90 eigenvalues is 0
    constant = torch.cat([draw(2, 500, 60).float() * scale[:60], torch.ones(500, 20)], dim=1)
    for features, last in ((few, 89), (constant, 60)):
        images = Features(features, torch.zeros(len(features)).long(), torch.arange(len(features)))
        variances = _eigenvalues(features.double() - features.double().mean(dim=0))
        assert Spectrum()(images, images)["alpha"] == pytest.approx(alpha(variances[:last], 3, 100))
    equal = Features(torch.ones(9, 9), torch.zeros(9).long(), torch.arange(9))
    row = Spectrum()(equal, equal)
    assert (row["alpha"], row["nesum"]) == (0, 0)


def test_uniformity_as_a_loop_over_pairs() -> None:
    units = [row / row.norm() for row in draw(3, 7, 4)]
    pairs = [(a, b) for i, a in enumerate(units) for j, b in enumerate(units) if i != j]
    mean = sum(math.exp(-2 * float((a - b).square().sum())) for a, b in pairs) / len(pairs)
    assert uniformity(torch.stack(units)) == pytest.approx(math.log(mean), rel=1e-12)
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0, abs=1e-6)
    assert uniformity(torch.zeros(5, 3)) == 0, "of a network without any output"
    mixed = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    mean = (1 + 2 * math.exp(-2)) / 3  # squared distances 0, 1 and 1
    assert uniformity(mixed) == pytest.approx(math.log(mean), rel=1e-6)


def test_too_few_images_are_refused() -> None:
    few = Features(draw(0, 3, 8).float(), torch.zeros(3).long(), torch.arange(3))
    with pytest.raises(UserError, match="3 images of 8 features"):
        Spectrum()(few, few)


def test_a_run_without_labels_measures_and_keeps_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images.npz"
    np.savez(images, images=np.load(tiny.digits_file(tmp_path))["images"][:24])
    words = [
        *tiny.overrides("simclr", tmp_path, "run", "train.epochs=2"),
        *(f"data={images}", f"data.val={images}", "eval.evaluations={spectrum: {}, knn: {}}"),
        "train.keep_best.metric=rankme",
    ]
    assert main(["train", "simclr/digits", *words]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    measured = [row for row in map(json.loads, lines) if "rankme" in row]
    assert len(measured) == 2
    assert all(1 <= row["rankme"] <= 24 and "knn_top1" not in row for row in measured)
    capsys.readouterr()
    assert main(["eval", "spectrum", str(tmp_path / "run"), f"data={images}"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["rankme"] == pytest.approx(measured[-1]["rankme"], rel=1e-4)
    assert row["test_images"] == 24
