"""SEED and CompRess against the figures of their authors' code over two steps, and as loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from figures import draw
from minitask import MiniTask
from selftask.config.schema import FrozenModule
from selftask.methods.compress import CompRess, compress_loss
from selftask.methods.seed import SEED, seed_loss
from selftask.models.feature_queue import FeatureQueue
from selftask.models.network import Network
from selftask.models.weights.trained import TrainedNetwork

# jacobswan1/SEED for seeds 0 and 500, two steps each: loss, gradient of the student, sum of the
# queue afterwards
SEED_STEPS = [
    [
        (3.8521935218067935, 0.5067380965907716, -3.155584896942506),
        (4.590095135684226, 0.5822606625327219, -0.537902366155502),
    ],
    [
        (4.351166599787715, 0.5028041339718748, -3.5598758612683907),
        (4.682670057682596, 0.5510677553757489, -5.515753720885254),
    ],
]
# UMBCvision/CompRess likewise: loss and gradient with the teacher's queue, and with two queues
COMPRESS_STEPS = [
    [
        (12.603243813190115, 2.3881744940365577, 14.574101485938487, 2.8046771245308526),
        (16.0132056248587, 3.031528277297781, 11.049242155898444, 2.6857305352295113),
    ],
    [
        (11.99437073289703, 2.6445722653044594, 10.122622069261036, 2.668754994794995),
        (15.15452735494413, 3.3005158600801963, 10.256797962227697, 2.8545437984462274),
    ],
]


def _queue(seed: int) -> FeatureQueue:
    queue = FeatureQueue(24, 12).double()
    queue.rows.copy_(F.normalize(draw(seed, 24, 12), dim=1))
    return queue


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_of_seed_are_those_of_the_authors_code(case: int) -> None:
    seed, temperatures = 500 * case, {"temperature": 0.2, "teacher_temperature": 0.01}
    queue = _queue(seed + 90)
    for step, figures in enumerate(SEED_STEPS[case]):
        start = seed + 100 * step
        student = draw(start, 8, 12).requires_grad_()
        teacher = F.normalize(draw(start + 1, 8, 12), dim=1)
        loss = seed_loss(student, teacher, queue.rows, **temperatures)
        (gradient,) = torch.autograd.grad(loss, student)
        queue.update(teacher)
        computed = (loss.item(), gradient.norm().item(), queue.rows.sum().item())
        assert computed == pytest.approx(figures, rel=1e-9)


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_of_compress_are_those_of_the_authors_code(case: int) -> None:
    seed = 500 * case
    of_teacher, of_student = _queue(seed + 90), _queue(seed + 91)
    for step, figures in enumerate(COMPRESS_STEPS[case]):
        start, computed = seed + 100 * step, list[float]()
        student = draw(start, 8, 12).requires_grad_()
        teacher = F.normalize(draw(start + 1, 8, 12), dim=1)
        for queue in (of_teacher, of_student):
            loss = compress_loss(student, teacher, queue.rows, of_teacher.rows, temperature=0.04)
            (gradient,) = torch.autograd.grad(loss, student)
            computed += [loss.item(), gradient.norm().item()]
        of_teacher.update(teacher)
        of_student.update(F.normalize(student.detach(), dim=1))
        assert computed == pytest.approx(figures, rel=1e-9)


def _softmax(values: list[float]) -> list[float]:
    largest = max(values)
    total = sum(math.exp(value - largest) for value in values)
    return [math.exp(value - largest) / total for value in values]


def test_losses_are_those_of_the_papers() -> None:
    """Eq. 4 of SEED, and eq. 2 of CompRess with features of another width, as loops."""
    student, teacher = draw(1, 3, 5), F.normalize(draw(2, 3, 4), dim=1)
    queues = [F.normalize(draw(3 + n, 6, width), dim=1) for n, width in enumerate((5, 4))]
    divergence = 0.0
    for row in range(3):
        unit = student[row] / student[row].norm()
        q = _softmax([float(unit @ other) / 0.1 for other in queues[0]])
        p = _softmax([float(teacher[row] @ other) / 0.1 for other in queues[1]])
        divergence += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 3
    loss = compress_loss(student, teacher, *queues, temperature=0.1)
    assert loss.item() == pytest.approx(divergence, rel=1e-12)

    student, cross = draw(6, 3, 4), 0.0
    for row in range(3):
        unit, others = student[row] / student[row].norm(), [teacher[row], *queues[1]]
        q = _softmax([float(unit @ other) / 0.3 for other in others])
        p = _softmax([float(teacher[row] @ other) / 0.05 for other in others])
        cross -= sum(a * math.log(b) for a, b in zip(p, q, strict=True)) / 3
    loss = seed_loss(student, teacher, queues[1], temperature=0.3, teacher_temperature=0.05)
    assert loss.item() == pytest.approx(cross, rel=1e-12)


# -- over a run ------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Images -> 9 features."""

    embed_dim = 9

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.conv = nn.Conv2d(3, 9, 3)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(self.conv(images)).mean(dim=(2, 3))


class _Taught:
    """Its teacher comes from memory."""

    def open_trained(self, name: str, task: Any, *, scores: bool = False) -> TrainedNetwork:
        return TrainedNetwork(Network(Wide(), nn.Identity()), 9, 3, [])


class TaughtSEED(_Taught, SEED): ...


class TaughtCompRess(_Taught, CompRess): ...


CONFIG = {"teacher": FrozenModule(model="-"), "queue_size": 8}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (TaughtSEED, {}),
        (TaughtCompRess, {}),
        (TaughtCompRess, {"student_queue": False}),
    ],
)
def test_queues_take_the_features_of_a_step_after_it(method: Any, more: dict[str, Any]) -> None:
    task = MiniTask(method, {**CONFIG, **more}, sizes=(8,), batch_size=4)
    before = [queue.rows.clone() for queue in task.loss.queues()]
    task.run(1)
    batch = task.last_batch
    expected = [batch["targets"], F.normalize(batch.output[0].detach(), dim=1)]
    for queue, rows, old in zip(task.loss.queues(), expected, before, strict=False):
        assert torch.allclose(queue.rows[:4], rows, rtol=1e-12)
        assert torch.equal(queue.rows[4:], old[4:])
    with torch.no_grad():
        assert torch.allclose(batch["targets"], F.normalize(Wide().double()(task.views[0][:4])))


def test_chance_is_the_loss_of_equal_similarities() -> None:
    method: SEED = MiniTask(TaughtSEED, CONFIG, sizes=(8,)).loss
    teacher = F.normalize(torch.ones(4, 9).double(), dim=1)
    loss = seed_loss(
        teacher, teacher, teacher[:1].expand(8, -1), temperature=0.2, teacher_temperature=0.01
    )
    assert loss.item() == pytest.approx(method.chance_loss)
