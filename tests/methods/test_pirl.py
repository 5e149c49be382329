"""PIRL against its formula as loops; its memory, negatives and order of tiles."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.pirl import PIRL, TilesNetwork
from selftask.models.losses.noise_contrast import info_nce, nce
from selftask.models.memory_bank import MemoryBank


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def slow_info_nce(feature: Any, positive: Any, negatives: Any, temperature: float) -> float:
    length = math.sqrt(sum(x * x for x in feature))

    def similar(other: Any) -> float:
        cosine = sum(x * y for x, y in zip(feature, other, strict=True)) / length
        return math.exp(cosine / temperature)

    right = similar(positive)
    return -math.log(right / (right + sum(map(similar, negatives))))


def known_batch(index: list[int], negatives: list[list[int]], **added: torch.Tensor) -> Any:
    class Known:
        def __init__(self) -> None:
            self.index = torch.tensor(index)

        def __getitem__(self, name: str) -> torch.Tensor:
            return {"negatives": torch.tensor(negatives), **added}[name]

    return Known()


def test_the_loss_is_that_of_the_paper_with_info_nce() -> None:
    method = PIRL(PIRL.Config(out_dim=4, temperature=0.2, tiles_weight=0.3))
    method.memory = MemoryBank(7, 4).double()
    rows = method.memory.rows.tolist()
    index, negatives = [2, 5, 0], [[1, 3], [6, 6], [4, 2]]
    output = 3 * draw(0, 2, 3, 4)
    terms = method(output, known_batch(index, negatives))
    for name, features, weight in (("image", output[0], 0.7), ("tiles", output[1], 0.3)):
        losses = [
            slow_info_nce(feature, rows[own], [rows[n] for n in others], 0.2)
            for feature, own, others in zip(features.tolist(), index, negatives, strict=True)
        ]
        assert terms[name].item() == pytest.approx(weight * sum(losses) / 3, rel=1e-12)


def test_the_loss_is_that_of_the_paper_with_nce() -> None:
    """h = p / (p + K / N), with p = exp(cosine / tau) / Z."""
    method = PIRL(PIRL.Config(out_dim=4, temperature=0.2, tiles_weight=0.3, loss="nce"))
    method.memory = MemoryBank(7, 4).double()
    rows, z, noise = method.memory.rows.tolist(), 13.0, 2 / 7
    index, negatives = [2, 5, 0], [[1, 3], [6, 6], [4, 2]]
    output = 3 * draw(0, 2, 3, 4)
    batch = known_batch(index, negatives, normalizer=torch.tensor(z, dtype=torch.float64))
    terms = method(output, batch)

    def h(feature: Any, entry: Any) -> float:
        length = math.sqrt(sum(x * x for x in feature))
        cosine = sum(x * y for x, y in zip(feature, entry, strict=True)) / length
        p = math.exp(cosine / 0.2) / z
        return p / (p + noise)

    for name, features, weight in (("image", output[0], 0.7), ("tiles", output[1], 0.3)):
        losses = [
            -math.log(h(feature, rows[own]))
            - sum(math.log(1 - h(feature, rows[n])) for n in others)
            for feature, own, others in zip(features.tolist(), index, negatives, strict=True)
        ]
        assert terms[name].item() == pytest.approx(weight * sum(losses) / 3, rel=1e-12)


def test_chance_is_the_loss_of_equal_entries() -> None:
    method = PIRL(PIRL.Config(out_dim=4, num_negatives=6))
    same = torch.ones(3, 7, 4) / 2
    loss = info_nce(draw(0, 3, 4).float(), same[:, 0], same[:, 1:], 0.07)
    assert loss.item() == pytest.approx(method.chance_loss)
    method = PIRL(PIRL.Config(out_dim=4, num_negatives=6, loss="nce"))
    feature, zero = draw(1, 3, 4), torch.zeros(3, 7, 4, dtype=torch.float64)
    loss = nce(feature, zero[:, 0], zero[:, 1:], 0.07, torch.tensor(20.0), num_images=20)
    assert loss.item() == pytest.approx(method.chance_loss)


def test_the_order_of_tiles_reaches_the_second_layer_alone() -> None:
    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5)).double()
    network = TilesNetwork(backbone, 5, 3, 4).double()
    image, *tiles = (draw(n, 2, 3, 2, 2) for n in range(4))
    order = torch.tensor([[2, 0, 1], [0, 1, 2]])
    output = network(([image, *tiles], order))
    head: Any = network.head
    assert torch.allclose(output[0], head["image"](backbone(image)))
    for n in range(2):
        parts = [head["tile"](backbone(tiles[t][n : n + 1])) for t in order[n].tolist()]
        assert torch.allclose(output[1, n], head["tiles"](torch.cat(parts, dim=1))[0])


def started(tmp_path: Path, *overrides: str, out: str = "run") -> Any:
    task = tiny.task("pirl", tmp_path, out, "eval.evaluations={}", *overrides)
    task.prepare()
    task.on_start()
    task.on_phase_start()
    return task


def test_draws_are_of_the_sample_and_leave_the_image_itself_out(tmp_path: Path) -> None:
    task = started(tmp_path, "method.num_negatives=500")
    batch = next(task.batches)
    negatives = batch["negatives"]
    assert negatives.shape == (tiny.BATCH_SIZE, 500)
    num_images = task.data_module.num_images
    for own, others in zip(batch.index.tolist(), negatives.tolist(), strict=True):
        assert own not in others
        assert {*others} <= {*range(num_images)}
        assert len({*others}) > 0.9 * num_images
    views, order = batch.input
    assert all(map(torch.equal, views, batch.views["image"] + batch.views["tiles"]))
    assert order.sort(dim=1).values.tolist() == [[*range(order.shape[1])]] * tiny.BATCH_SIZE
    assert len({tuple(row) for row in order.tolist()}) > 5
    first = negatives[:, : order.shape[1]].argsort(dim=1)
    assert (first == order).all(dim=1).sum() < tiny.BATCH_SIZE / 4, "they have draws of their own"
    again = started(tmp_path, "method.num_negatives=500", "train.batch_size=8", out="again")
    for batch_again in (next(again.batches), next(again.batches)):
        for key, others in zip(batch_again.key.tolist(), batch_again["negatives"], strict=True):
            place = batch.key.tolist().index(key)
            assert torch.equal(others, negatives[place])
    task.close()
    again.close()


def test_aligned_features_cost_nothing(tmp_path: Path) -> None:
    """If an image's own entry were among its negatives, the loss would stay above log 2."""
    task = started(tmp_path, "method.num_negatives=500", "method.temperature=0.001")
    batch = next(task.batches)
    own = task.loss.memory[batch.index]
    terms = task.loss(torch.stack([own, own]), batch)
    assert sum(terms.values()).item() < 1e-3
    task.close()


