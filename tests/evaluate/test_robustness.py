"""`selftask eval robustness`: corruptions by their formulas, errors by brute force."""

from __future__ import annotations

import json
import math
from colorsys import hsv_to_rgb, rgb_to_hsv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import nn

import tiny
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.data.loading.open_data import open_data
from selftask.data.transforms.pipeline import build_pipeline
from selftask.evaluate.corruptions import CORRUPTIONS, fog
from selftask.evaluate.robustness import (
    RobustnessOptions,
    _side_of,
    corrupted,
    measure_robustness,
)

NORMALIZE = Component(name="normalize", args={"stats": "half"})


def shown(name: str, strength: Any, image: np.ndarray) -> np.ndarray:
    """The corrupted image as float64."""
    transforms = corrupted([NORMALIZE], name, strength, min(image.shape[:2]))
    assert transforms[-1] == NORMALIZE
    pipeline = build_pipeline(transforms[:-1], "transforms", image.shape[2])
    return pipeline(image, np.random.default_rng(0)).astype(np.float64)


@pytest.fixture
def image() -> np.ndarray:
    """A smooth image of 64 x 64 pixels."""
    noise = np.random.default_rng(0).random((64, 64, 3))
    smooth = gaussian_filter(noise, (3, 3, 0))
    return (255 * (smooth - smooth.min()) / np.ptp(smooth)).astype(np.uint8)


LEVELS = pytest.mark.parametrize("level", range(5))


def at(name: str, level: int) -> Any:
    """A strength of a corruption."""
    return CORRUPTIONS[name].strengths[level]


@LEVELS
def test_tones_follow_their_formulas(level: int, image: np.ndarray) -> None:
    factor, offset = at("contrast", level), at("brightness", level)
    expected = np.empty(image.shape)
    for channel in range(3):
        mean = image[..., channel].mean()
        expected[..., channel] = mean + factor * (image[..., channel] - mean)
    np.testing.assert_allclose(shown("contrast", factor, image), expected, atol=0.51)
    image[0, :2] = (0, 0, 0), (255, 128, 0)
    for row, column in np.ndindex(64, 64):
        hue, saturation, value = rgb_to_hsv(*(image[row, column] / 255))
        expected[row, column] = hsv_to_rgb(hue, saturation, min(value + offset, 1))
    np.testing.assert_allclose(shown("brightness", offset, image), 255 * expected, atol=0.51)


@LEVELS
def test_noise_has_its_strength(level: int) -> None:
    gray = np.full((256, 256, 3), 102, dtype=np.uint8)
    draws = np.random.default_rng(1)
    sigma, rate, share = (at(f"{n}_noise", level) for n in ("gaussian", "shot", "impulse"))
    actual = shown("gaussian_noise", sigma, gray)
    expected = np.clip(102 + 255 * sigma * draws.standard_normal(10**6), 0, 255)
    assert actual.mean() == pytest.approx(expected.mean(), rel=0.01)
    assert actual.std() == pytest.approx(expected.std(), rel=0.01)

    actual = shown("shot_noise", rate, gray)
    for events in range(2 * rate):  # the density of Poisson, of the levels that are not clipped
        level_of = round(255 * min(events / rate, 1))
        density = sum(
            math.exp(-0.4 * rate + n * math.log(0.4 * rate) - math.lgamma(n + 1))
            for n in range(4 * rate)
            if round(255 * min(n / rate, 1)) == level_of
        )
        assert (actual == level_of).mean() == pytest.approx(density, abs=0.004)
    assert not (shown("shot_noise", rate, np.zeros_like(gray))).any()

    actual = shown("impulse_noise", share, gray)
    assert (actual == 0).mean() == pytest.approx(share / 2, rel=0.05)
    assert (actual == 255).mean() == pytest.approx(share / 2, rel=0.05)
    assert ((actual == 0) | (actual == 255) | (actual == 102)).all()
    of_two = ((actual[..., 0] != 102) & (actual[..., 1] != 102)).mean()
    assert of_two == pytest.approx(share**2, rel=0.2, abs=3e-4), "channels are independent"


def reflected(index: int, size: int) -> int:
    """The index beyond a border, which is not repeated."""
    return abs(index) if index < size else 2 * size - 2 - index


