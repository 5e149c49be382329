"""``selftask eval depth``: metrics, bins, depth that follows from color, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dense_data import DEPTH, scene, write_depths
from figures import draw
from selftask.cli.main import main
from selftask.evaluate.depth import DepthOptions, metrics

MODEL = ["torchvision:resnet18", "weights=none", "layer=1", "size=96", "train.device=cpu"]


def test_metrics_by_hand() -> None:
    predicted, depth = draw(0, 8, 8).exp(), draw(1, 8, 8).exp()
    counts = draw(2, 8, 8) > 0
    pairs = [
        (float(p), float(d))
        for p, d, c in zip(predicted.flatten(), depth.flatten(), counts.flatten(), strict=True)
        if c
    ]
    expected = [
        np.mean([(p - d) ** 2 for p, d in pairs]) ** 0.5,
        np.mean([abs(p - d) / d for p, d in pairs]),
        np.mean([max(p / d, d / p) < 1.25 for p, d in pairs]),
    ]
    assert metrics(predicted, depth, counts).tolist() == pytest.approx(expected, rel=1e-12)
    assert metrics(predicted, depth, counts & False).isnan().all()


def test_bins_have_equal_width_and_unknown_depths_have_none() -> None:
    options = DepthOptions(bins=4, min_depth=1.0, max_depth=9.0)
    depth = torch.tensor([0.0, 0.5, 1.0, 2.9, 3.1, 8.99, 9.0, 9.01])
    assert options.bin_of(depth).tolist() == [-1, -1, 0, 0, 1, 3, 3, -1]
    assert options.centers(torch.device("cpu")).tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("png", [False, True], ids=["npy", "png"])
def test_depth_that_follows_from_color_is_found(
    png: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Much better than the mean depth; errors remain at edges, where patches are mixed."""
    train = write_depths(tmp_path / "train", 16, png=png)
    val = write_depths(tmp_path / "val", 6, first=16, png=png)
    torch.manual_seed(0)
    words = [*MODEL, f"data={train}", f"data.val={val}", "bins=64", "steps=300"]
    assert main(["eval", "depth", *words]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    depths = [DEPTH[scene(number)[1]] for number in range(16, 22)]
    mean = np.mean([DEPTH[scene(number)[1]].mean() for number in range(16)])
    blind = np.mean([np.sqrt(((depth - mean) ** 2).mean()) for depth in depths])
    for head in ("knn", "linear"):
        assert row[f"depth_{head}_rmse"] < 0.5 * blind
        assert row[f"depth_{head}_delta1"] > 0.85 and row[f"depth_{head}_abs_rel"] < 0.15
    assert (row["train_images"], row["test_images"], row["size"]) == (16, 6, 96)


def spoil(folder: Path, change: str) -> None:
    """Make a mistake in the training depths."""
    path = folder / "depths" / "1.npy"
    if change == "missing":
        path.unlink()
    elif change == "size":
        np.save(path, np.load(path)[:-2])
    elif change == "shape":
        np.save(path, np.load(path)[None])
    elif change == "damaged":
        path.write_bytes(path.read_bytes()[:90])
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "gray":
        path.unlink()
        Image.fromarray(np.ones((56, 56), np.uint8)).save(path.with_suffix(".png"))


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("missing", [], "data: 1 of 3 images have no file in 'depths', such as"),
        ("size", [], "1.npy: has 56x54 pixels, and"),
        ("shape", [], "1.npy: an array float32 of shape (1, 56, 56); numbers (H, W)"),
        ("damaged", [], "1.npy: the depth map cannot be read: "),
        ("empty", [], "1.npy: the depth map cannot be read: "),
        ("gray", [], "1.png: has mode L; a PNG of 16 bits or a .npy is expected"),
        ("", ["max_depth=0.5"], "data: no depth is from min_depth=0.001 to max_depth=0.5"),
        ("", ["min_depth=20"], "min_depth: 20; must be below max_depth=10"),
        ("", ["bins=1"], "bins=1: must be at least 2"),
        ("", ["data=DEPTHS/nothing"], "data: there is no folder 'images' in DEPTHS/nothing"),
        ("", ["max_depth=3"], "data.val: no depth is from"),
        ("", ["images=1"], "lr: 1 training image with labels leaves none"),
    ],
)
def test_damaged_depth_maps_and_bad_arguments_of_eval_depth_are_refused(
    change: str,
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = write_depths(tmp_path / "train", 3)
    val = write_depths(tmp_path / "val", 2)
    if "max_depth=3" in words:
        for path in (val / "depths").iterdir():
            np.save(path, np.load(path).clip(min=5))
    spoil(train, change)
    words = [word.replace("DEPTHS", str(tmp_path)) for word in words]
    assert main(["eval", "depth", *MODEL, f"data={train}", f"data.val={val}", *words]) == 2
    printed = capsys.readouterr().err
    assert message.replace("DEPTHS", str(tmp_path)) in printed and "Traceback" not in printed
