"""Automatic augmentation against torchvision: its tables, each operation, shares of the draws."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import cv2
import numpy as np
import pytest
import torchvision.transforms as tv
from PIL import Image
from torchvision.transforms.autoaugment import _apply_op

from selftask.data.transforms import policies, policy_tables
from selftask.registry import TRANSFORMS

NEAREST = tv.InterpolationMode.NEAREST
SIZES = [(224, 224), (32, 32), (45, 61)]


def build(name: str, **args: Any) -> Any:
    return TRANSFORMS[name](**args)


def smooth_image(seed: int, height: int, width: int) -> np.ndarray:
    """Smooth and colorful, with a part of the range of values only."""
    small = np.random.default_rng(seed).integers(20, 240, (5, 6, 3), dtype=np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)


def spaces(height: int, width: int) -> dict[str, Any]:
    return {
        "rand": (tv.RandAugment()._augmentation_space(31, (height, width)), 31),
        "auto": (tv.AutoAugment()._augmentation_space(10, (height, width)), 10),
        "wide": (tv.TrivialAugmentWide()._augmentation_space(31), 31),
        "mix": (tv.AugMix()._augmentation_space(10, (height, width)), 10),
    }


STRENGTHS = {
    "rand": policy_tables.RAND,
    "auto": policy_tables.RAND,
    "wide": policy_tables.WIDE,
    "mix": policy_tables.MIX,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", STRENGTHS)
def test_magnitudes(which: str, size: tuple[int, int]) -> None:
    space, bins = spaces(*size)[which]
    for name, (magnitudes, signed) in space.items():
        if magnitudes.ndim == 0:
            continue
        assert signed == (name in policy_tables.SIGNED)
        ours = [
            policy_tables.magnitude(name, bin_ / (bins - 1), *size, STRENGTHS[which])
            for bin_ in range(bins)
        ]
        assert np.allclose(ours, magnitudes.numpy(), atol=1e-4), name
        if name == "Posterize":
            assert ours == magnitudes.tolist()


def test_operations_of_each_class() -> None:
    space = spaces(32, 32)
    assert set(policies.ALL) == set(space["rand"][0]) == set(space["wide"][0])
    assert {*policies.ALL, "Invert"} - {"Identity"} == set(space["auto"][0])
    assert set(policies.ALL) - {"Identity"} == set(space["mix"][0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted({*policies.ALL, "Invert"}))
def test_each_operation(name: str, size: tuple[int, int]) -> None:
    """At every strength of the widest table, either way, on a smooth image.

    Tables are exact, blends within rounding; what is moved is the same but for one pixel in 30,
    whose nearest neighbor OpenCV's steps of 1/1024 of a pixel find on the other side.
    """
    height, width = size
    image = smooth_image(3, height, width)
    for level in (0.0, 0.1, 1 / 3, 0.5, 0.7, 1.0):
        strength = policy_tables.magnitude(name, level, height, width, policy_tables.WIDE)
        for sign in (1, -1) if name in policy_tables.SIGNED else (1,):
            ours = policies.perform(image, ((name, sign * strength),), "nearest", 0)
            theirs = np.asarray(
                _apply_op(Image.fromarray(image), name, sign * strength, NEAREST, None)
            )
            difference = np.abs(ours.astype(int) - theirs.astype(int))
            if name in policy_tables.GEOMETRY:
                assert np.mean(difference.max(axis=2) > 0) < 1 / 30, (name, level, sign)
            elif name in policy_tables.COLORS:
                assert difference.max() <= 3 and difference.mean() < 1.1, (name, level, sign)
            else:
                assert difference.max() == 0, (name, level)


def test_shift_is_in_whole_pixels() -> None:
    """32 pixels times 15 of 30 is 16, however it is rounded on the way."""
    image = smooth_image(0, 40, 40)
    for bin_ in range(31):
        pixels = policy_tables.magnitude("TranslateX", bin_ / 30, 40, 40, policy_tables.WIDE)
        moved = policies.perform(image, (("TranslateX", pixels),), "nearest", 7)
        whole = 32 * bin_ // 30
        assert np.array_equal(moved[:, whole:], image[:, : 40 - whole])
        assert (moved[:, :whole] == 7).all()


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_auto_augment_draws(policy: str) -> None:
    """How often each operation is used, against what the table says; 5 standard errors."""
    transform, rng = build("auto_augment", policy=policy), np.random.default_rng(0)
    table, n = tv.AutoAugment(tv.AutoAugmentPolicy(policy)).policies, 4000
    params = Counter(op for _ in range(n) for op in transform.draw(rng, 32, 32))
    assert sum(v for (name, _), v in params.items() if name == "Identity") == 0
    for wanted in {name for pair in table for name, _, _ in pair}:
        expected = sum(p for pair in table for name, p, _ in pair if name == wanted) / 25
        got = sum(v for (name, _), v in params.items() if name == wanted) / n
        spread = sum(
            sum(p for name, p, _ in pair if name == wanted) ** 2 + 0.5 for pair in table
        ) / (25 * n)
        assert abs(got - expected) < 5 * math.sqrt(spread)
    signed = [size for (name, size), v in params.items() if name in policy_tables.SIGNED and size]
    assert min(signed) < 0 < max(signed)


def test_rand_and_trivial_augment_draw_evenly() -> None:
    rng, n = np.random.default_rng(0), 6000
    rand, wide = build("rand_augment", num_ops=3, magnitude=9), build("trivial_augment_wide")
    first = [rand.draw(rng, 32, 32) for _ in range(n // 3)]
    assert {len(operations) for operations in first} == {3}
    lists = [[op for ops in first for op in ops], [wide.draw(rng, 32, 32)[0] for _ in range(n)]]
    for params in lists:
        counts = Counter(name for name, _ in params)
        assert set(counts) == set(policies.ALL)
        share = 1 / len(policies.ALL)
        error = math.sqrt(share * (1 - share) / n)
        assert all(abs(count / n - share) < 5 * error for count in counts.values())
        turned = [size for name, size in params if name == "Rotate"]
        assert abs(np.mean(np.sign(turned))) < 5 / math.sqrt(len(turned))
    assert {round(abs(size), 9) for name, size in lists[0] if name == "Rotate"} == {9.0}
    sizes = {round(abs(size) / 4.5, 6) for name, size in lists[1] if name == "Rotate"}
    assert sizes == set(range(31))


def test_aug_mix_is_the_weighted_mean() -> None:
    """torchvision's AugMix given our draws."""
    image = smooth_image(1, 40, 50)
    for seed in range(6):
        transform = build("aug_mix", severity=5, interpolation="nearest")
        weights, chains = transform.draw(np.random.default_rng(seed), 40, 50)
        assert weights.sum() == pytest.approx(1.0)
        assert len(chains) == 3
        expected = weights[0] * image
        for weight, chain in zip(weights[1:], chains, strict=True):
            theirs: Any = Image.fromarray(image)
            for name, size in chain:
                if name == "Posterize" and not size:
                    theirs = Image.fromarray(np.zeros_like(image))  # Pillow refuses 0 bits
                else:
                    theirs = _apply_op(theirs, name, size, NEAREST, None)
            expected = expected + weight * np.asarray(theirs)
        ours = transform(image, np.random.default_rng(seed))
        assert np.abs(ours - expected).mean() < 1.0, seed


