"""DenseCL against its paper, written as loops, and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitask import MiniTask
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.densecl import DenseCL, Keys, corresponding, dense_info_nce
from selftask.models.features.tokens import Features, from_map

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7, "queue_size": 20, "momentum": 0.9}
TAU = 0.2


class TinyDense(nn.Module):
    """Images of 8 pixels -> maps of 3x3 places with 6 features."""

    embed_dim = 6
    offers = ("dense",)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=2)

    def extract(self, images: Tensor) -> Features:
        features = torch.tanh(self.conv(images))
        return Features(features.mean(dim=(2, 3)), from_map(features), {})


def _task(**config: Any) -> MiniTask:
    return MiniTask("densecl", {**SMALL, **config}, backbone=TinyDense)


def _random(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draws)


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def _contrast(query: Tensor, key: Tensor, queue: Tensor) -> float:
    """-log of the key's share, for vectors of any length."""
    positive = math.exp(_cosine(query, key) / TAU)
    return -math.log(positive / (positive + sum(math.exp(_cosine(query, k) / TAU) for k in queue)))


def test_places_correspond_by_the_backbones_features() -> None:
    """Eq. 4, as loops."""
    query, key = _random(3, 6, 4), _random(3, 6, 4, seed=1)
    for b, row in enumerate(corresponding(query, key)):
        for place, match in enumerate(row.tolist()):
            cosines = [_cosine(query[b, place], other) for other in key[b]]
            assert cosines[match] == max(cosines)


def test_loss_of_places_is_that_of_the_paper() -> None:
    """Eq. 2, as loops."""
    query, key = _random(3, 6, 4), F.normalize(_random(3, 6, 4, seed=1), dim=2)
    queue = F.normalize(_random(9, 4, seed=2), dim=1)
    match = torch.randint(6, (3, 6), generator=torch.Generator().manual_seed(0))
    terms = [
        _contrast(query[b, s], key[b, int(match[b, s])], queue) for b in range(3) for s in range(6)
    ]
    loss = dense_info_nce(query, key, queue, match, temperature=TAU)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_the_loss_is_not_rounded_under_autocast() -> None:
    query, key = _random(3, 6, 64).float(), F.normalize(_random(3, 6, 64, seed=1), dim=2).float()
    queue = F.normalize(_random(9, 64, seed=2), dim=1).float()
    expected = dense_info_nce(query, key, queue, corresponding(query, key), temperature=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        match = corresponding(query, key)
        assert torch.equal(dense_info_nce(query, key, queue, match, temperature=0.05), expected)


def _forward(network: Any, images: Tensor) -> Keys:
    """The network by its formulas: the dense head is the same two layers at each place."""
    features = network.backbone.extract(images)
    places = torch.stack(
        [network.dense_head(features.tokens.patches[:, s]) for s in range(9)], dim=1
    )
    return Keys(network.head(features.pooled), places, features.tokens.patches)


@pytest.mark.parametrize("weight", [0.5, 0.0, 1.0])
def test_a_step_contrasts_images_and_places_with_the_other_view(weight: float) -> None:
    """Eq. 3 with the keys of the teacher, which at first is the network."""
    task = _task(dense_weight=weight)
    first, second = (view[:8] for view in task.views)
    query, key = _forward(task.base_model, first), _forward(task.base_model, second)
    for rows in (task.loss.queue.rows, task.loss.dense_queue.rows):
        rows.copy_(F.normalize(rows, dim=1))  # in double precision
    queue, dense_queue = task.loss.queue.rows.clone(), task.loss.dense_queue.rows.clone()
    single = [_contrast(q, k, queue) for q, k in zip(query.image, key.image, strict=True)]
    dense = []
    for b in range(8):
        for s in range(9):
            cosines = [_cosine(query.features[b, s], other) for other in key.features[b]]
            match = cosines.index(max(cosines))
            dense.append(_contrast(query.cells[b, s], key.cells[b, match], dense_queue))
    expected = (1 - weight) * sum(single) / 8 + weight * sum(dense) / 72
    assert task.run(1).losses == pytest.approx([expected], rel=1e-10)


def test_queues_hold_keys_of_images_and_mean_keys_of_places() -> None:
    task = _task()
    key = _forward(task.base_model, task.views[1][:8])
    task.run(1)
    expected = F.normalize(key.image, dim=1), F.normalize(key.cells.mean(dim=1), dim=1)
    for queue, rows in zip((task.loss.queue, task.loss.dense_queue), expected, strict=True):
        assert torch.allclose(queue.rows[:8], rows, rtol=0, atol=1e-12)
    assert not task.loss.pending


def test_chance_is_the_loss_of_equal_similarities() -> None:
    same = F.normalize(_random(1, 1, 5), dim=2)
    loss = dense_info_nce(
        _random(2, 4, 5, seed=1),
        same.expand(2, 4, 5),
        same[0].expand(20, 5),
        torch.zeros(2, 4, dtype=torch.long),
        temperature=TAU,
    )
    assert DenseCL(DenseCL.Config(**SMALL)).chance_loss == pytest.approx(loss.item())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.queue_size=60", "queue_size: 60 is less than the 64 keys of one step"),
        ("method.temperature=0", "must be above 0"),
        ("method.dense_weight=2", "must be at most 1"),
    ],
)
def test_impossible_configs_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("densecl", ["train.batch_size=64", override])
