"""Parts of ``selftask eval segmentation``: metrics, memory of patches, linear heads, masks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score, recall_score
from torch import Tensor

from dense_data import interpolated
from figures import draw
from selftask.errors import UserError
from selftask.evaluate.dense.confusion import Confusion, upsampled_classes
from selftask.evaluate.dense.heads import HeadOptions, fit_heads
from selftask.evaluate.dense.linear_heads import LinearHeads, fit_linear_heads
from selftask.evaluate.dense.masks import IGNORED, classes_of, read_mask
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


def test_as_many_classes_as_int16_has_numbers() -> None:
    """Every second index of a mask of 16 bits, and one more, as in depth maps."""
    even = dict.fromkeys(range(0, 65_536, 2), 1)
    numbers = classes_of(None, (), even).numbers()
    assert (numbers[::2] == np.arange(32_768)).all() and (numbers[1::2] == IGNORED).all()
    assert len(classes_of(None, (0,), even, {65_535: 1})) == 32_768
    with pytest.raises(UserError, match="32,769 indices of classes; at most 32,768"):
        classes_of(None, (), even, {65_535: 1})


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
    places: dict[int, list[int]] = {}
    for row, label, image in zip(features, labels, images.tolist(), strict=True):
        (number,) = (patches[image] == row).all(dim=1).nonzero()[0].tolist()
        places.setdefault(image, []).append(number)
        assert torch.equal(shares[image, number], label)
    assert not set(places[0]) <= set(places[1]) and not set(places[1]) <= set(places[0])
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


def test_linear_heads_are_trained_by_adamw_along_a_cosine() -> None:
    """Kingma and Ba's algorithm 1 for the mean loss, with decay of the weights only."""
    features, shares = 3 + 2 * draw(1, 12, 4), draw(2, 12, 3).softmax(dim=1)
    steps, rate, decay = 6, 0.1, 0.5
    heads = fit_linear_heads(features, shares, [rate], steps=steps, weight_decay=decay, seed=0)
    inputs = (features - features.mean(dim=0)) / features.std(dim=0, correction=0)
    inputs = torch.cat([inputs, torch.ones(12, 1).double()], dim=1)
    weights, first, second = (torch.zeros(3, 5).double() for _ in range(3))  # biases are last
    for step in range(steps):
        gradient = ((inputs @ weights.T).softmax(dim=1) - shares).T @ inputs / 12
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        lr = rate * (1 + math.cos(math.pi * step / steps)) / 2
        weights[:, :4] *= 1 - lr * decay
        scale = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        weights -= lr * first / (1 - 0.9 ** (step + 1)) / scale
    torch.testing.assert_close(heads.weights[0], weights[:, :4], rtol=0, atol=1e-9)
    torch.testing.assert_close(heads.biases[0], weights[:, 4], rtol=0, atol=1e-9)


def test_heads_trained_at_once_are_those_trained_alone() -> None:
    features, shares = draw(0, 1500, 8).float(), torch.eye(3)[torch.arange(1500) % 3]
    fit = partial(fit_linear_heads, features, shares, steps=30, weight_decay=0.01, seed=1)
    together = fit([0.01, 0.1])
    for number, rate in enumerate([0.01, 0.1]):
        alone = fit([rate])
        assert torch.allclose(together.weights[number], alone.weights[0], atol=1e-6)
        assert torch.allclose(together.biases[number], alone.biases[0], atol=1e-6)


@pytest.mark.parametrize("seed", [0, 5, 11])
def test_the_learning_rate_is_the_best_on_images_that_are_held_out(seed: int) -> None:
    """Of 12 of 30 images of four patches; then the head is fitted to all patches.

    Fitted to all patches at once, another rate would be the best.
    """
    draws, rates = torch.Generator().manual_seed(seed), [1.0, 0.001, 0.03]
    images, labels = (
        torch.arange(30).repeat_interleave(4),
        torch.randint(3, (120,), generator=draws),
    )
    centers = 0.5 * torch.randn(3, 32, generator=draws)
    features = centers[labels] + 1.5 * torch.randn(120, 32, generator=draws)
    shares = torch.eye(3)[labels]
    options = HeadOptions(heads=["linear"], lr=rates, steps=60, held_out=0.4, seed=2)
    heads, facts = fit_heads(options, features, shares, images)

    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    held = torch.isin(images, order[:12])

    def fit(rows: Tensor, rate: float) -> LinearHeads:
        settings: dict[str, Any] = {"steps": 60, "weight_decay": 0.0001, "seed": 2}
        return fit_linear_heads(features[rows], shares[rows], [rate], **settings)

    def accuracy(rows: Tensor, rate: float) -> float:
        predicted = fit(rows, rate).scores(features[held])[0].argmax(dim=1)
        return float((predicted == labels[held]).float().mean())

    every = torch.ones_like(held)
    best, of_all = (max(rates, key=partial(accuracy, rows)) for rows in (~held, every))
    assert facts == {"linear_lr": best} and best != of_all
    torch.testing.assert_close(heads["linear"](features), fit(every, best).scores(features)[0])


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