def test_aug_mix_draws_like_the_paper() -> None:
    """Weights: Beta(1, 1) for the image, the rest even; chains of 1 to 3; 5 standard errors."""
    transform, rng, n = build("aug_mix"), np.random.default_rng(0), 1500
    params = [transform.draw(rng, 32, 32) for _ in range(n)]
    weights = np.array([weights for weights, _ in params])
    kept = weights[:, 0]
    assert abs(kept.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(kept.var() - 1 / 12) < 0.01
    assert np.abs(weights[:, 1:].mean(0) - 1 / 6).max() < 5 * math.sqrt(weights[:, 1].var() / n)
    depths = Counter(len(chain) for _, chains in params for chain in chains)
    assert set(depths) == {1, 2, 3}
    assert max(depths.values()) / min(depths.values()) < 1.2
    assert {len(c) for c in build("aug_mix", depth=2, num_chains=4).draw(rng, 9, 9)[1]} == {2}
    turns = {
        abs(size) for _, chains in params for c in chains for name, size in c if name == "Rotate"
    }
    assert sorted(turns) == pytest.approx([0, 30 / 9, 60 / 9]), "the first three of ten bins"
    few = [build("aug_mix", all_ops=False).draw(rng, 32, 32)[1] for _ in range(200)]
    names = {name for chains in few for chain in chains for name, _ in chain}
    assert names == set(policies.GEOMETRY) | set(policies.TABLES)


@pytest.mark.parametrize(
    "name", ["rand_augment", "auto_augment", "trivial_augment_wide", "aug_mix"]
)
def test_pictures_keep_their_size_and_the_given_one_its_values(name: str) -> None:
    transform, rng = build(name), np.random.default_rng(0)
    image = smooth_image(2, 33, 47)
    before, changed = image.copy(), 0
    for _ in range(60):
        out = transform(image, rng)
        assert out.shape == image.shape and out.dtype == np.uint8 and out.flags.c_contiguous
        changed += not np.array_equal(out, image)
    assert np.array_equal(image, before)
    assert changed > 30
