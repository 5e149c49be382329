"""k-NN on the stream of training images, beside a search without a queue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

import tiny
from ranks import run_ranks
from selftask.distributed.collectives import rank, world_size
from selftask.errors import ConfigError
from selftask.models.feature_queue import LabeledQueue

K, WIDTH, CLASSES, NEIGHBORS = 30, 5, 4, 3


def stream() -> list[tuple[Tensor, Tensor]]:
    """Seven batches of 12 images; some images have no label."""
    draws = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(7):
        labels = torch.randint(-1, CLASSES, (12,), generator=draws)
        x = torch.randn(12, WIDTH, generator=draws)
        batches.append((x + 2 * torch.eye(WIDTH)[labels], labels))
    return batches


def of_ranks() -> dict[str, Tensor]:
    """Queue and accuracy after the stream, whose batches the ranks share."""
    queue = LabeledQueue(K, WIDTH, CLASSES, NEIGHBORS, torch.device("cpu"))
    for x, labels in stream():
        queue.add(x, labels)
        queue.clear()  # as after a step that is skipped
        queue.add(x.chunk(world_size())[rank()], labels.chunk(world_size())[rank()])
        queue.update()
    state = {name: value.clone() for name, value in queue.state_dict().items()}
    accuracy = queue.take_accuracy()
    assert accuracy is not None and queue.take_accuracy() is None
    return {**state, "accuracy": accuracy}


def as_rank(rank: int) -> dict[str, Tensor]:
    return of_ranks()


def test_accuracy_is_that_of_a_search_among_the_latest_images() -> None:
    """By scikit-learn, from the first batch on before which the queue is full."""
    x = torch.nn.functional.normalize(torch.cat([x for x, _ in stream()]), dim=1)
    y = torch.cat([labels for _, labels in stream()])
    hits = images = 0
    for start in range(36, len(x), 12):
        latest = [row for row in range(start - K, start) if y[row] >= 0]
        search = NearestNeighbors(n_neighbors=NEIGHBORS, metric="cosine").fit(x[latest])
        distances, found = search.kneighbors(x[start : start + 12])
        for row in range(12):
            votes = torch.zeros(CLASSES)
            for distance, index in zip(distances[row], found[row], strict=True):
                votes[y[latest[index]]] += float(torch.tensor((1 - distance) / 0.07).exp())
            label = int(y[start + row])
            hits += label >= 0 and int(votes.argmax()) == label
            images += label >= 0
    state = of_ranks()
    assert (int(state["hits"]), int(state["images"])) == (hits, images)
    assert 0.3 < float(state["accuracy"]) == pytest.approx(hits / images)


def test_three_ranks_are_one() -> None:
    expected = of_ranks()
    for state in run_ranks(as_rank, 3):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_no_neighbors_and_too_many(tmp_path: Path) -> None:
    tiny.train("simclr", tmp_path, "run", "hooks.online_probe={}", "train.max_steps=3")
    assert not any("train_knn_top1" in row for row in tiny.rows(tmp_path / "run"))
    with pytest.raises(ConfigError, match="k: 20 is more than queue_size: 10"):
        tiny.config("simclr", tmp_path, "other", "hooks.online_probe={k: 20, queue_size: 10}")
