"""MoCo v2 against its papers, lightly, what peers got wrong, and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor

from minitask import MiniTask, TinyBackbone, largest_difference, make_views
from ranks import run_ranks
from selftask.config.config_class import config_class
from selftask.config.load import load_config
from selftask.distributed.collectives import world_size
from selftask.distributed.simulated import SIMULATED
from selftask.errors import ConfigError
from selftask.methods.moco import MoCo
from selftask.models.dropout import draw_per_sample
from selftask.models.losses.contrast import info_nce, shuffle_bn, unshuffle_bn
from selftask.random.keyed import LAYER_DRAWS
from selftask.registry import METHODS

SMALL: dict[str, Any] = {"out_dim": 5, "queue_size": 20, "momentum": 0.9}


def _unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def _keys(task: MiniTask, view: int, rows: slice) -> Tensor:
    """What the teacher, as it is now, makes of some images."""
    return F.normalize(task.loss.teacher([task.views[view][rows]]), dim=2)[0]


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 1, as loops."""
    tau = 0.2
    query, key, queue = 3 * _unit(2, 4, 5), _unit(2, 4, 5), _unit(2, 20, 5)
    terms = []
    for v in range(2):
        for i in range(4):
            q = query[v, i] / query[v, i].norm()
            positive = math.exp(float(q @ key[v, i]) / tau)
            negatives = sum(math.exp(float(q @ old) / tau) for old in queue[v])
            terms.append(-math.log(positive / (positive + negatives)))
    loss = info_nce(query, key, queue, temperature=tau)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_loss_is_that_of_lightly() -> None:
    lightly = pytest.importorskip("lightly.loss")
    query, key, queue = 3 * _unit(1, 4, 5).float(), _unit(1, 4, 5).float(), _unit(1, 16, 5).float()
    theirs = lightly.NTXentLoss(temperature=0.2, memory_bank_size=(16, 5))
    theirs.memory_bank.bank = queue[0]
    ours = info_nce(query, key, queue, temperature=0.2)
    assert ours.item() == pytest.approx(theirs(query[0], key[0]).item(), rel=1e-5)


def test_chance_is_the_loss_of_equal_similarities() -> None:
    same = _unit(1, 1, 5)
    loss = info_nce(_unit(1, 4, 5), same.expand(1, 4, 5), same.expand(1, 20, 5), temperature=0.2)
    assert MoCo(MoCo.Config(**SMALL)).chance_loss == pytest.approx(loss.item())


