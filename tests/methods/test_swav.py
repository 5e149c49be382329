"""SwAV against its paper, lightly and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minitask import MiniTask, loss_of
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.swav import SwAV

SMALL: dict[str, Any] = {
    "out_dim": 5,
    "hidden_dim": 7,
    "norm": False,
    "num_prototypes": 4,
    "epsilon": 0.3,
    "queue_size": 16,
    "queue_start": 3,
    "freeze_prototypes": 2,
}


def _method(**config: Any) -> SwAV:
    torch.manual_seed(0)
    return SwAV(SwAV.Config(**{"out_dim": 5, "num_prototypes": 6, **config})).double()


def _random(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draws)


def _paper_codes(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Appendix A's listing: (B, K) scores to (B, K) codes."""
    q = torch.exp(scores / epsilon).T
    q /= q.sum()
    k, b = q.shape
    for _ in range(iterations):
        q = q / q.sum(dim=1, keepdim=True) / k
        q = q / q.sum(dim=0, keepdim=True) / b
    return (q * b).T


def _paper_loss(output: Tensor, method: SwAV, queue: Tensor | None = None) -> float:
    """Eq. 6 as loops over (V, B, D) features: codes of two views, predicted by all others."""
    config, weight = method.config, method.prototypes.weight.detach()
    scores = [F.normalize(view, dim=1) @ weight.T for view in output]
    terms = []
    for i in (0, 1):
        rows = scores[i] if queue is None else torch.cat([queue[:, i] @ weight.T, scores[i]])
        codes = _paper_codes(rows, config.epsilon, config.sinkhorn_iterations)[-len(scores[i]) :]
        for v in range(len(scores)):
            if v == i:
                continue
            for b in range(len(codes)):
                exps = [math.exp(s / config.temperature) for s in scores[v][b].tolist()]
                logs = [math.log(e / sum(exps)) for e in exps]
                terms.append(-sum(q * p for q, p in zip(codes[b].tolist(), logs, strict=True)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("norm", [True, False])
def test_the_head_has_two_layers(norm: bool) -> None:
    head: Any = _method(norm=norm, hidden_dim=7).build_head(6)
    kinds = ["Linear", *["BatchNorm1d"] * norm, "ReLU", "Linear"]
    assert [type(layer).__name__ for layer in head] == kinds
    assert (head[0].weight.shape, head[-1].weight.shape) == ((7, 6), (5, 7))


@pytest.mark.parametrize("num_views", [2, 5])
def test_loss_is_that_of_the_paper(num_views: int) -> None:
    method, output = _method(), _random(num_views, 7, 5)
    loss = loss_of(method, output)
    assert loss.item() == pytest.approx(_paper_loss(output, method), rel=1e-10)
    terms = {name: value.item() for name, value in method(output, None).items()}
    assert terms["target_entropy"] + terms["kl"] == pytest.approx(loss.item())


def test_hard_assignments_are_the_likeliest_prototype() -> None:
    method, scores = _method(), _random(7, 6)
    soft = method.assign(scores, 0)
    method.is_hard = True
    hard = method.assign(scores, 0)
    assert torch.equal(hard, F.one_hot(soft.argmax(dim=1), 6).to(hard))
    task = MiniTask("swav", {**SMALL, "hard_assignments": 2})
    seen = []
    for _ in range(3):
        task.run(1)
        seen.append(task.loss.is_hard)
    assert seen == [True, True, False]


def test_shares_of_prototypes_follow_a_power_law() -> None:
    method = _method(power=0.5, epsilon=1.0, sinkhorn_iterations=50)
    shares = torch.tensor([k**-0.5 for k in range(1, 7)], dtype=torch.float64)
    actual = method.assign(_random(60, 6), 0).mean(dim=0)
    assert torch.allclose(actual, shares / shares.sum(), atol=1e-6)


def test_the_queue_joins_the_assignment_and_nothing_else() -> None:
    method, output = _method(queue_size=9), _random(3, 7, 5)
    queue = F.normalize(_random(9, 2, 5, seed=1), dim=2)
    method.queue.rows.copy_(queue)
    assert loss_of(method, output).item() == pytest.approx(_paper_loss(output, method))
    method.queue_is_used = True
    expected = _paper_loss(output, method, queue)
    assert loss_of(method, output).item() == pytest.approx(expected, rel=1e-10)
    prototypes = method.prototypes.weight.data  # of another step: the queue is scored by them
    prototypes.copy_(F.normalize(prototypes.roll(1, 0) + 0.5 * _random(6, 5, seed=2), dim=1))
    later = _paper_loss(output, method, queue)
    assert loss_of(method, output).item() == pytest.approx(later, rel=1e-10)
    assert later != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("with_queue", [False, True])
def test_loss_is_that_of_lightly(with_queue: bool) -> None:
    lightly = pytest.importorskip("lightly.loss")
    method, output = _method(queue_size=9), _random(4, 7, 5)
    method.queue.rows.copy_(F.normalize(_random(9, 2, 5, seed=1), dim=2))
    method.queue_is_used = with_queue
    scores = list(method.prototypes(F.normalize(output, dim=2)))
    queued = [method.prototypes(method.queue.rows[:, view]) for view in (0, 1)]
    theirs = lightly.SwaVLoss(temperature=0.1, sinkhorn_epsilon=0.05, sinkhorn_iterations=3)
    expected = theirs(scores[:2], scores[2:], queued if with_queue else None)
    assert loss_of(method, output).item() == pytest.approx(expected.item(), rel=1e-5)


def test_gradients_do_not_flow_through_assignments() -> None:
    method, output = _method(), _random(2, 7, 5).requires_grad_()
    loss_of(method, output).backward()
    scores = method.prototypes(F.normalize(output, dim=2))
    codes = [_paper_codes(s.detach(), 0.05, 3) for s in scores]
    logs = F.log_softmax(scores / 0.1, dim=2)
    swapped = -(codes[0] * logs[1] + codes[1] * logs[0]).sum(dim=1).mean() / 2
    (expected,) = torch.autograd.grad(swapped, output)
    assert output.grad is not None
    assert torch.allclose(output.grad, expected, atol=1e-10)


def test_perfect_agreement_costs_nothing_and_ignorance_costs_chance() -> None:
    method = _method(out_dim=6, temperature=1e-3, epsilon=0.01)
    method.prototypes.weight.data.copy_(torch.eye(6))
    same = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)  # each image at its own prototype
    assert loss_of(method, same).item() == pytest.approx(0.0, abs=1e-6)
    method.prototypes.weight.data.zero_()
    assert loss_of(method, same).item() == pytest.approx(method.chance_loss)
    assert method.chance_loss == pytest.approx(math.log(6))


def test_autocast_rounds_nothing() -> None:
    method, output = _method(queue_size=9), _random(3, 7, 5)
    method.queue.rows.copy_(F.normalize(_random(9, 2, 5, seed=1), dim=2))
    method.float().queue_is_used = True
    plain = loss_of(method, output.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(method, output.float()).item() == plain.item()


def test_autocast_rounds_no_score_of_a_teacher() -> None:
    """A student learns the cosines that SwAV itself computes."""
    method = _method().float()
    head = method.build_head(8)
    state = {"model": {f"head.{name}": value for name, value in head.state_dict().items()}}
    state["method"] = {f"prototypes.{k}": v for k, v in method.prototypes.state_dict().items()}
    scores = method.load_scores(8, state).head.eval()
    with torch.autocast("cpu", torch.bfloat16):
        features = _random(7, 8).float()
        expected = method.scores(scores[0](features))
        assert torch.equal(scores(features), expected)


def test_prototypes_wait_and_then_stay_on_the_sphere() -> None:
    task = MiniTask("swav", SMALL)
    weight = task.loss.prototypes.weight
    first = weight.detach().clone()
    assert torch.allclose(first.norm(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-6)
    task.run(2)
    assert torch.allclose(weight, first, atol=1e-6)  # put back on the sphere in double precision
    task.run(1)
    assert not torch.allclose(weight, first, atol=1e-3)
    assert torch.allclose(weight.norm(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-12)


def test_the_queue_holds_the_newest_features_and_starts_full() -> None:
    task = MiniTask("swav", SMALL, lr=0.0)  # the features of an image stay the same
    with torch.no_grad():
        views = task.batch(torch.arange(24)).input
        features = F.normalize(task.base_model(views), dim=2).transpose(0, 1)  # (24, 2, 5)
    used = []
    for batch in range(5):
        task.run(1)
        used.append(task.loss.queue_is_used)
        queue, newest = task.loss.queue, features[8 * (batch % 3) : 8 * (batch % 3) + 8]
        rows = queue.rows.roll(-int(queue.oldest), dims=0)  # the oldest first
        assert torch.allclose(rows[8:], newest, atol=1e-12)
        if batch:
            before = features[8 * ((batch - 1) % 3) : 8 * ((batch - 1) % 3) + 8]
            assert torch.allclose(rows[:8], before, atol=1e-12)
    assert used == [False, False, False, True, True]  # queue_start is 3, full it was after 2
    early = MiniTask("swav", {**SMALL, "queue_start": 0})
    assert [early.run(1).loss.queue_is_used for _ in range(4)] == [False, False, True, True]


def test_without_a_queue_nothing_is_kept() -> None:
    task = MiniTask("swav", {**SMALL, "queue_size": 0}).run(4)
    assert not task.loss.queue_is_used
    assert len(task.loss.queue) == 0


def test_accumulated_batches_all_enter_the_queue() -> None:
    whole = MiniTask("swav", SMALL, batch_size=12, lr=0.0).run(2)
    parts = MiniTask("swav", SMALL, batch_size=6, accumulate=2, lr=0.0).run(2)
    assert not parts.loss.pending
    rows = [sorted(task.loss.queue.rows[:12].sum(dim=(1, 2)).tolist()) for task in (whole, parts)]
    assert rows[0] == pytest.approx(rows[1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.queue_size=60", "queue_size: 60 images are fewer than the 64 of a batch"),
        ("method.epsilon=0", "epsilon=0: must be above 0"),
        ("method.sinkhorn_iterations=0", "at least 1"),
        ("method.queue_start=soon", "not a duration"),
    ],
)
def test_impossible_configs_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("swav", ["train.batch_size=64", override])