@LEVELS
def test_defocus_averages_over_a_smoothed_disk(level: int) -> None:
    radius, softness = at("defocus_blur", level)
    grid = 2 * max(8, radius) + 1
    center = grid // 2
    disk = [
        [(x - center) ** 2 + (y - center) ** 2 <= radius**2 for x in range(grid)]
        for y in range(grid)
    ]
    reach = 1 if radius <= 8 else 2
    taps = [math.exp(-(n**2) / (2 * softness**2)) for n in range(-reach, reach + 1)]
    kernel = np.zeros((grid, grid))
    for y, x, v, u in np.ndindex(grid, grid, len(taps), len(taps)):
        inside = disk[reflected(y + v - reach, grid)][reflected(x + u - reach, grid)]
        kernel[y, x] += taps[v] * taps[u] * inside
    kernel /= sum(taps) ** 2 * np.sum(disk)
    rough = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    pipeline = build_pipeline(
        CORRUPTIONS["defocus_blur"].transforms((radius, softness), 224), "transforms", 3
    )
    actual = pipeline(rough, np.random.default_rng(0))
    for row, column in ((0, 0), (20, 15), (39, 29), (3, 17)):
        total = sum(
            kernel[y, x]
            * rough[reflected(row + y - center, 40), reflected(column + x - center, 30)]
            for y, x in np.ndindex(grid, grid)
        )
        np.testing.assert_allclose(actual[row, column], total, atol=0.51)