def test_the_loss_is_not_rounded_under_autocast() -> None:
    query, key, queue = _unit(1, 8, 64).float(), _unit(1, 8, 64).float(), _unit(1, 99, 64).float()
    expected = info_nce(query, key, queue, temperature=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(info_nce(query, key, queue, temperature=0.05), expected)


def test_a_positive_is_never_among_its_negatives() -> None:
    """Perfect alignment and tau -> 0: the loss goes to 0, in a peer only to log 2."""
    task = MiniTask("moco", {**SMALL, "temperature": 1e-4})
    task.views[1] = task.views[0]  # and at first the teacher is the network
    assert task.run(1).losses == pytest.approx([0.0], abs=1e-9)


@pytest.mark.parametrize("symmetric", [False, True])
def test_query_and_key_are_the_two_views(symmetric: bool) -> None:
    task = MiniTask("moco", {**SMALL, "symmetric": symmetric})
    queue = task.loss.queue.rows.transpose(0, 1).clone()
    terms = []
    for v, (query, key) in enumerate([(0, 1), (1, 0)][: len(queue)]):
        queries = task.base_model([task.views[query][:8]])
        keys = _keys(task, key, slice(8))[None]
        terms.append(info_nce(queries, keys, queue[v : v + 1], temperature=0.2))
    assert len(terms) == 1 + symmetric
    assert task.run(1).losses == pytest.approx([torch.stack(terms).mean().item()])
    for v, keys in enumerate(task.last_batch["keys"]):  # each query has its own queue
        assert torch.equal(task.loss.queue.rows[:8, v], keys)


def test_queue_is_first_in_first_out_and_wraps() -> None:
    """20 slots and 8 keys an update: a list says what each slot must hold."""
    task = MiniTask("moco", SMALL)
    slots, oldest = list(task.loss.queue.rows[:, 0].clone()), 0
    for update in range(4):
        first = 8 * (update % 3)
        for key in _keys(task, 1, slice(first, first + 8)):
            slots[oldest] = key
            oldest = (oldest + 1) % 20
        task.run(1)
        assert torch.allclose(task.loss.queue.rows[:, 0], torch.stack(slots), rtol=0, atol=1e-12)
        assert task.loss.queue.oldest.item() == oldest


def test_no_batch_of_an_accumulated_update_is_lost() -> None:
    task = MiniTask("moco", SMALL, accumulate=2)
    keys = _keys(task, 1, slice(16))
    task.run(1)
    assert torch.allclose(task.loss.queue.rows[:16, 0], keys, rtol=0, atol=1e-12)
    assert task.loss.queue.oldest.item() == 16
    assert not task.loss.pending


@pytest.mark.parametrize("momentum", [0.9, {"name": "cosine", "start": 0.5, "end": 1.0}])
def test_teacher_follows_the_updated_network(momentum: Any) -> None:
    """Eq. 2, after each of 9 steps, with m at its beginning; no gradient reaches the teacher."""
    task = MiniTask("moco", {**SMALL, "momentum": momentum})
    for step in range(3):
        before = [p.clone() for p in task.loss.teacher.parameters()]
        task.run(1)
        m = 0.9 if momentum == 0.9 else 1 - 0.25 * (math.cos(math.pi * step / 9) + 1)
        students = list(task.base_model.parameters())
        for old, new, student in zip(before, task.loss.teacher.parameters(), students, strict=True):
            assert not torch.equal(old, student)
            assert torch.allclose(new, m * old + (1 - m) * student, rtol=0, atol=1e-12)
            assert not new.requires_grad


def test_momentum_is_constant_or_rises_along_a_cosine() -> None:
    cosine = {"name": "cosine", "start": 0.99, "end": 0.999}
    rising = MiniTask("moco", {**SMALL, "momentum": cosine}).loss.momentum_at
    assert [rising(where) for where in (0.0, 0.5)] == pytest.approx([0.99, 0.9945])
    assert rising(1.0 - 1e-9) == pytest.approx(0.999)
    constant = MiniTask("moco", {**SMALL, "momentum": 0.99}).loss.momentum_at
    assert constant(0.7) == pytest.approx(0.99)


def test_keys_are_of_images_of_all_ranks() -> None:
    """And each rank's teacher sees images of all ranks: its BatchNorm cannot give the key away."""
    alone = _four_updates(0)
    ranks = run_ranks(_four_updates, 2)
    for one in ranks:
        assert largest_difference(one["state"], alone["state"]) < 1e-9
    assert [one["shuffled"] for one in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [one["own"] for one in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one["shuffled odd"] for one in ranks] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert [one["odd"] for one in ranks] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    dropped = torch.cat([one["with drop path"] for one in ranks])
    torch.testing.assert_close(dropped, alone["with drop path"], rtol=0, atol=1e-9)
    assert [one["has embedding"] for one in (alone, *ranks)] == [True, False, False]
    views = make_views((8, 8))  # the teacher gets the key of each query: of view 0 it is view 1
    for number, one in enumerate(ranks):
        for seen, view in zip(one["seen"], reversed(views), strict=True):
            assert torch.equal(seen, view[:8][number::2])


class WithDropPath(TinyBackbone):
    def __init__(self) -> None:
        super().__init__()
        self.drop = DropPath(0.5)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.drop(super().forward(images))
        return features


def _keys_with_drop_path(rank: int) -> Tensor:
    """Keys of eight images; the draws of an image are the same on any rank."""
    task = MiniTask("moco", SMALL, backbone=WithDropPath)
    draw_per_sample([task.loss.teacher.network], seed=0)
    batch = task.batch(torch.arange(8).chunk(world_size())[rank])
    LAYER_DRAWS.start(batch.key, torch.device("cpu"))
    keys = task.loss.unit_keys(batch.all_views[:1])[0]
    LAYER_DRAWS.reset(0)
    return keys


def _four_updates(rank: int) -> dict[str, Any]:
    """A task after four updates; eight numbers shuffled for the teachers, and back."""
    seen: list[Any] = []
    task = MiniTask("moco", {**SMALL, "symmetric": True})
    task.loss.teacher.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    task.run(4)
    mine = shuffle_bn(torch.arange(8).chunk(world_size())[rank])
    own = unshuffle_bn(mine)
    embedding = task.loss.teacher.network.embedding
    numbers: dict[str, Any] = {"has embedding": embedding is not None}
    numbers["with drop path"] = _keys_with_drop_path(rank)
    numbers |= {"shuffled": mine.tolist(), "own": own.tolist()}
    odd = shuffle_bn(torch.arange(5 * world_size()).chunk(world_size())[rank])
    numbers |= {"shuffled odd": odd.tolist(), "odd": unshuffle_bn(odd).tolist()}
    return {"state": task.state(), "seen": seen[0], **numbers}


def test_a_rank_sends_its_images_once() -> None:
    """Gathering would send them to each of the other ranks."""
    images = torch.zeros(64, 3, 4, 4)
    with SIMULATED.of(1024):
        unshuffle_bn(shuffle_bn(images))
        assert SIMULATED.bytes_of.total() <= 2 * images.nbytes


def test_impossible_configs_are_told() -> None:
    config = {"train": {"batch_size": 256, "accumulate": 2}}
    schema: Any = config_class(METHODS, "moco")
    (wrong,) = schema(queue_size=500).problems(config)
    assert wrong.startswith("queue_size: 500 is less than the 512 keys of one step")
    with pytest.raises(ConfigError, match="temperature=0: must be above 0"):
        load_config("moco", ["method.temperature=0"])
    assert not list(schema(queue_size=512).problems(config))
