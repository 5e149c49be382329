"""LiDAR and alignment: figures of published code, definitions in loops, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from figures import draw
from selftask.cli.main import main
from selftask.evaluate.view_measures import alignment, lidar

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
    assert (row["images"], row["views"]) == (40, 4)
    assert 1 <= row["lidar"] <= 32 and 0 < row["alignment"] < 4
    assert measure() == row
    kept = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert kept["evaluation"] == "views" and kept["lidar"] == row["lidar"]
    capsys.readouterr()
    library = ["timm:resnet10t", "weights=none", f"data={tiny.digits_file(tmp_path)}"]
    assert main(["eval", "views", *library, "images=4", "views=2"]) == 2
    assert "all views of an image are equal" in capsys.readouterr().err
