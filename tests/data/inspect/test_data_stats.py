"""``selftask data stats``: moments of all pixels and sizes, exact, for a recipe to take."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from data.odd_files import make_photographs
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.data.inspect.pixel_statistics import choose, measure, sums_of_pixels
from selftask.data.source import Source
from selftask.errors import UserError


class ListOfArrays(Source):
    """Any arrays as a source."""

    def __init__(self, images: list[np.ndarray]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], -1

    def path(self, index: int) -> str:
        return f"array {index}"

    def describe(self) -> str:
        return "arrays"


def uneven_images() -> list[np.ndarray]:
    """Images of different sizes and brightness."""
    rng = np.random.default_rng(0)
    shapes = [(rng.integers(1, 40), rng.integers(1, 40)) for _ in range(30)]
    return [
        rng.integers(rng.integers(0, 100), rng.integers(101, 256), (*shape, 3), dtype=np.uint8)
        for shape in shapes
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_moments_are_those_of_all_pixels(num_workers: int, tmp_path: Path) -> None:
    images = uneven_images()
    actual = measure(ListOfArrays(images), num_workers)
    pixels = np.concatenate([image.reshape(-1, 3) for image in images]) / 255.0
    np.testing.assert_allclose(actual.by_pixel.mean, pixels.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(actual.by_pixel.std, pixels.std(axis=0), rtol=1e-12)
    means = np.mean([(image / 255.0).mean(axis=(0, 1)) for image in images], axis=0)
    squares = np.mean([((image / 255.0) ** 2).mean(axis=(0, 1)) for image in images], axis=0)
    np.testing.assert_allclose(actual.by_image.mean, means, rtol=1e-13)
    np.testing.assert_allclose(actual.by_image.std, np.sqrt(squares - means**2), rtol=1e-12)
    expected = sorted((image.shape[1], image.shape[0]) for image in images)
    assert sorted(map(tuple, actual.sides.tolist())) == expected
    heights = sorted(image.shape[0] for image in images)
    assert actual.quantiles()["height"][0] == heights[0]
    assert actual.quantiles()["height"][3] == heights[len(heights) // 2 - 1]
    assert actual.quantiles()["height"][-1] == heights[-1]


def test_moments_do_not_depend_on_the_number_of_processes() -> None:
    source = ListOfArrays(uneven_images())
    one, three = measure(source, 1), measure(source, 3)
    assert one.by_image == three.by_image, "bit for bit"
    assert one.by_pixel == three.by_pixel


def test_sums_are_exact_for_the_largest_and_brightest() -> None:
    white = np.broadcast_to(np.array([255, 254, 1], dtype=np.uint8), (1000, 2000, 3))
    number = 2_000_000
    assert sums_of_pixels(white).sums == (255 * number, 254 * number, number)
    assert sums_of_pixels(white).squares == (255**2 * number, 254**2 * number, number)


def test_a_subset_is_drawn_by_its_seed() -> None:
    assert choose(10, None, 0).tolist() == list(range(10))
    assert choose(10, 20, 0).tolist() == list(range(10))
    first = choose(1000, 100, 3)
    assert first.tolist() == sorted(set(first.tolist())) == choose(1000, 100, 3).tolist()
    assert first.tolist() != choose(1000, 100, 4).tolist()
    drawn = Counter(index for seed in range(2000) for index in choose(10, 3, seed).tolist())
    chi_square = sum((drawn[index] - 600) ** 2 / 600 for index in range(10))
    assert chi_square < 27.9, "each image equally often (p = 0.001)"


def test_stats_prints_what_a_recipe_can_take(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = make_photographs(tmp_path, 12)
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    assert main(["data", "stats", str(tmp_path), "--workers", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].startswith("measured     12 of 13 images, 1 unreadable in ")
    pixels = np.concatenate([np.asarray(Image.open(path)).reshape(-1, 3) for path in paths]) / 255
    (transform,) = yaml.safe_load(lines[-1])
    assert transform["mean"] == pixels.mean(axis=0).round(4).tolist()
    assert transform["std"] == pixels.std(axis=0).round(4).tolist()
    taken = f"views={{main: {{count: 2, transforms: [{lines[-1].removeprefix('- ')}]}}}}"
    views = load_config("simclr/digits", [taken]).views
    assert views["main"].transforms[0].args["mean"] == transform["mean"]


def test_stats_of_a_subset_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_photographs(tmp_path, 12)
    argv = ["data", "stats", str(tmp_path), "--max", "5", "--seed=1", "--json"]
    assert main(argv) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["images"], report["of"], report["unreadable"]) == (5, 12, 0)
    assert report["quantiles"]["width"] == [24] * 7
    assert main(argv) == 0
    assert json.loads(capfd.readouterr().out)["mean"] == report["mean"]


def test_stats_of_nothing_readable(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    assert main(["data", "stats", str(tmp_path)]) == 2
    assert "none of 1 images can be read" in capfd.readouterr().err


def test_stats_of_images_with_different_channels() -> None:
    images = [np.zeros((2, 2, channels), dtype=np.uint8) for channels in (3, 5)]
    with pytest.raises(UserError, match="has 5 channels, and images before it have 3"):
        measure(ListOfArrays(images), 1)
