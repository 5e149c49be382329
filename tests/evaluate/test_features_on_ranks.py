"""``features`` and ``eval`` started by torchrun: the same files and figures, written once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from ranks import run_ranks
from selftask.cli.main import main
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.dataset import EvalDataset
from selftask.data.loading.loader import EvalBatches
from selftask.data.source import Source
from selftask.data.transforms.pipeline import build_pipeline
from selftask.errors import BadImage, RunError, UserError
from selftask.evaluate.features import Features
from selftask.evaluate.knn import KNN
from selftask.evaluate.on_ranks import iterate_in_order, part_of_rank

COUNT, BATCH = 45, 4
UNREADABLE = {*range(8, 12), 19, 44}  # a whole batch, one of another, and all of the last one
NUM_TESTED = 25  # only rank 0 has an image in the last chunk


class Numbered(Source):
    """Image i has the value i in all pixels."""

    def __init__(self, unreadable: set[int]) -> None:
        self.unreadable_rows = unreadable

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self.unreadable_rows:
            raise BadImage(self.path(index), "cut off")
        return np.full((4, 4, 3), index, dtype=np.uint8), index % 7

    def path(self, index: int) -> str:
        return f"image {index}"

    def describe(self) -> str:
        return "numbers"


class MeanTimes(nn.Module):
    """Mean value of an image, times a weight; fails on request."""

    def __init__(self, factor: float, fails_at: int | None = None) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.fails_at = fails_at

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean(dim=(2, 3))[:, :1] * 255
        if self.fails_at is not None and bool((means.round() == self.fails_at).any()):
            raise ValueError("no such feature")
        return means * self.factor


def _extract(rank: int, fails_at: int | None) -> list[list[float]] | str:
    source = Numbered(UNREADABLE)
    dataset = EvalDataset(source, build_pipeline([], "eval.transforms", 3), 0)
    batches = EvalBatches(
        dataset, batch_size=BATCH, bad_files=BadFiles(None, COUNT, max_unreadable=1.0)
    )
    parts = iterate_in_order(MeanTimes(2.0, fails_at), batches, device=torch.device("cpu"))
    try:
        actual = list(parts)
    except (UserError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return [
        [float(value) for part in actual for value in values(part)]
        for values in (lambda p: p.indices, lambda p: p.features[:, 0], lambda p: p.targets)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_all_features_in_order(size: int) -> None:
    """With images that cannot be read."""
    first, *others = run_ranks(_extract, size, None)
    readable = [index for index in range(COUNT) if index not in UNREADABLE]
    assert first[0] == readable
    assert first[1] == pytest.approx([2.0 * index for index in readable], rel=1e-5)
    assert first[2] == [index % 7 for index in readable]
    assert others == [first] * (size - 1)


def _knn_scores(rank: int) -> list[float]:
    draws = torch.Generator().manual_seed(7)
    targets = torch.randint(3, (30 + NUM_TESTED,), generator=draws)
    features = 2 * torch.eye(3, 4)[targets] + torch.randn(30 + NUM_TESTED, 4, generator=draws)
    images = Features(features, targets, torch.arange(30 + NUM_TESTED))
    train, test = images[torch.arange(30)], images[torch.arange(30, 30 + NUM_TESTED)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selftask.evaluate.knn.QUERIES", 6)  # several chunks of each rank
        patch.setattr(torch, "empty", torch.ones)  # an image that was not tested is then a hit
        return KNN(k=[5])(part_of_rank(train), part_of_rank(test))["knn_top1"].scores.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_scores_are_in_the_order_of_the_images(size: int) -> None:
    """Those of two models are compared image by image; the last one of rank 0 has its own chunk."""
    alone = _knn_scores(0)
    assert alone[12] == alone[8] == 0, "no hit"
    assert len(alone) == NUM_TESTED and 0 < sum(alone) < NUM_TESTED
    assert run_ranks(_knn_scores, size) == [alone] * size


def test_an_error_of_one_rank_ends_all() -> None:
    """Image 5 is in batch 1, which is rank 1's."""
    results = run_ranks(_extract, 3, 5)
    assert results == ["RunError: rank 1 of 3: ValueError: no such feature"] * 3


@pytest.mark.parametrize("words", [["export", "run"], ["eval", "suite", "run"], ["test", "run"]])
def test_what_cannot_be_shared_is_refused_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": 7}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "n1")
    monkeypatch.setenv("RANK", "0")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    command = " ".join(words[:-1])
    assert line.startswith(f"error: {command} runs in one process, and torchrun has started 2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2 and capsys.readouterr() == ("", "")


def _torchrun(count: int, folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}"]
    done = subprocess.run(
        [*command, "-m", "selftask", *words],
        env=tiny.environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_commands_by_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [f"data={tiny.digits_file(tmp_path, 'a.npz', 0, 700)}", "train.device=cpu"]
    tiny.train("simclr", tmp_path, "run", "train.max_steps=2")
    run = str(tmp_path / "run")
    for out, start in (("one", main), ("three", lambda words: _torchrun(3, tmp_path, *words))):
        start(["features", run, *sets, f"out={tmp_path / out}"])
    one, three = (np.load(tmp_path / out / "features.npy") for out in ("one", "three"))
    assert one.shape == three.shape == (700, one.shape[1])
    assert np.array_equal(one, three)
    assert len({(tmp_path / out / "images.csv").read_text() for out in ("one", "three")}) == 1
    sets.append(f"data.val={tiny.digits_file(tmp_path, 'b.npz', 700, 1000)}")
    capsys.readouterr()
    assert main(["eval", "knn", run, *sets, "k=[5]"]) == 0
    alone = capsys.readouterr().out.splitlines()
    assert _torchrun(2, tmp_path, "eval", "knn", run, *sets, "k=[5]").splitlines() == alone
    rows = (tmp_path / "run/evaluations.jsonl").read_text().splitlines()
    first, second = (json.loads(row) for row in rows)
    assert len(rows) == 2 and first["knn_top1"] == second["knn_top1"]
