"""Evaluations of a run on two ranks: the same in the run, after a resume and of its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from ranks import run_ranks
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import average_statistics, rank, world_size
from selftask.distributed.world import World
from selftask.evaluate.features import Features
from selftask.evaluate.knn import KNN
from selftask.evaluate.offline import evaluate_backbone
from selftask.evaluate.online import evaluate_task
from selftask.models.weights.model_source import open_model
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

METHODS = ("simclr", "byol", "dino", "moco")


def words(folder: Path) -> list[str]:
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 520)}"
    knn = "eval.evaluations={knn: {k: [3]}}"
    return [val, knn, "eval.loss=true", "eval.every='3 steps'", "train.max_steps=8"]


def train(method: str, folder: Path, out: str, *more: str) -> Task:
    torch.set_num_threads(1)
    config = tiny.config(method, folder, out, *words(folder), *more)
    task = Task(config, sources=open_data(config.data))
    task.world = World(rank(), world_size(), rank(), world_size())
    task.evaluate = evaluate_task
    try:
        train_loop(task)
    except Interrupted:
        assert config.train.stop_at is not None
    return task


def draw_features(num: int, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (num,), generator=generator)
    features = torch.eye(5, 16)[targets] + torch.randn(num, 16, generator=generator)
    return Features(features, targets, torch.arange(num))


def knn_of_parts() -> list[dict[str, float]]:
    """k-NN of uneven parts: one rank holds fewer images than the neighbors that are asked for."""
    train, test = draw_features(100, 0), draw_features(70, 1)
    first = rank() == 0
    own = torch.arange(12) if first else torch.arange(12, 100)
    tested = torch.arange(50) if first else torch.arange(50, 70)
    mine = train[own]
    return [KNN(k=[20, 5])(mine, test[tested]), KNN(k=[20, 5])(mine, mine)]


def mean_of_statistics() -> dict[str, Tensor]:
    """Buffers of a network after their mean, which were the rank's own."""
    norm = nn.BatchNorm1d(2)
    norm.running_mean += rank()
    norm.running_var += 2 * rank()
    norm.num_batches_tracked += rank() + 5
    average_statistics(norm)
    return dict(norm.named_buffers())


def uneven_test_phase(folder: Path) -> None:
    """A test phase with 33 images in batches of 8 a rank: 17 images and 16, 3 batches each."""
    val = f"data.val={tiny.digits_file(folder, 'val33.npz', 400, 433)}"
    meters = ("meters.accuracy={topk: [1]}", "eval.loss=false", "train.max_steps=5")
    train("supervised", folder, "supervised", val, *meters, "eval.evaluations={}")


def on_ranks(_: int, folder: Path) -> tuple[list[bool], list[dict[str, float]], dict[str, Tensor]]:
    """For each method, whether this rank ends with the statistics that rank 0 has saved; k-NN."""
    uneven_test_phase(folder)
    alike = []
    for method in METHODS:
        task = train(method, folder, f"{method}_whole")
        saved = tiny.last_state(task.out)["model"]
        mine = task.base_model.state_dict()
        alike.append(all(torch.equal(saved[key], mine[key]) for key in saved))
        train(method, folder, f"{method}_parts", "train.stop_at=5")
        train(method, folder, f"{method}_parts")
    return alike, knn_of_parts(), mean_of_statistics()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of all runs, and what each rank returned."""
    folder = tmp_path_factory.mktemp("on_ranks")
    tiny.digits_file(folder)
    words(folder)
    tiny.digits_file(folder, "val33.npz", 400, 433)
    return folder, run_ranks(on_ranks, 2, folder)


def test_after_a_save_every_rank_has_what_was_saved(runs: tuple[Path, list[Any]]) -> None:
    assert [alike for alike, *_ in runs[1]] == [[True] * len(METHODS)] * 2


def test_neighbors_of_parts_are_those_of_the_whole(runs: tuple[Path, list[Any]]) -> None:
    train, test = draw_features(100, 0), draw_features(70, 1)
    expected = [KNN(k=[20, 5])(train, test), KNN(k=[20, 5])(train, train)]
    assert [figures for _, figures, _ in runs[1]] == [expected] * 2


def test_mean_of_running_statistics(runs: tuple[Path, list[Any]]) -> None:
    for _, _, buffers in runs[1]:
        assert buffers["running_mean"].tolist() == [0.5, 0.5]
        assert buffers["running_var"].tolist() == [2.0, 2.0]
        assert buffers["num_batches_tracked"] == 5  # of the first rank


def test_every_image_of_an_uneven_test_phase_counts(runs: tuple[Path, list[Any]]) -> None:
    run = runs[0] / "supervised"
    val = f"data.val={runs[0] / 'val33.npz'}"
    task = tiny.task("supervised", runs[0], "one_rank", val)
    task.prepare()
    task.base_model.load_state_dict(tiny.last_state(run)["model"])
    network = task.base_model.eval()
    images = torch.cat([batch.all_views[0] for batch in task.data_module.test_batches()])
    labels = torch.cat([batch.labels for batch in task.data_module.test_batches()])
    task.close()
    right = float((network(images).argmax(dim=1) == labels).double().mean())
    assert len(labels) == 33
    tested = [row for row in tiny.rows(run) if "test_accuracy_top_1" in row][-1]
    assert tested["test_accuracy_top_1"] == pytest.approx(right, abs=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_figures_are_those_of_the_export_and_survive_a_resume(
    method: str, runs: tuple[Path, list[Any]]
) -> None:
    folder = runs[0]
    whole, parts = folder / f"{method}_whole", folder / f"{method}_parts"
    assert tiny.rows(whole) == tiny.rows(parts)
    assert tiny.differences(tiny.last_state(whole), tiny.last_state(parts)) == []

    in_the_run = [row["knn_top1"] for row in tiny.rows(whole) if "knn_top1" in row]
    assert len(in_the_run) == 4  # after 0, 3, 6 and 8 steps
    config = tiny.config(method, folder, "unused", *words(folder))
    backbone, _ = open_model(str(whole / "export/backbone.pt"))
    sources = open_data(config.data)
    got = evaluate_backbone(backbone, config, sources, device=torch.device("cpu"))
    assert got["knn_top1"] == pytest.approx(in_the_run[-1], abs=1e-8)
