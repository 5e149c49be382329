"""``selftask eval correspondence``: known warps, coordinates as features, runs and mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import tiny
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.data.loading.open_data import Sources
from selftask.data.sources.files import Folder
from selftask.errors import UserError
from selftask.evaluate.correspondence import (
    Correspondence,
    centers,
    distances,
    draw_warp,
    evaluate_correspondence,
    warped,
)
from selftask.models.features.tokens import Features, from_map

STRONG = Correspondence(scale=(0.3, 1.0), degrees=180.0)
PLAIN = ["eval.transforms=[{name: normalize, stats: half}]"]  # pixels in -1 to 1


def embedded(places: Tensor) -> Tensor:
    """Map positions (..., 2) to units whose cosine falls with the distance, up to fourth order."""
    angles = 0.3 * places
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Coordinates(nn.Module):
    """Backbone for images whose first channels are x and y: the position of each patch."""

    offers = frozenset({"dense"})

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = patch

    def extract(self, images: Tensor) -> Features:
        mean = nn.functional.avg_pool2d(images[:, :2], self.patch)  # (B, 2, h, w), in -1 to 1
        maps = embedded(mean.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return Features(maps.mean(dim=(2, 3)), from_map(maps), {})


class Nothing(Coordinates):
    """Backbone that tells no patch from another."""

    def extract(self, images: Tensor) -> Features:
        maps = torch.ones_like(nn.functional.avg_pool2d(images, self.patch))
        return Features(maps.mean(dim=(2, 3)), from_map(maps), {})


@pytest.fixture(scope="module")
def ramps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose red is x and whose green is y, of several shapes."""
    folder = tmp_path_factory.mktemp("ramps")
    for number, (height, width) in enumerate(((256, 256), (256, 200), (180, 300))):
        x, y = ((np.arange(n) + 0.5) / n * 255 for n in (width, height))
        red, green = np.broadcast_arrays(x[None], y[:, None])
        array = np.rint(np.stack([red, green, 0 * red], axis=2)).astype(np.uint8)
        Image.fromarray(array).save(folder / f"{number}.png")
    return folder


def evaluate(backbone: nn.Module, folder: Path, options: Correspondence) -> dict[str, float]:
    source = Folder(Folder.Config(path=str(folder)))
    config = load_config("simclr/digits", PLAIN)
    return evaluate_correspondence(
        backbone, config, Sources(source, None), options, device=torch.device("cpu"), tell=print
    )


@pytest.mark.parametrize("seed", range(4))
def test_coordinates_as_features_are_perfect(ramps: Path, seed: int) -> None:
    """Through reading, warping and matching; a patch at most 0.71 patches away is the nearest."""
    options = Correspondence(
        size=64, scale=(0.4, 1.0), degrees=180.0, thresholds=[0.01, 0.1], seed=seed
    )
    row = evaluate(Coordinates(8), ramps, options)
    assert row["test_images"] == 3
    assert row["correspondence_pck_0.1"] == 1.0
    assert row["correspondence_pck_0.01"] > 0.98, "8 bits, and two patches at nearly one distance"
    assert row["correspondence_distance"] < 0.71 / 8


def test_exact_coordinates_are_perfect_at_any_threshold() -> None:
    for index in range(50):
        warp = draw_warp(STRONG, index)
        places = centers((9, 9), warp)
        true = places @ warp[:, :2].T + warp[:, 2]
        whole, view = (embedded(p).T.unflatten(1, (9, 9)) for p in (places, true))
        distance, match = distances(whole, view, warp)
        found = distance.gather(1, match[:, None])[:, 0]
        assert torch.allclose(found, distance.amin(dim=1), atol=1e-3)


def test_features_that_say_nothing_are_at_chance(ramps: Path) -> None:
    """All match one corner."""
    options = Correspondence(size=64, thresholds=[0.05, 0.2])
    row = evaluate(Nothing(8), ramps, options)
    for threshold in ("0.05", "0.2"):
        assert row[f"correspondence_pck_{threshold}"] < 0.1
        chance = row[f"correspondence_chance_{threshold}"]
        circle = math.pi * float(threshold) ** 2
        assert 1 / 64 <= chance <= max(1.3 / 64, 1.1 * circle)
    assert 0.5 < row["correspondence_distance"] < 1.0