@LEVELS
def test_fog_is_a_plasma_fractal_by_loops(level: int, image: np.ndarray) -> None:
    """Diamond-square point by point; the noise of a grid is drawn in the same order."""
    amount, decay = at("fog", level)
    rng, size, roughness = np.random.default_rng(3), 64, 100.0
    heights: dict[tuple[int, int], float] = {(0, 0): 0.0}
    step = size
    while step >= 2:
        half = step // 2
        around = {
            (half, half): [(-half, -half), (-half, half), (half, -half), (half, half)],
            (0, half): [(-half, 0), (half, 0), (0, -half), (0, half)],
            (half, 0): [(-half, 0), (half, 0), (0, -half), (0, half)],
        }
        for (first, second), neighbors in around.items():
            noise = roughness * rng.uniform(-roughness, roughness, (size // step, size // step))
            for row, column in np.ndindex(noise.shape):
                y, x = first + row * step, second + column * step
                known = [heights[(y + b) % size, (x + a) % size] for b, a in neighbors]
                heights[y, x] = sum(known) / 4 + noise[row, column]
        step, roughness = half, roughness / decay
    low, high = min(heights.values()), max(heights.values())
    expected = np.empty(image.shape)
    brightest = image.max() / 255
    for row, column in np.ndindex(64, 64):
        cloud = (heights[row, column] - low) / (high - low)
        foggy = image[row, column] / 255 + amount * cloud
        expected[row, column] = foggy * brightest / (brightest + amount)
    actual = fog(image, np.random.default_rng(3), amount, decay)
    np.testing.assert_allclose(actual, 255 * expected.clip(0, 1), atol=0.51)
    assert shown("fog", (amount, decay), image[:50, :40]).shape == (50, 40, 3)


@LEVELS
def test_blur_and_pixels(level: int, image: np.ndarray) -> None:
    sigma = at("gaussian_blur", level)
    rough = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    expected = gaussian_filter(rough.astype(np.float64), (sigma * 64 / 224,) * 2 + (0,))
    change = np.abs(expected - rough)[8:-8, 8:-8].mean()
    error = np.abs(shown("gaussian_blur", sigma, rough) - expected)[8:-8, 8:-8].mean()
    assert error < 0.05 * change + 0.3 < change  # 0.25: rounding to levels
    share = at("pixelate", level)
    small = Image.fromarray(image).resize((round(64 * share),) * 2, Image.Resampling.BILINEAR)
    large = np.asarray(small.resize((64, 64), Image.Resampling.NEAREST), dtype=np.float64)
    assert np.abs(shown("pixelate", share, image) - large).mean() < 2


def test_errors_are_divided_by_those_of_alexnet(tmp_path: Path) -> None:
    """A thousand classes of one image, whose brighter copies are classified by hand."""
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (1000, 3, 3, 3), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", images=images, labels=np.arange(1000))
    words = [f"{key}={tmp_path}/train.npz" for key in ("data", "data.val")]
    config = load_config("simclr/digits", [*words, "eval.transforms=[normalize]"])
    options = RobustnessOptions(
        corruptions=["brightness", "contrast", "gaussian_blur"], k=1, alexnet=True, images=100
    )
    row = measure_robustness(
        nn.Flatten(), config, open_data(config.data), options, device=torch.device("cpu")
    )
    published = {"brightness": 0.564592, "contrast": 0.853204}
    ratios = [row[f"{name}_error"] / error for name, error in published.items()]
    assert row["mean_corruption_error"] == pytest.approx(np.mean(ratios)) and min(ratios) > 0


def test_corruptions_are_of_the_size_that_the_network_sees() -> None:
    """Pixels of 4 in an image of 16, and noise after the crop; the source has 40 x 60."""
    transforms = [
        Component(name="resize", args={"size": 20}),
        Component(name="center_crop", args={"size": 16}),
        NORMALIZE,
    ]
    for name in CORRUPTIONS:
        names = [t.name for t in corrupted(transforms, name, CORRUPTIONS[name].strengths[0], 16)]
        assert names[:2] == ["resize", "center_crop"] and names[-1] == "normalize"
    wide = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    pipeline = build_pipeline(corrupted(transforms, "pixelate", 0.25, 16)[:-1], "transforms", 3)
    blocks = pipeline(wide, np.random.default_rng(0)).reshape(4, 4, 4, 4, 3)
    assert (blocks == blocks[:, :1, :, :1]).all() and len(np.unique(blocks)) > 10


def test_errors_are_those_of_a_search_by_hand(tmp_path: Path) -> None:
    train, test = tiny.digits_file(tmp_path), tiny.digits_file(tmp_path, "val.npz", 80, 140)
    words = [
        f"data={train}",
        f"data.val={test}",
        "eval.transforms=[{name: normalize, stats: half}]",
    ]
    config = load_config("simclr/digits", words)
    options = RobustnessOptions(corruptions=["brightness", "contrast"], k=1)
    rows: list[str] = []
    row = measure_robustness(
        nn.Flatten(),
        config,
        open_data(config.data),
        options,
        device=torch.device("cpu"),
        tell=rows.append,
    )

    def error(change: float, factor: float) -> float:  # of gray images
        sets = []
        for path, now in ((train, False), (test, True)):
            file = np.load(path)
            images = file["images"].astype(np.float64)
            if now:
                mean = images.mean(axis=(1, 2), keepdims=True)
                images = np.clip(np.rint(factor * (images - mean) + mean + 255 * change), 0, 255)
            flat = (images / 127.5 - 1).reshape(len(images), -1)
            sets.append((flat / np.linalg.norm(flat, axis=1, keepdims=True), file["labels"]))
        (bank, labels), (queries, expected) = sets
        return float((labels[(queries @ bank.T).argmax(1)] != expected).mean())

    assert row["clean_error"] == pytest.approx(error(0, 1))
    brightness = [error(value, 1) for value in CORRUPTIONS["brightness"].strengths]
    contrast = [error(0, value) for value in CORRUPTIONS["contrast"].strengths]
    assert row["brightness_error"] == pytest.approx(np.mean(brightness))
    assert row["contrast_error"] == pytest.approx(np.mean(contrast))
    assert row["corruption_error"] == pytest.approx(np.mean(brightness + contrast))
    assert row["relative_corruption_error"] == row["corruption_error"] - row["clean_error"]
    assert row["test_images"] == 60 and len(rows) == 3
    assert _side_of(open_data(config.data).val, config.eval.transforms, []) == 32
    assert rows[1].split()[2:] == [f"{value:.3f}" for value in brightness]


def test_eval_robustness_repeats_its_row_and_records_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = tiny.overrides("simclr", tmp_path, "run", "train.max_steps=2")
    assert main(["train", "simclr/digits", *words]) == 0
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 80, 140)}"
    command = ["eval", "robustness", str(run), val, "images=30", "corruptions=[gaussian_noise]"]
    printed = []
    for _ in range(2):
        capsys.readouterr()
        assert main(command) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    row = json.loads(printed[0].splitlines()[-1])
    assert row["test_images"] == 30 and row["corruption_error"] == row["gaussian_noise_error"]
    kept = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert kept["evaluation"] == "robustness" and kept["clean_error"] == row["clean_error"]


