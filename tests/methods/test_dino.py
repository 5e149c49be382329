"""DINO against its paper, lightly and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from minitask import MiniTask, TinyTokens, largest_difference, loss_of
from selftask.methods.dino import DINO
from selftask.models.clustering import swapped_cross_entropy
from selftask.registry import OPTIMIZERS

SMALL: dict[str, Any] = {
    "out_dim": 10,
    "hidden_dim": 7,
    "bottleneck": 5,
    "teacher_temperature": {
        "name": "constant",
        "start": 0.07,
        "warmup": "2 epochs",
        "warmup_start": 0.04,
    },
}


def _method(out_dim: int = 6, **config: Any) -> DINO:
    return DINO(DINO.Config(out_dim=out_dim, **config)).double()


def _random(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draws)


def _paper_loss(teacher: Tensor, student: Tensor, center: Tensor, tt: float, ts: float) -> float:
    """Algorithm 1 and eq. 3, as loops: teacher (2, B, K), student (V, B, K)."""

    def softmax(row: list[float]) -> list[float]:
        total = sum(math.exp(x) for x in row)
        return [math.exp(x) / total for x in row]

    terms = []
    for t in range(len(teacher)):
        for v in range(len(student)):
            if v == t:
                continue
            for b in range(teacher.shape[1]):
                p_t = softmax(((teacher[t, b] - center) / tt).tolist())
                p_s = softmax((student[v, b] / ts).tolist())
                terms.append(-sum(a * math.log(c) for a, c in zip(p_t, p_s, strict=True)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("num_views", [2, 5])
def test_loss_is_that_of_the_paper(num_views: int) -> None:
    teacher, student = _random(2, 3, 6), _random(num_views, 3, 6, seed=1)
    method = _method(temperature=0.3)
    method.center.copy_(_random(6, seed=2))
    probs = F.softmax((teacher - method.center) / 0.2, dim=2)
    expected = _paper_loss(teacher, student, method.center, 0.2, 0.3)
    assert loss_of(method, student, probs=probs).item() == pytest.approx(expected, rel=1e-12)
    terms = {name: float(value) for name, value in method(student, {"probs": probs}).items()}
    assert terms["target_entropy"] + terms["kl"] == pytest.approx(expected)
    assert terms["kl"] > 0


def test_loss_and_center_are_those_of_lightly() -> None:
    lightly = pytest.importorskip("lightly.loss")
    task = MiniTask("dino", {**SMALL, "teacher_temperature": 0.07}, sizes=(8, 8, 5, 5), lr=0.0)
    theirs = lightly.DINOLoss(output_dim=10, teacher_temp=0.07, student_temp=0.1).double()
    for step in range(3):
        batch = task.batch(torch.arange(8 * step, 8 * step + 8))
        with torch.no_grad():  # the student stands still, and so does the teacher
            output = task.base_model(batch.input)
        expected = theirs(list(output[:2]), list(output), teacher_temp=0.07)
        task.run(1)
        assert task.losses[step] == pytest.approx(float(expected), rel=1e-6)  # their tau is float32
        assert torch.allclose(task.loss.center, theirs.center.flatten(), atol=1e-12)


def test_the_teacher_sees_the_first_two_views_only() -> None:
    task = MiniTask("dino", SMALL, sizes=(8, 8, 5, 5, 5))
    seen: list[Any] = []
    task.loss.teacher.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    task.run(1)
    assert [view.shape[-1] for view in seen[0]] == [8, 8]
    assert all(p.grad is None for p in task.loss.teacher.parameters())


def test_no_view_is_compared_with_itself() -> None:
    probs = torch.eye(4, dtype=torch.float64)[None].repeat(2, 1, 1)  # (2, 4, 4)
    logs = torch.zeros(3, 4, 4, dtype=torch.float64)
    logs[0] = logs[1] = -1e6  # what a pair with itself would cost is seen in the other one
    logs[2] = -1.0
    only_second_to_third = swapped_cross_entropy(probs[:1], logs[[1, 2]])
    assert only_second_to_third == pytest.approx(1.0)


def test_perfect_agreement_costs_nothing_and_ignorance_costs_chance() -> None:
    method = _method(out_dim=4, temperature=1e-3)
    same = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    probs = F.softmax(same / 1e-3, dim=2)
    assert loss_of(method, same, probs=probs).item() == pytest.approx(0.0, abs=1e-9)
    assert loss_of(method, 0 * same, probs=probs).item() == pytest.approx(method.chance_loss)
    assert method.chance_loss == pytest.approx(math.log(4))


def test_the_center_takes_away_what_all_images_share() -> None:
    """A teacher that always says the same ends up saying nothing: the collapse of section 3.1."""
    task = MiniTask("dino", {**SMALL, "center_momentum": 0.5}, epochs=20, lr=0.0)
    task.loss.momentum_at = lambda where: 1.0  # it does not follow
    head = task.loss.teacher.network.head
    head.last_layer.weight.copy_(_random(10, 5))
    head.mlp[-1].weight.zero_()
    head.mlp[-1].bias.copy_(_random(5))  # the bottleneck, whatever the image
    task.run(1)
    assert float(task.last_batch.terms["target_entropy"]) < 1.5
    task.run(40)
    assert float(task.last_batch.terms["target_entropy"]) == pytest.approx(math.log(10), abs=1e-6)


@pytest.mark.parametrize("start", [0.9, None])
def test_temperature_and_momentum_move_as_configured(start: float | None) -> None:
    """By default the momentum starts at 0.996."""
    momentum = {"momentum": {"name": "cosine", "start": start, "end": 1.0}} if start else {}
    task = MiniTask(
        "dino", {**SMALL, **momentum}, epochs=6, lr=0.01
    )  # 18 updates, 6 of them with a colder teacher
    method = task.loss
    temperatures = [method.teacher_temperature_at(update / 18) for update in (0, 3, 6, 17)]
    assert temperatures == pytest.approx([0.04, 0.055, 0.07, 0.07])
    scores: list[Tensor] = []
    method.teacher.register_forward_hook(lambda module, args, out: scores.append(out))
    for update in range(8):
        m = 1 - (1 - (start or 0.996)) * (1 + math.cos(math.pi * update / 18)) / 2
        before, center = [p.clone() for p in method.teacher.parameters()], method.center.clone()
        task.run(1)
        temperature = 0.04 + 0.03 * min(update / 6, 1.0)
        probs = F.softmax((scores[update] - center) / temperature, dim=2)
        assert torch.allclose(task.last_batch["probs"], probs, rtol=1e-9, atol=1e-12)
        for old, student, teacher in zip(
            before, task.base_model.parameters(), method.teacher.parameters(), strict=True
        ):
            assert torch.allclose(teacher, m * old + (1 - m) * student, rtol=1e-12, atol=1e-12)


def test_the_last_layer_waits_for_an_epoch() -> None:
    task = MiniTask("dino", SMALL)
    head = task.base_model.head
    last, first = head.last_layer.weight.clone(), head.mlp[0].weight.clone()
    task.run(3)
    assert torch.equal(head.last_layer.weight, last)
    assert not torch.equal(head.mlp[0].weight, first)
    task.run(1)
    assert not torch.equal(head.last_layer.weight, last)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_optimizer_takes_up_a_layer_that_waited(name: str) -> None:
    """By itself, torch's fused SGD fails where only some parameters have a momentum yet."""
    task = MiniTask("dino", SMALL)
    optimizer = OPTIMIZERS[name]().build([{"params": task.parameters, "lr": 0.1}])
    task.optimizer.step = lambda closure=None, *, where=0.0: optimizer.step()  # type: ignore
    last = task.base_model.head.last_layer.weight.clone()
    task.run(3)
    assert torch.equal(task.base_model.head.last_layer.weight, last)
    task.run(1)
    assert not torch.equal(task.base_model.head.last_layer.weight, last)


