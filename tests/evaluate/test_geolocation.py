"""``selftask eval geolocation``: distances by vectors on a sphere, neighbors by brute force."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import norm
from torch import nn

from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.evaluate.geolocation import (
    EARTH_KM,
    GeolocationOptions,
    densest,
    distance_km,
    measure_geolocation,
)

DRAWS = np.random.default_rng(0)


def vectors(places: np.ndarray) -> np.ndarray:
    latitude, longitude = np.radians(places).T
    flat = np.cos(latitude)
    return np.stack([flat * np.cos(longitude), flat * np.sin(longitude), np.sin(latitude)], axis=1)


def test_distances_are_those_of_vectors_on_a_sphere() -> None:
    places = np.stack([DRAWS.uniform(-90, 90, 200), DRAWS.uniform(-180, 180, 200)], axis=1)
    first, second = places[:100], places[100:]
    chord = np.linalg.norm(vectors(first) - vectors(second), axis=1)
    expected = 2 * EARTH_KM * np.arcsin(chord / 2)
    actual = distance_km(torch.from_numpy(first), torch.from_numpy(second))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9)
    paris, new_york = torch.tensor([[48.8566, 2.3522], [40.7128, -74.0060]], dtype=torch.float64)
    assert float(distance_km(paris, new_york)) == pytest.approx(5837, abs=1)
    poles = torch.tensor([[90.0, 10.0], [-90.0, 170.0]], dtype=torch.float64)
    assert float(distance_km(*poles)) == pytest.approx(np.pi * EARTH_KM)


def test_several_neighbors_near_each_other_win_over_a_nearer_one() -> None:
    alone, pair = [10.0, 10.0], [[50.0, 8.0], [50.1, 8.0]]  # 11 km apart
    places = torch.tensor([[alone, *pair], [pair[0], alone, [0.0, 0.0]]], dtype=torch.float64)
    assert densest(places, 25.0).tolist() == [pair[0], pair[0]]


def test_the_density_is_a_sum_of_gaussians() -> None:
    """Of six neighbors, some tens of km from each other, by scipy's normal density."""
    places = np.array([48.0, 8.0]) + np.random.default_rng(1).uniform(0, 0.6, (200, 6, 2))
    actual = densest(torch.from_numpy(places), 25.0)
    for row, neighbors in zip(actual.tolist(), places, strict=True):
        points = EARTH_KM * vectors(neighbors)  # chords: as long as arcs, at such distances
        distances = np.linalg.norm(points[:, None] - points, axis=2)
        assert row == neighbors[norm.pdf(distances, scale=25.0).sum(axis=1).argmax()].tolist()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Images of 4 x 4 pixels in ``train`` and ``test``, and ``places.csv``."""
    rows = []
    for folder, count in (("train", 30), ("test", 12)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            pixels = DRAWS.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{number:02}.png")
            place = DRAWS.uniform(-60, 60, 2).round(3)
            rows.append((f"{folder}/{number:02}.png", *place.tolist()))
    with (tmp_path / "places.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "latitude", "longitude"), *rows])
    return tmp_path


@pytest.mark.parametrize("alone", [False, True])
def test_places_are_those_of_the_nearest_image(home: Path, alone: bool) -> None:
    """Of the images that can be read."""
    damaged = [home / "train/04.png", home / "test/02.png"]
    for path in damaged:
        path.write_bytes(b"damaged")
    words = [f"data={home}/train", "eval.transforms=[normalize]", "data.num_workers=0"]
    words += [] if alone else [f"data.val={home}/test"]
    config = load_config("simclr/images", words)
    options = GeolocationOptions(coordinates=f"{home}/places.csv", distances=[500.0, 4000.0])
    sources, device = open_data(config.data), torch.device("cpu")
    row = measure_geolocation(nn.Flatten(), config, sources, options, device=device)

    def read(folder: str) -> tuple[np.ndarray, np.ndarray]:
        paths = sorted(set((home / folder).iterdir()).difference(damaged))
        pixels = np.stack([np.asarray(Image.open(path)) for path in paths]) / 255
        flat = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        flat = flat.transpose(0, 3, 1, 2).reshape(len(flat), -1)
        with (home / "places.csv").open(newline="") as file:
            table = {r["path"]: (r["latitude"], r["longitude"]) for r in csv.DictReader(file)}
        places = np.array([table[f"{folder}/{path.name}"] for path in paths], dtype=np.float64)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True), vectors(places)

    bank, known = read("train")
    queries, true = read("train" if alone else "test")
    cosines = queries @ bank.T
    if alone:
        np.fill_diagonal(cosines, -2)
    chord = np.linalg.norm(known[cosines.argmax(axis=1)] - true, axis=1)
    errors = 2 * EARTH_KM * np.arcsin(chord / 2)
    assert row["geolocation_500km"] == (errors <= 500).mean()
    assert 0 < row["geolocation_4000km"] == (errors <= 4000).mean() < 1
    assert row["geolocation_median_km"] == pytest.approx(np.median(errors))
    assert (row["train_images"], row["test_images"]) == (29, 29 if alone else 11)


def test_the_command_and_its_mistakes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "geolocation", "timm:test_resnet", "weights=none", "data.num_workers=0"]
    words += [f"data={home}/train", f"data.val={home}/test", "eval.transforms=[normalize]"]
    table = home / "places.csv"
    assert main([*words, f"coordinates={table}", "k=3"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["geolocation_2500km"] >= row["geolocation_750km"] and row["test_images"] == 12
    text = table.read_text()
    for content, word, message in (
        (text, "", "coordinates is missing: a table with the columns path,latitude,longitude"),
        (text, "k=31", "k: 31 neighbors are asked for; there are 30"),
        (text, "distances=[]", "distances=[]: one or more are expected"),
        ("a,b\n1,2\n", "", "expected the columns path,latitude,longitude"),
        (text.rpartition("test/11.png")[0], "", "coordinates: no row for "),
        (
            f"{text}x.png,91,0\n",
            "",
            "places.csv:44: latitude '91', longitude '0'; expected degrees",
        ),
        (f"{text}x.png,,0\n", "", "places.csv:44: latitude '', longitude '0'; expected degrees"),
    ):
        table.write_text(content)
        given = [] if "coordinates is missing" in message else [f"coordinates={table}"]
        assert main([*words, *given, *word.split()]) == 2
        assert message in capsys.readouterr().err