def save(folder: Path, label: str, images: np.ndarray) -> None:
    (folder / label).mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / label / f"{number}.png")


def test_a_folder_as_of_imagenet_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of the training images in right or wrong classes; a class may be missing."""
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 16, 16, 3), dtype=np.uint8)
    for number, label in enumerate("abc"):
        save(tmp_path / "train", label, images[number])
        save(tmp_path / "corrupted" / "fog" / "1", label, images[number])
        save(tmp_path / "corrupted" / "fog" / "2", label, images[(number + (number > 0)) % 3])
    for number, label in ((1, "b"), (2, "c")):
        save(tmp_path / "corrupted" / "snow" / "5", label, images[number])
    words = ["eval", "robustness", "timm:test_resnet", "weights=none", "k=1", "data.num_workers=0"]
    words += [f"{key}={tmp_path / 'train'}" for key in ("data", "data.val")]
    words += ["eval.transforms=[normalize]", f"folder={tmp_path / 'corrupted'}"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split() == ["fog", "0.333", "0.000", "0.667"]
    row = json.loads(lines[-1])
    assert row["snow_error"] == 0 and row["fog_error"] == pytest.approx(1 / 3)
    assert row["corruption_error"] == pytest.approx(1 / 6) and row["test_images"] == 12
    for word, message in (
        ("corruptions=[jpeg]", "corruptions: the folder has its own; leave corruptions out"),
        (f"folder={tmp_path / 'train'}", "train: expected CORRUPTION/STRENGTH/CLASS/IMAGE in it"),
        (f"folder={tmp_path / 'none'}", "none: expected CORRUPTION/STRENGTH/CLASS/IMAGE in it"),
    ):
        assert main([*words, word]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("corruptions=[contrst]", "corruptions: there is no 'contrst'; did you mean 'contrast'?"),
        ("corruptions=[]", "corruptions=[]: one or more are expected"),
        ("alexnet=true", "alexnet: its errors are those of the 1000 classes of ImageNet, and data"),
        ("corruptions=[gaussian_blur] alexnet=true", "ImageNet-C counts none of these corruptions"),
        ("corruptions=[contrast,contrast]", "corruptions: a name stands twice"),
        ("k=200", "knn.k: 200 neighbors are asked for, and there are 80 images to choose from"),
        ("eval.layers=[-1,-2]", "eval.layers: robustness is measured for one layer"),
        ("data.val=null", "data.val is missing: give the labeled images to test on, data.val=DIR"),
        ("kk=3", "eval robustness: there is no 'kk'; did you mean 'k'?"),
    ],
)
def test_mistakes_in_robustness(
    word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["timm:resnet10t", "weights=none", f"data={tiny.digits_file(tmp_path)}"]
    model.append(f"data.val={tiny.digits_file(tmp_path, 'val.npz', 80, 140)}")
    assert main(["eval", "robustness", *model, *word.split()]) == 2
    assert message in capsys.readouterr().err


def test_unreadable_and_oblong_images_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for number in (4, 9):
        (tmp_path / "images" / "ab"[number % 2] / f"{number}.png").write_bytes(b"no image")
    model = ["eval", "robustness", "timm:resnet10t", "weights=none", "k=3"]
    model += [f"{key}={tmp_path / 'images'}" for key in ("data", "data.val")]
    model += ["data.max_unreadable=0.5", "corruptions=[contrast,pixelate]", "data.num_workers=0"]
    assert main([*model, "eval.transforms=[normalize]"]) == 2
    assert (
        "pixelate needs square images, and eval.transforms gives 30x20" in capsys.readouterr().err
    )
    crop = "eval.transforms=[{name: center_crop, size: 16}, normalize]"
    assert main([*model, crop]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["test_images"] == 22
    lines = (printed.out + printed.err).splitlines()
    assert sum("2 of 24 images of data.val could not be read" in line for line in lines) == 1
    assert any("22 of 22 test images are also training images" in line for line in lines)