def test_views_lie_inside_the_image_and_are_squares() -> None:
    sides, mirrored = [], 0
    for index in range(300):
        warp = draw_warp(STRONG, index)
        corners = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]], dtype=torch.float64)
        placed = corners @ warp[:, :2].T + warp[:, 2]
        assert placed.min() >= -1e-12 and placed.max() <= 1 + 1e-12
        x, y = warp[:, 0], warp[:, 1]
        assert float(x.norm()) == pytest.approx(float(y.norm())) and abs(float(x @ y)) < 1e-12
        reach = placed.amax(dim=0) - placed.amin(dim=0)
        assert 0.3 - 1e-9 <= float(reach[0]) <= 1 + 1e-9
        sides.append(float(x.norm()))
        mirrored += float(torch.linalg.det(warp[:, :2])) < 0
    assert min(sides) < 0.35 and max(sides) > 0.7 and 100 < mirrored < 200
    assert torch.equal(draw_warp(STRONG, 5), draw_warp(STRONG, 5))
    assert not torch.equal(draw_warp(STRONG, 5), draw_warp(STRONG, 6))


def test_warped_pixels_are_those_at_the_mapped_positions() -> None:
    """A linear image is interpolated without error: its warp is linear in the positions."""
    size, big = 16, 64
    places = centers((big, big), torch.zeros(1, dtype=torch.float64)).T.unflatten(1, (big, big))
    warps = torch.stack([draw_warp(STRONG, index) for index in range(5)])
    views = warped(places.expand(5, -1, -1, -1), warps, size)
    for view, warp in zip(views, warps, strict=True):
        targets = centers((size, size), warp) @ warp[:, :2].T + warp[:, 2]
        inside = ((targets > 0.5 / big) & (targets < 1 - 0.5 / big)).all(dim=1)
        assert torch.allclose(view.flatten(1).T[inside], targets[inside], atol=1e-12)


def test_command_on_a_run_and_on_a_transformer(
    ramps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = tiny.overrides("simclr", tmp_path, "run", "train.epochs=1")
    assert main(["train", "simclr/digits", *overrides]) == 0
    words = ["size=32", "layer=-1", "images=12", "thresholds=[0.1]"]
    capsys.readouterr()
    assert main(["eval", "correspondence", str(tmp_path / "run"), *words]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["test_images"] == 12 and row["size"] == 32
    assert 0 < row["correspondence_chance_0.1"] < 1 >= row["correspondence_pck_0.1"] >= 0
    kept = json.loads((tmp_path / "run/evaluations.jsonl").read_text().splitlines()[-1])
    assert kept["evaluation"] == "correspondence" and row.items() <= kept.items()
    vit = ["timm:vit_tiny_patch16_224", "weights=none", f"data={ramps}", "train.device=cpu"]
    assert main(["eval", "correspondence", *vit, "size=64"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["test_images"] == 3 and again["correspondence_distance"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=RAMPS"], "needs a run or model before any key=value"),
        (["MODEL", "data=RAMPS", "scale=[1,0.5]"], "scale=[1,0.5]: "),
        (["MODEL", "data=RAMPS", "scale=[0,1]"], "scale=[0,1]: must be above 0"),
        (["MODEL", "data=RAMPS", "thresholds=[]"], "thresholds=[]: one or more are expected"),
        (["MODEL", "data=RAMPS", "images=0"], "images=0: must be at least 1"),
        (["MODEL", "data=RAMPS", "degree=5"], "there is no 'degree'; did you mean 'degrees'?"),
        (
            ["MODEL", "data=RAMPS", "size=100"],
            "size: 100 pixels cannot be divided",
        ),
        (["MODEL", "data=RAMPS", "eval.transforms=[normalize]"], "give the size in pixels"),
        (["MODEL", "data=RAMPS/nothing"], "nothing"),
    ],
)
def test_bad_arguments_of_eval_correspondence_are_refused(
    words: list[str], message: str, ramps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("RAMPS", str(ramps)) for word in words]
    if words[0] == "MODEL":
        words = ["timm:vit_tiny_patch16_224", "weights=none", *words[1:]]
    assert main(["eval", "correspondence", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


def test_needs_a_size_before_training() -> None:
    words = ["eval.evaluations={correspondence: {}}"]
    with pytest.raises(UserError, match=r"correspondence\.size: eval\.transforms has no crop"):
        load_config("simclr/digits", words)
    load_config("simclr/digits", ["eval.evaluations={correspondence: {size: 16}}"])
