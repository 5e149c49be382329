"""Parts of ``selftask eval segmentation``: metrics, memory of patches, linear heads, masks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score, recall_score

from dense_data import interpolated
from figures import draw
from selftask.evaluate.dense.confusion import Confusion, upsampled_classes
from selftask.evaluate.dense.linear_heads import fit_linear_heads
from selftask.evaluate.dense.masks import read_mask
from selftask.evaluate.dense.memory import PatchMemory, class_shares


def test_metrics_are_those_of_scikit_learn() -> None:
    """Class 4 has no pixel, class 5 is only predicted."""
    draws = np.random.default_rng(0)
    mask, predicted = draws.integers(0, 4, (3, 20, 20)), draws.integers(0, 4, (3, 20, 20))
    predicted = np.where(draws.random(mask.shape) < 0.5, mask, predicted)
    predicted[0, :5] = 5
    mask[1, 3:9] = -1
    confusion = Confusion(6)
    for number in range(3):
        confusion.add(torch.from_numpy(mask[number]), torch.from_numpy(predicted[number]))
    truth, given = mask[mask >= 0], predicted[mask >= 0]
    row = confusion.metrics()
    assert row["miou"] == pytest.approx(jaccard_score(truth, given, average="macro"), rel=1e-12)
    assert row["accuracy"] == pytest.approx(accuracy_score(truth, given), rel=1e-12)
    labels = np.unique(truth)
    recall = recall_score(truth, given, average="macro", labels=labels)
    assert row["class_accuracy"] == pytest.approx(recall, rel=1e-12)
    by_class = jaccard_score(truth, given, average=None, labels=[0, 1, 2, 3, 5])
    assert confusion.iou()[[0, 1, 2, 3, 5]].tolist() == pytest.approx(by_class.tolist())
    assert math.isnan(confusion.iou()[4])


def test_scores_are_interpolated_between_the_centers_of_patches() -> None:
    scores = draw(3, 5, 6, 4)[:, :4]
    expected = interpolated(scores.numpy(), 30).argmax(axis=0)
    assert (upsampled_classes(scores, 30).numpy() == expected).all()


@pytest.mark.parametrize("grid", [(4, 4), (5, 3)])
def test_shares_are_counted_pixel_by_pixel(grid: tuple[int, int]) -> None:
    masks = torch.from_numpy(np.random.default_rng(1).integers(-1, 3, (2, 16, 16)))
    masks[0, :4, :4] = -1
    shares = class_shares(masks, grid, 3)
    for image in range(2):
        for number in range(grid[0] * grid[1]):
            inside = [
                int(masks[image, y, x])
                for y in range(16)
                for x in range(16)
                if (y * grid[0] // 16) * grid[1] + x * grid[1] // 16 == number
            ]
            counted = [inside.count(label) for label in range(3)]
            expected = [count / max(1, sum(counted)) for count in counted]
            assert shares[image, number].tolist() == pytest.approx(expected)
    assert shares[0, 0].sum() == 0 or grid != (4, 4)


def test_memory_is_bounded_and_the_same_for_any_batches() -> None:
    maps, shares = draw(0, 9, 5, 4 * 4).unflatten(2, (4, 4)), torch.rand(9, 16, 3)
    shares[2] = shares[5, 3:] = 0  # no label
    results = []
    for batch in (1, 4):
        memory = PatchMemory(50, 9, seed=3)
        for first in range(0, 9, batch):
            rows = slice(first, first + batch)
            memory.add(memory.offer(maps[rows], shares[rows], torch.arange(9)[rows]))
        results.append(memory.finish())
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    features, labels, images = results[0]
    counts = torch.bincount(images, minlength=9).tolist()
    assert len(features) == sum(counts) == 50, "what unlabeled images leave goes to later ones"
    assert counts[2] == 0 and counts[5] <= 3 and max(counts) <= 12
    assert (labels.sum(dim=1) > 0).all()
    patches = maps.flatten(2).transpose(1, 2)
    for row, label, image in zip(features, labels, images.tolist(), strict=True):
        (number,) = (patches[image] == row).all(dim=1).nonzero()[0].tolist()
        assert torch.equal(shares[image, number], label)
    other = PatchMemory(50, 9, seed=4)
    other.add(other.offer(maps, shares, torch.arange(9)))
    assert not torch.equal(other.finish()[0], features)


def test_linear_heads_reach_the_floor_of_the_loss() -> None:
    """Ten kinds of patches with separable features: the floor is the entropy of their shares."""
    kinds = torch.randint(10, (3000,), generator=torch.Generator().manual_seed(0))
    shares = draw(5, 10, 4).square().float()
    shares = shares / shares.sum(dim=1, keepdim=True)
    features = 3 + draw(6, 10, 16).float()[kinds] * 5
    heads = fit_linear_heads(
        features, shares[kinds], [0.0001, 0.03], steps=600, weight_decay=0.0, seed=0
    )
    targets = shares[kinds]
    floor = -(targets * targets.log()).sum(dim=1).mean()
    slow, fast = (
        -(targets * scores.log_softmax(dim=1)).sum(dim=1).mean()
        for scores in heads.scores(features)
    )
    assert fast == pytest.approx(float(floor), abs=1e-3)
    assert slow > floor + 0.05, "this rate is too small, so the loss can be above the floor"


def test_heads_trained_at_once_are_those_trained_alone() -> None:
    features, shares = draw(0, 1500, 8).float(), torch.eye(3)[torch.arange(1500) % 3]
    fit = partial(fit_linear_heads, features, shares, steps=30, weight_decay=0.01, seed=1)
    together = fit([0.01, 0.1])
    for number, rate in enumerate([0.01, 0.1]):
        alone = fit([rate])
        assert torch.allclose(together.weights[number], alone.weights[0], atol=1e-6)
        assert torch.allclose(together.biases[number], alone.biases[0], atol=1e-6)


@pytest.mark.parametrize("mode", ["P", "L", "I;16", "1"])
def test_masks_of_any_depth_hold_indices(mode: str, tmp_path: Path) -> None:
    indices = np.array([[0, 1], [1, 0]] if mode == "1" else [[0, 7], [255, 3]])
    if mode == "I;16":
        indices[0, 0] = 40_000
        Image.fromarray(indices.astype(np.uint16)).save(tmp_path / "a.png")
    elif mode == "P":
        image = Image.fromarray(indices.astype(np.uint8)).convert("L")
        image.putpalette(list(range(256)) * 3)
        image.save(tmp_path / "a.png")
    else:
        array = indices.astype(bool) if mode == "1" else indices.astype(np.uint8)
        Image.fromarray(array).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as written:
        assert written.mode == mode
    assert read_mask(str(tmp_path / "a.png")).tolist() == indices.tolist()