def test_nce_estimates_its_constant_in_the_first_step(tmp_path: Path) -> None:
    task = started(tmp_path, "method.loss=nce")
    memory = task.loss.memory.rows.clone()
    task.step()
    batch, num_images = task.last_batch, task.data_module.num_images
    unit = torch.nn.functional.normalize(batch.output[0].detach(), dim=1)
    sums = (torch.einsum("bd,bkd->bk", unit, memory[batch["negatives"]]) / 0.07).exp()
    first = task.loss.normalizer.value.item()
    assert first == pytest.approx(num_images * sums.mean().item(), rel=1e-5)
    task.step()
    assert task.loss.normalizer.value.item() == first
    task.close()


def test_the_memory_follows_the_image_half_way(tmp_path: Path) -> None:
    task = started(tmp_path)
    before = copy.deepcopy(task.loss.memory.rows)
    task.step()
    batch, rows = task.last_batch, task.loss.memory.rows
    unit = torch.nn.functional.normalize(batch.output[0].detach().float(), dim=1)
    mean = (before[batch.index] + unit) / 2
    expected = torch.nn.functional.normalize(mean, dim=1)
    assert torch.allclose(rows[batch.index], expected, atol=1e-6)
    others = [n for n in range(len(rows)) if n not in batch.index.tolist()]
    assert torch.equal(rows[others], before[others])
    task.close()


def test_groups_are_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match="pirl needs 2 views or more in group 'tiles', got 1"):
        load_config("pirl", ["views.tiles.count=1"])
    with pytest.raises(ConfigError, match="pirl has no use for group 'pieces'"):
        load_config("pirl", ["+views.pieces.of=crop", "+views.pieces.transforms=[normalize]"])
