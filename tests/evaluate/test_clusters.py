"""Clusters: scikit-learn's k-means and scores, the definitions by brute force, and the command."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

import tiny
from figures import draw
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.evaluate.clusters import Clusters, agreement
from selftask.evaluate.features import Features


def blobs(spread: float) -> Features:
    """60 directions around 4 centers, of classes 1, 3, 5 and 7."""
    target = torch.arange(60) % 4
    x = draw(0, 4, 8)[target] + spread * draw(1, 60, 8)
    x = torch.nn.functional.normalize(x, dim=1)
    return Features(x.float(), 2 * target + 1, torch.arange(60))


@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_scores_are_those_of_scikit_learn(spread: float) -> None:
    """Of its k-means on unit vectors, whose best run has the same clusters as ours."""
    features = blobs(spread)
    target = features.targets.numpy()
    theirs = KMeans(4, n_init=50, random_state=0).fit_predict(features.features.double().numpy())
    scores = Clusters(restarts=50)(features, features)
    assert scores["cluster_nmi"] == pytest.approx(normalized_mutual_info_score(target, theirs))
    assert scores["cluster_ari"] == pytest.approx(adjusted_rand_score(target, theirs))
    assert (scores["cluster_accuracy"] == 1) == (spread == 0.1)


@pytest.mark.parametrize("clusters", [2, 3, 5])
def test_definitions_by_brute_force(clusters: int) -> None:
    """All assignments of clusters to three classes; the entropies of a table of counts."""
    draws = np.random.default_rng(clusters)
    target, cluster = draws.integers(0, 3, 40), draws.integers(0, clusters, 40)
    scores = agreement(cluster, target)
    names = [*range(3), *[-1] * max(0, clusters - 3)]
    best = max(
        np.mean([choice[c] == t for c, t in zip(cluster, target, strict=True)])
        for choice in permutations(names, clusters)
    )
    assert scores["cluster_accuracy"] == pytest.approx(best)
    purity = sum(np.bincount(target[cluster == c]).max() for c in set(cluster.tolist()))
    assert scores["cluster_purity"] == pytest.approx(purity / 40)
    joint = np.array(
        [[np.mean((target == t) & (cluster == c)) for c in range(clusters)] for t in range(3)]
    )
    of_target, of_cluster = joint.sum(1), joint.sum(0)
    nonzero = joint > 0
    mutual = (joint * np.log(np.where(nonzero, joint, 1) / np.outer(of_target, of_cluster)))[
        nonzero
    ]
    entropies = [-(p * np.log(p)).sum() for p in (of_target, of_cluster)]
    assert scores["cluster_nmi"] == pytest.approx(mutual.sum() / np.mean(entropies))


def test_too_few_and_unlabeled_images_are_refused() -> None:
    features = blobs(0.1)
    with pytest.raises(UserError, match="clusters: 61 clusters of 60 images"):
        Clusters(k=61)(features, features)
    features.targets[3] = -1
    with pytest.raises(UserError, match="clusters: 1 of 60 images have no label"):
        Clusters()(features, features)


def test_the_command_needs_no_second_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "timm:resnet10t",
        "weights=none",
        "image_size=32",
        f"data={tiny.digits_file(tmp_path)}",
    ]
    assert main(["eval", "clusters", *words, "k=12", "restarts=2"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["test_images"] == 80
    assert 0 < row["cluster_accuracy"] <= row["cluster_purity"] <= 1
