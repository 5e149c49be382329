"""LiDAR and alignment: figures of published code, definitions in loops, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import selftask
import tiny
from figures import draw
from selftask.checkpoint.kept import Kept
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.data.subset import Part, Subset
from selftask.data.transforms.pipeline import build_pipeline
from selftask.evaluate.view_measures import alignment, lidar
from selftask.random.views import draw_rng

FIGURES = [19.343760962305492, 19.215328788003514]  # of stable-pretraining, seeds 0 and 500


@pytest.mark.parametrize("case", [0, 1])
def test_lidar_is_that_of_published_code(case: int) -> None:
    """Features of 40 images in 6 views: noise, plus twice as much for each image."""
    seed = 500 * case
    features = draw(seed + 1, 40, 6, 32) + 2 * draw(seed + 2, 40, 1, 32)
    assert lidar(features) == pytest.approx(FIGURES[case], rel=1e-9)


@pytest.mark.parametrize(("images", "width"), [(5, 9), (12, 4)])
def test_lidar_as_in_the_paper(images: int, width: int) -> None:
    """More features than images, too: the matrix of the paper, entry by entry."""
    x = draw(0, images, 3, width) + draw(1, images, 1, width)
    means = x.mean(dim=1)
    between, within = torch.zeros(width, width), 1e-4 * torch.eye(width)
    for image in range(images):
        d = means[image] - means.mean(dim=0)
        between = between + torch.outer(d, d) / (images - 1)
        for view in x[image]:
            d = view - means[image]
            within = within + torch.outer(d, d) / (images * 2)
    values = torch.linalg.eigvals(torch.linalg.solve(within, between)).real.clamp(min=0) + 1e-8
    share = values / values.sum()
    assert lidar(x) == pytest.approx(float((-share * share.log()).sum().exp()), rel=1e-6)


def test_one_direction_between_images_is_rank_one() -> None:
    x = 100 * draw(0, 30, 1, 1) * torch.eye(8, dtype=torch.float64)[0] + 0.1 * draw(1, 30, 5, 8)
    assert lidar(x) == pytest.approx(1, abs=1e-2)


def test_alignment_as_a_loop_over_pairs() -> None:
    x = draw(0, 4, 3, 5)
    units = x / x.norm(dim=2, keepdim=True)
    pairs = [(u[i], u[j]) for u in units for i in range(3) for j in range(i)]
    mean = sum(float((a - b).square().sum()) for a, b in pairs) / len(pairs)
    assert alignment(x) == pytest.approx(mean, rel=1e-12)
    assert alignment(x[:, :1].expand(-1, 3, -1)) == pytest.approx(0, abs=1e-12)
    assert alignment(torch.zeros(4, 3, 5)) == 0


def test_a_run_is_measured_in_its_own_views(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same numbers each time; wider views differ more; equal ones are refused."""
    run = tmp_path / "run"
    words = tiny.overrides("simclr", tmp_path, "run", "train.max_steps=2")
    assert main(["train", "simclr/digits", *words]) == 0

    def measure(*more: str) -> dict[str, float]:
        capsys.readouterr()
        assert main(["eval", "views", str(run), "images=40", "views=4", *more]) == 0
        row: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return row

    row = measure()
    assert (row["test_images"], row["views"]) == (40, 4)
    assert 1 <= row["lidar"] <= 32 and 0 < row["feature_alignment"] < 4
    assert measure() == row
    kept = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert kept["evaluation"] == "views" and kept["lidar"] == row["lidar"]
    capsys.readouterr()
    library = ["timm:resnet10t", "weights=none", f"data={tiny.digits_file(tmp_path)}"]
    assert main(["eval", "views", *library, "images=4", "views=2"]) == 2
    assert "all views of an image are equal" in capsys.readouterr().err


def test_a_run_measures_its_views_and_is_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-back images without labels; the measures of the last weights are computed again here."""
    images = tiny.digits_file(tmp_path, "val.npz", 100, 130)
    np.savez(tmp_path / "held_back.npz", images=np.load(images)["images"])
    held_back = f"data.val={tmp_path}/held_back.npz"
    views = ["eval.evaluations={views: {images: 20, views: 3}}", "eval.every=1 epochs"]
    best = "train.keep_best={metric: feature_alignment, mode: min}"
    for out, more in {"measured": [*views, best], "plain": []}.items():
        words = tiny.overrides("simclr", tmp_path, out, held_back, *more, "train.epochs=2")
        assert main(["train", "simclr/digits", *words]) == 0
    plain, measured = (
        torch.load(tmp_path / out / "export/backbone.pt", weights_only=True)
        for out in ("plain", "measured")
    )
    assert not tiny.differences(plain, measured)
    rows = [row for row in tiny.rows(tmp_path / "measured") if "lidar" in row]
    assert [row["step"] for row in rows] == [0, 5, 10]

    config = load_config(str(tmp_path / "measured/config.yaml"), [])
    source = open_data(config.data).val
    assert source is not None
    pipeline = build_pipeline(config.views["main"].transforms, "views", 3)
    network = selftask.load(str(tmp_path / "measured")).backbone
    features = []
    for index, image in enumerate(Subset(source, Part(count=20)).rows.tolist()):
        draws = [draw_rng(config.train.seed + view, 0, index, 0) for view in range(3)]
        shown = np.stack([pipeline(source[image][0], rng) for rng in draws])
        with torch.no_grad():
            features.append(network(pipeline.to_float(torch.from_numpy(shown))))
    last = rows[-1]
    assert last["lidar"] == pytest.approx(lidar(torch.stack(features)), rel=1e-4)
    assert last["feature_alignment"] == pytest.approx(alignment(torch.stack(features)), rel=1e-4)
    assert rows[0]["lidar"] != last["lidar"]
    best = min(rows[1:], key=lambda row: row["feature_alignment"])  # step 0 has no checkpoint
    ((step, value),) = Kept.read(tmp_path / "measured/checkpoints").best
    assert (step, value) == (best["step"], pytest.approx(best["feature_alignment"]))