@pytest.mark.parametrize("method", ["dino", "dinov2"])
@pytest.mark.parametrize("layer", [DropPath(0.5), StochasticDepth(0.5, "row")])
def test_stochastic_depth_is_the_students_alone(layer: nn.Module, method: str) -> None:
    task = MiniTask(method, SMALL, backbone=TinyTokens)
    task.base_model.backbone.drop = layer
    task.loss.setup(task)
    student, teacher = (
        network.backbone.drop(torch.ones(99))
        for network in (task.base_model, task.loss.teacher.network)
    )
    assert set(student.tolist()) == {0.0, 2.0}
    assert set(teacher.tolist()) == {1.0} and task.loss.teacher.training


def test_autocast_rounds_nothing() -> None:
    method, output = _method(temperature=0.3).float(), _random(3, 8, 6).float()
    probs = F.softmax(_random(2, 8, 6, seed=1).float(), dim=2)
    plain = loss_of(method, output, probs=probs)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(method, output, probs=probs).item() == plain.item()


def test_accumulated_batches_all_count_for_the_center() -> None:
    whole = MiniTask("dino", SMALL, batch_size=12).run(2)
    parts = MiniTask("dino", SMALL, batch_size=6, accumulate=2).run(2)
    assert not parts.loss.pending
    assert torch.allclose(whole.loss.center, parts.loss.center, atol=1e-12)
    assert largest_difference(whole.grads, parts.grads) < 1e-9


def test_a_test_phase_leaves_no_trace() -> None:
    task = MiniTask("dino", SMALL)
    task.train = False
    task.run(2)
    assert not task.loss.pending
    assert not task.loss.center.any()


def test_the_teachers_backbone_is_kept() -> None:
    task = MiniTask("dino", SMALL).run(1)
    kept = task.loss.export_backbone(task.base_model)
    assert kept is task.loss.teacher.network.backbone
