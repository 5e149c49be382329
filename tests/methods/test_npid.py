"""NPID against its authors' figures, the equations of its paper as loops, and on two ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minitask import NUM_IMAGES, MiniTask, largest_difference
from ranks import run_ranks
from selftask.batch import Batch, total
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.npid import NPID, full_softmax
from selftask.models.losses.noise_contrast import (
    Normalizer,
    estimate_normalizer,
    nce,
    other_images,
)
from selftask.models.memory_bank import MemoryBank

NONE = torch.empty(0, dtype=torch.int64)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(seed: int, *shape: int) -> Tensor:
    return F.normalize(draw(seed, *shape), dim=-1)


def exponential(feature: Sequence[float], entry: Sequence[float], tau: float) -> float:
    """exp(v.f / tau) of a feature of any length."""
    length = math.sqrt(sum(x * x for x in feature))
    return math.exp(sum(x * y for x, y in zip(feature, entry, strict=True)) / length / tau)


def method_of(num_images: int, **config: Any) -> NPID:
    method = NPID(NPID.Config(out_dim=4, **config))
    method.memory, method.num_images = MemoryBank(num_images, 4).double(), num_images
    return method.double()


def batch_of(index: list[int], **added: Any) -> Batch:
    return Batch(views={}, labels=NONE, index=torch.tensor(index), key=NONE, added=added)


# -- the loss --------------------------------------------------------------------------------------


def test_nce_is_equation_7() -> None:
    """h(i, v) = P / (P + m Pn) with P = exp(v.f / tau) / Z and Pn = 1 / n; Z as in the batch."""
    method = method_of(7, temperature=0.3, num_negatives=2)
    rows = method.memory.rows.tolist()
    index, negatives, z = [2, 5, 0], [[1, 3], [6, 6], [4, 2]], 11.0
    output = 3 * draw(0, 1, 3, 4)
    added = {
        "negatives": torch.tensor(negatives),
        "normalizer": torch.tensor(z, dtype=torch.float64),
    }
    terms = method(output, batch_of(index, **added))
    losses = []
    for feature, own, others in zip(output[0].tolist(), index, negatives, strict=True):
        noise = 2 / 7  # m Pn
        p = exponential(feature, rows[own], 0.3) / z
        loss = -math.log(p / (p + noise))
        for other in others:
            p = exponential(feature, rows[other], 0.3) / z
            loss -= math.log(1 - p / (p + noise))
        losses.append(loss)
    assert terms.keys() == {"nce"}
    assert terms["nce"].item() == pytest.approx(sum(losses) / 3, rel=1e-12)


# zhirongw/lemniscate.pytorch: loss, gradient, Z and sum of the memory, in two steps of NCE
AUTHORS = [
    (5.422310049029594, 2.0555180611510036, 1653.2514641233997, 2.318172871876261),
    (7.054006445411179, 2.320374658486715, 1653.2514641233997, 3.425059513716638),
]
EXACT = (5.968187774053178, 2.1299027793203624, 2.318172871876261)  # loss, gradient, sum of memory


def authors_memory() -> MemoryBank:
    memory = MemoryBank(30, 12).double()
    memory.rows.copy_(unit(90, 30, 12))
    return memory


def test_two_steps_of_nce_are_those_of_the_authors_code() -> None:
    """They add 1e-7 to denominators, and estimate Z from the positives, too."""
    memory, normalizer = authors_memory(), Normalizer().double()
    index = torch.arange(6) * 3
    for step, expected in enumerate(AUTHORS):
        features = draw(100 * step, 6, 12).requires_grad_()
        drawn = ((torch.arange(6 * 9) * 7 + step) % 30).view(6, 9)
        drawn[:, 0] = index
        z = normalizer.of(features, memory, drawn, 0.07)
        normalizer.keep(z)
        positive, negatives = memory[index], memory[drawn[:, 1:]]
        loss = nce(features, positive, negatives, 0.07, z, num_images=30)
        (gradient,) = torch.autograd.grad(loss, features)
        memory.update(index, features, momentum=0.5)
        values = [value.item() for value in (loss, gradient.norm(), z, memory.rows.sum())]
        assert values == pytest.approx(expected, rel=1e-6)


def test_the_exact_softmax_is_that_of_the_authors_code() -> None:
    memory, index = authors_memory(), torch.arange(6) * 3
    features = draw(0, 6, 12).requires_grad_()
    loss = full_softmax(features, memory.rows, index, 0.07)
    (gradient,) = torch.autograd.grad(loss, features)
    memory.update(index, features, momentum=0.5)
    values = [value.item() for value in (loss, gradient.norm(), memory.rows.sum())]
    assert values == pytest.approx(EXACT, rel=1e-6)


def test_gradient_of_nce_is_that_of_the_written_out_form() -> None:
    features, own, others, z = (
        draw(0, 5, 4),
        unit(1, 5, 4),
        unit(2, 5, 6, 4),
        torch.tensor(9.0, dtype=torch.float64),
    )
    features.requires_grad_()
    loss = nce(features, own, others, 0.2, normalizer=z, num_images=50)
    (ours,) = torch.autograd.grad(loss, features)
    direction = features / features.norm(dim=1, keepdim=True)
    right = ((direction * own).sum(dim=1) / 0.2).exp() / z
    wrong = ((direction[:, None] * others).sum(dim=2) / 0.2).exp() / z
    noise = 6 / 50
    h, h_of_noise = right / (right + noise), wrong / (wrong + noise)
    slow = -(h.log() + (1 - h_of_noise).log().sum(dim=1)).mean()
    (expected,) = torch.autograd.grad(slow, features)
    assert loss.item() == pytest.approx(slow.item(), rel=1e-12)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12)


def test_nce_stays_finite_where_its_fractions_do_not() -> None:
    """At tau = 0.005 exponentials exceed float32."""
    own = F.normalize(torch.ones(2, 4), dim=1)
    loss = nce(own, own, own[:, None], 0.005, normalizer=torch.tensor(1.0), num_images=10)
    assert loss.item() == pytest.approx(200 - math.log(1 / 10), rel=1e-5)


def test_the_exact_softmax_is_equation_2() -> None:
    method = method_of(7, temperature=0.3, loss="softmax")
    rows, index, output = method.memory.rows.tolist(), [2, 5, 0], 3 * draw(0, 1, 3, 4)
    losses = []
    for feature, own in zip(output[0].tolist(), index, strict=True):
        every = [exponential(feature, row, 0.3) for row in rows]
        losses.append(-math.log(every[own] / sum(every)))
    terms = method(output, batch_of(index))
    assert terms["softmax"].item() == pytest.approx(sum(losses) / 3, rel=1e-12)


def test_the_proximal_term_is_that_of_equation_10() -> None:
    method = method_of(7, loss="softmax", proximal_weight=30.0)
    rows, output = method.memory.rows.tolist(), draw(0, 1, 2, 4)
    far = []
    for feature, own in zip(output[0].tolist(), (2, 5), strict=True):
        length = math.sqrt(sum(x * x for x in feature))
        far.append(sum((x / length - y) ** 2 for x, y in zip(feature, rows[own], strict=True)))
    terms = method(output, batch_of([2, 5]))
    assert terms["proximal"].item() == pytest.approx(30 * sum(far) / 2, rel=1e-12)


@pytest.mark.parametrize("loss", ["nce", "info_nce", "softmax"])
def test_chance_is_the_loss_of_orthogonal_entries(loss: Any) -> None:
    method = method_of(9, loss=loss, num_negatives=5, proximal_weight=2.0)
    method.memory.rows.zero_()[:, 0] = 1.0
    output = torch.tensor([[[0.0, 3.0, 0.0, 0.0]]], dtype=torch.float64)
    added = {
        "negatives": torch.arange(1, 6)[None],
        "normalizer": torch.tensor(9.0, dtype=torch.float64),
    }  # n exp(0)
    value = total(method(output, batch_of([0], **added))).item()
    assert value == pytest.approx(method.chance_loss, rel=1e-9)


# -- negatives, Z, memory --------------------------------------------------------------------------


def test_every_other_image_is_drawn_alike_and_the_image_itself_never() -> None:
    draws = (torch.arange(900) + 0.5) / 900
    for own in (0, 4, 9):
        drawn = other_images(draws[None], torch.tensor([own]), 10)[0]
        counts = drawn.bincount(minlength=10).tolist()
        assert counts == [0 if image == own else 100 for image in range(10)]
    extreme = other_images(torch.tensor([[0.0, 1 - 2.0**-24]]), torch.tensor([9]), 10)
    assert extreme.tolist() == [[0, 8]]


def test_the_estimate_of_z_is_equation_8() -> None:
    features, others = 2 * draw(0, 3, 4), unit(1, 3, 5, 4)
    z = estimate_normalizer(features, others, 0.2, 40)
    sums = [
        40 / 5 * sum(exponential(feature, row, 0.2) for row in rows)
        for feature, rows in zip(features.tolist(), others.tolist(), strict=True)
    ]
    assert z.item() == pytest.approx(sum(sums) / 3, rel=1e-12)


def _task(**config: Any) -> MiniTask:
    return MiniTask("npid", {"out_dim": 4, "num_negatives": 7, **config}, sizes=(8,))


def test_z_is_that_of_the_first_step_ever_after() -> None:
    task = _task()
    batch = task.forward(torch.arange(8))
    memory, negatives = task.loss.memory.rows.clone(), batch["negatives"]
    expected = [
        NUM_IMAGES * exponential(feature, memory[other].tolist(), 0.07)
        for feature, others in zip(batch.output[0].tolist(), negatives, strict=True)
        for other in others
    ]
    assert task.loss.normalizer.value.item() == 0.0  # nothing moves before the step
    task.loss.pending.clear()
    task.run(1)
    first = task.loss.normalizer.value.item()
    assert first == pytest.approx(sum(expected) / len(expected), rel=1e-9)
    resumed = _task().resume(copy.deepcopy(task.state()))
    for one in (task, resumed):
        one.run(2)
        assert one.loss.normalizer.value.item() == first
        assert one.last_batch["normalizer"].item() == first


def test_a_step_of_several_batches_keeps_the_estimate_of_its_last() -> None:
    config = {"out_dim": 4, "num_negatives": 7}
    task = MiniTask("npid", config, sizes=(8,), batch_size=4, accumulate=2)
    estimate = task.forward(torch.arange(4, 8))["normalizer"].item()
    task.loss.pending.clear()
    task.run(2)
    assert task.loss.normalizer.value.item() == pytest.approx(estimate, rel=1e-9)


def test_a_test_phase_estimates_z_and_keeps_nothing() -> None:
    task = _task()
    task.train = False
    batch = task.forward(torch.arange(8))
    assert batch["normalizer"] > 0
    assert task.loss.pending == []
    assert task.loss.normalizer.value.item() == 0.0


def test_the_memory_follows_the_image_by_its_momentum() -> None:
    task = _task(momentum=0.3)
    before = task.loss.memory.rows.clone()
    task.run(1)
    index = task.last_batch.index
    features = F.normalize(task.last_batch.output[0].detach(), dim=1)
    expected = F.normalize(0.3 * before[index] + 0.7 * features, dim=1)
    assert torch.allclose(task.loss.memory.rows[index], expected, rtol=0, atol=1e-12)
    others = [image for image in range(NUM_IMAGES) if image not in index.tolist()]
    assert torch.equal(task.loss.memory.rows[others], before[others])


def test_the_proximal_term_on_two_ranks() -> None:
    """Z is the mean over ranks, and negatives are drawn for each image."""
    alone = _four_updates(0)
    for one in run_ranks(_four_updates, 2):
        assert largest_difference(one, alone) < 1e-9


def _four_updates(rank: int) -> dict[str, Any]:
    return _task(proximal_weight=1.0).run(4).state()


def test_the_head_is_linear_or_an_mlp() -> None:
    assert isinstance(_task().base_model.head, torch.nn.Linear)
    widths = [layer.out_features for layer in _task(hidden_dim=5).base_model.head[::2]]
    assert widths == [5, 4]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.loss=ce", "did you mean .nce."),
        ("method.num_negatives=0", "must be at least 1"),
        ("method.temperature=0", "must be above 0"),
        ("views.main.count=2", "npid needs 1 view"),
    ],
)
def test_impossible_configs_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("npid", [override])
