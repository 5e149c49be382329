"""Evaluations of images started by a launcher: two ranks share them and print what one does."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from PIL import Image

import tiny
from dense_data import write_depths, write_scenes
from selftask.cli.main import main
from selftask.evaluate import offline, view_measures
from selftask.evaluate.dense import patches
from selftask.evaluate.probe import inputs

MODEL = ["timm:test_vit", "weights=none", "image_size=32"]
FOLDERS = {
    "segmentation": ["steps=20", "memory=150"],
    "depth": ["steps=20", "memory=150", "bins=16"],
    "correspondence": [],
    "robustness": ["k=3", "corruptions=[contrast,jpeg]"],
    "geolocation": ["k=3", "coordinates=places.csv"],
    "linear": ["protocol=dinov2", "blocks=[1,2]", "epochs=2", "batch_size=4"],
}


def small_batches() -> None:
    """Make several batches of few images."""
    for module in (offline, view_measures, patches, inputs):
        module._BATCH_SIZE = 4


def on_rank(rank: int, folder: Path, commands: list[list[str]]) -> None:
    """Run the commands as a launcher starts them; save what each prints."""
    os.chdir(folder)
    torch.set_num_threads(1)
    small_batches()
    printed = []
    for number, words in enumerate(commands):
        ranks = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ["SELFTASK_INIT_FILE"] = str(folder / f"meeting{number}")
        torch.manual_seed(rank)  # random weights are those of rank 0
        with redirect_stdout(io.StringIO()) as text:
            assert main(["eval", *words, "train.device=cpu", "data.num_workers=0"]) == 0
        printed.append(text.getvalue())
    torch.save(printed, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of each kind, and a run; one image of each set cannot be read."""
    home = tmp_path_factory.mktemp("ranks")
    write_scenes(home / "segmentation/train", 10)
    write_scenes(home / "segmentation/val", 7, first=10)
    write_depths(home / "depth/train", 10)
    write_depths(home / "depth/val", 7, first=10)
    draws = np.random.default_rng(0)
    rows = ["path,latitude,longitude"]
    for number in range(40):
        part, label = ("train", "val")[number // 25], "ab"[number % 2]
        path = home / "images" / part / label / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 200, (32, 32, 3)) + 40 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        rows.append(f"{path.relative_to(home)},{number},{number}")
    (home / "places.csv").write_text("\n".join(rows))
    for name in ("images/train/a/04.png", "images/val/b/31.png"):
        (home / name).write_bytes(b"no image")
    assert (
        main(["train", "simclr/digits", *tiny.overrides("simclr", home), "train.max_steps=2"]) == 0
    )
    return home


@pytest.mark.slow
def test_two_ranks_print_what_one_prints(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []
    for name, more in FOLDERS.items():
        root = name if (home / name).exists() else "images"
        data = [f"data={root}/train", f"data.val={root}/val"]
        commands.append([name, *MODEL, *data, "data.max_unreadable=0.2", *more])
    commands.append(["views", "run", "views=3"])
    mp.start_processes(on_rank, (home, commands), nprocs=2, start_method="forkserver")
    first, second = (torch.load(home / f"{rank}.pt") for rank in (0, 1))
    assert second == [""] * len(commands)
    monkeypatch.chdir(home)
    for module in (offline, view_measures, patches, inputs):
        monkeypatch.setattr(module, "_BATCH_SIZE", 4)
    for words, printed in zip(commands, first, strict=True):
        torch.manual_seed(0)
        capsys.readouterr()
        assert main(["eval", *words, "train.device=cpu", "data.num_workers=0"]) == 0
        *lines, row = capsys.readouterr().out.splitlines()
        *shared, shared_row = printed.splitlines()
        assert shared == lines, words
        assert json.loads(shared_row) == pytest.approx(json.loads(row), rel=1e-6), words
    rows = (home / "run/evaluations.jsonl").read_text().splitlines()
    assert len(rows) == 2, "one of the ranks, one of the process alone"
