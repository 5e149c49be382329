"""Numbers behind the images of a report, against scikit-learn and float64 by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pictured import gathered
from sklearn.decomposition import PCA
from sklearn.metrics import confusion_matrix
from sklearn.metrics.pairwise import cosine_distances

from selftask.evaluate.features import Features
from selftask.evaluate.knn import KNN
from selftask.report.images.class_table import by_class
from selftask.report.images.neighbors import nearest_neighbors
from selftask.report.images.patch_maps import patch_colors
from selftask.report.images.projections import pca


def test_neighbors_are_those_of_float64() -> None:
    features = np.random.default_rng(1).normal(size=(200, 16)).astype(np.float32)
    queries = [3, 50, 199]
    nearest, similar = nearest_neighbors(torch.from_numpy(features), queries, 5)
    distances = cosine_distances(features.astype(np.float64))
    np.fill_diagonal(distances, np.inf)
    for query, rows, cosines in zip(queries, nearest, similar, strict=True):
        assert rows.tolist() == np.argsort(distances[query])[:5].tolist()
        assert np.allclose(1 - cosines, np.sort(distances[query])[:5], atol=1e-6)


def test_few_images_have_few_neighbors() -> None:
    nearest, _ = nearest_neighbors(torch.eye(3), [0], 8)
    assert sorted(nearest[0].tolist()) == [1, 2]


@pytest.mark.parametrize("shape", [(50, 7), (9, 30), (12, 12)], ids=["tall", "wide", "square"])
def test_pca_is_that_of_sklearn(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(2).normal(size=shape) * np.arange(1, shape[1] + 1)
    scores, shares = pca(values, 3)
    theirs = PCA(3, svd_solver="full").fit(values)
    expected = theirs.transform(values)
    signs = np.sign((scores * expected).sum(axis=0))
    assert np.allclose(scores, expected * signs, atol=1e-8)
    assert np.allclose(shares, theirs.explained_variance_ratio_)
    assert np.allclose(pca(values, 3)[0], scores), "the signs do not depend on the call"


def test_pca_without_enough_directions() -> None:
    scores, shares = pca(np.array([[0.0], [1.0], [5.0]]), 2)
    assert np.allclose(scores[:, 0], [-2, -1, 3]) and not scores[:, 1].any()
    assert shares.tolist() == [1.0, 0.0]
    assert not pca(np.ones((4, 3)), 2)[0].any(), "equal features are one point"


def test_classes_are_predicted_as_the_knn_evaluation_does() -> None:
    images = gathered(90)
    labels = images.labels.copy()
    labels[::10] = -1  # without a label: not in the table, no neighbor of others
    actual = by_class(images.features, labels)
    known = labels >= 0
    train = Features(
        torch.from_numpy(images.features[known]),
        torch.from_numpy(labels[known]),
        torch.arange(int(known.sum())),
    )
    assert actual.overall == pytest.approx(KNN()(train, train)["knn_top1"])
    assert actual.confusion.sum() == known.sum()
    assert actual.accuracy[actual.classes].tolist() == sorted(actual.accuracy[actual.classes])


def test_confusion_by_hand() -> None:
    """Nearest by far are twins; one twin of each pair has another label."""
    directions = np.repeat(np.eye(6, dtype=np.float32), 25, axis=0)
    labels = np.repeat([0, 1, 2, 0, 1, 2], 25)
    labels[0] = 2
    actual = by_class(directions, labels.astype(np.int64))
    expected = labels.copy()
    expected[0] = 0  # all of its neighbors are of class 0
    assert np.array_equal(actual.confusion, confusion_matrix(labels, expected))
    assert actual.mistakes(2) == [(0, 1)] and actual.mistakes(1) == []
    assert actual.classes[0] == 2, "the worst class first"


def test_classes_of_some_images_take_no_memory_for_all_others() -> None:
    """A table of 20,000 classes took 3.2 GB, and its sums for each line minutes."""
    few = np.array([7, 19_999, 7, 19_999] * 15)
    directions = np.eye(2, dtype=np.float32)[(few == 7).astype(int)]
    actual = by_class(directions, few)
    assert actual.confusion.tolist() == [[30, 0], [0, 30]] and actual.labels.tolist() == [7, 19_999]


def test_colors_of_patches_are_their_components() -> None:
    tokens = np.random.default_rng(3).normal(size=(4, 5, 6, 10)).astype(np.float32)
    colors = patch_colors(tokens)
    assert colors.shape == (4, 5, 6, 3) and colors.dtype == np.uint8
    expected = PCA(3, svd_solver="full").fit_transform(tokens.reshape(-1, 10).astype(np.float64))
    for channel in range(3):
        agreement = np.corrcoef(colors[..., channel].ravel(), expected[:, channel])[0, 1]
        assert abs(agreement) > 0.99
    assert np.ptp(colors, axis=(0, 1, 2)).min() == 255, "the whole range is used"
    twice = np.concatenate([tokens, tokens])
    again = patch_colors(twice)
    assert np.array_equal(again[:4], again[4:]), "equal tokens have equal colors in any image"
