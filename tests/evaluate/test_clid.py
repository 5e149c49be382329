"""CLID: scikit-learn's neighbors, clusters and regression, known dimensions, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from torch import Tensor

import tiny
from figures import draw
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.evaluate.clid import CLID, intrinsic_dimension, two_nearest
from selftask.evaluate.features import Features


def without_labels(features: Tensor) -> Features:
    number = torch.arange(len(features))
    return Features(features, torch.full_like(number, -1), number)


def fit_by_hand(units: np.ndarray) -> float:
    """The slope of Facco et al., with scikit-learn's neighbors and regression."""
    distances, _ = NearestNeighbors(n_neighbors=3).fit(units).kneighbors(units)
    ratio = np.sort(distances[:, 2] / distances[:, 1])
    kept = len(ratio) * 9 // 10
    x = np.log(ratio[:kept, None])
    y = [-np.log(1 - rank / len(ratio)) for rank in range(1, kept + 1)]
    return float(LinearRegression(fit_intercept=False).fit(x, y).coef_[0])


@pytest.mark.parametrize("spread", [0.2, 0.9])
def test_measures_are_those_of_scikit_learn(spread: float) -> None:
    centers = F.normalize(draw(0, 4, 16), dim=1)
    features = centers[torch.arange(200) % 4] + spread * draw(1, 200, 16) / 4
    units = F.normalize(features, dim=1).numpy()
    cluster = KMeans(4, n_init=100, random_state=0).fit_predict(units)
    predicted = cross_val_predict(
        KNeighborsClassifier(1), units, cluster, cv=LeaveOneOut(), method="predict"
    )
    row = CLID(k=4, restarts=100)(without_labels(features), without_labels(features))
    assert row["cluster_learnability"] == pytest.approx((predicted == cluster).mean(), rel=1e-9)
    assert (row["cluster_learnability"] == 1) == (spread == 0.2)
    assert row["intrinsic_dimension"] == pytest.approx(fit_by_hand(units), rel=1e-9)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_dimension_of_a_sphere_in_a_larger_space(dimension: int) -> None:
    sphere = draw(2, 3000, dimension + 1) @ torch.linalg.qr(draw(3, 40, dimension + 1))[0].T
    distances, _ = two_nearest(F.normalize(sphere, dim=1))
    assert intrinsic_dimension(distances) == pytest.approx(dimension, rel=0.06)


def test_duplicates_do_not_count() -> None:
    units = F.normalize(draw(4, 50, 6), dim=1)
    distances, neighbors = two_nearest(torch.cat([units, units[:5]]))
    assert neighbors[:5, 0].tolist() == [50, 51, 52, 53, 54]
    assert (distances[:, 0] == 0).sum() == 10
    assert np.isfinite(intrinsic_dimension(distances))
    assert CLID()(*[without_labels(torch.ones(20, 3))] * 2)["intrinsic_dimension"] == 0


def test_only_some_images_are_measured() -> None:
    features = without_labels(draw(5, 60, 8).float())
    few = CLID(images=20)(features, features)
    drawn = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:20]
    units = F.normalize(features.features[drawn].double(), dim=1).numpy()
    assert few["intrinsic_dimension"] == pytest.approx(fit_by_hand(units), rel=1e-9)
    assert few == CLID(images=20, k=4)(features, features), "the root of their number"
    with pytest.raises(UserError, match="clid: 70 or more images are expected, and there are 60"):
        CLID(k=70)(features, features)


def test_a_run_and_the_command_need_no_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images.npz"
    np.savez(images, images=np.load(tiny.digits_file(tmp_path))["images"][:40])
    words = [
        *tiny.overrides("simclr", tmp_path, "run", "train.epochs=2"),
        *(f"data={images}", f"data.val={images}", "eval.evaluations={clid: {}}"),
        "train.keep_best.metric=cluster_learnability",
    ]
    assert main(["train", "simclr/digits", *words]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    measured = [row for row in map(json.loads, lines) if "cluster_learnability" in row]
    assert measured and all(0 < row["intrinsic_dimension"] < 40 for row in measured)
    capsys.readouterr()
    assert main(["eval", "clid", str(tmp_path / "run"), f"data={images}", "seeds=2"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["cluster_learnability_seeds_low"] <= row["cluster_learnability"] <= 1
    assert row["test_images"] == 40 and "classes" not in row
