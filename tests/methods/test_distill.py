"""Distillation against formulas in float64; a student that learns, resumes, and trains on ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from minitask import MiniTask, TinyTokens, largest_difference, loss_of
from ranks import run_ranks
from selftask.batch import Batch, total
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.methods.distill_features import DistillFeatures
from selftask.methods.distill_logits import DistillLogits
from selftask.methods.distill_prototypes import DistillPrototypes
from selftask.models.distillation.patch_scores import ImageAndPatchScores
from selftask.models.network import Network
from selftask.models.weights.trained import Scores, TrainedNetwork

K = 5
_NONE = torch.empty(0, dtype=torch.int64)
NOWHERE = FrozenModule(model="-")


def _random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=draws)


def _features(**config: Any) -> DistillFeatures:
    return DistillFeatures(DistillFeatures.Config(teacher=NOWHERE, **config))


def _logits(**config: Any) -> DistillLogits:
    return DistillLogits(DistillLogits.Config(teacher=NOWHERE, **config))


def _softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def _cross_entropy(targets: Tensor, scores: Tensor) -> float:
    """Of the softmax of two rows of scores."""
    p, q = _softmax(targets.tolist()), _softmax(scores.tolist())
    return -sum(a * math.log(b) for a, b in zip(p, q, strict=True))


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "entropy"), [("kl", 1.0), ("cross_entropy", 0.0)])
def test_logits_at_a_temperature(loss: str, entropy: float) -> None:
    """Hinton et al., section 2, as loops over views and images."""
    student, teacher, tau = _random(2, 3, K), _random(2, 3, K, seed=1), 2.5
    terms = []
    for s_row, t_row in zip(student.flatten(0, 1) / tau, teacher.flatten(0, 1) / tau, strict=True):
        own = _cross_entropy(t_row, t_row)
        terms.append(tau**2 * (_cross_entropy(t_row, s_row) - entropy * own))
    actual = loss_of(_logits(loss=loss, temperature=tau), student, targets=teacher)
    assert actual.item() == pytest.approx(sum(terms) / 6, rel=1e-12)


def test_gradients_of_logits_do_not_grow_or_fade_with_the_temperature() -> None:
    """Eq. 4 of Hinton et al.: at a high temperature it is that of half the squared distance."""
    student, teacher = _random(1, 4, K), _random(1, 4, K, seed=1)
    student, teacher = (x - x.mean(dim=2, keepdim=True) for x in (student, teacher))
    student.requires_grad_()
    loss = loss_of(_logits(temperature=1e4), student, targets=teacher)
    (gradient,) = torch.autograd.grad(loss, student)
    assert torch.allclose(gradient, (student - teacher).detach() / (K * 4), rtol=1e-3, atol=1e-4)


def test_distances_of_features_and_logits() -> None:
    student, teacher = _random(2, 3, K), _random(2, 3, K, seed=1)
    cosines = [
        float(s @ t / (s.norm() * t.norm()))
        for s, t in zip(student.flatten(0, 1), teacher.flatten(0, 1), strict=True)
    ]
    actual = loss_of(_features(), student, targets=teacher)
    assert actual.item() == pytest.approx(1 - sum(cosines) / 6, rel=1e-12)
    squares = [(s - t) ** 2 for s, t in zip(student.flatten(), teacher.flatten(), strict=True)]
    for method in (_features(loss="mse"), _logits(loss="mse")):
        actual = loss_of(method, student, targets=teacher)
        assert actual.item() == pytest.approx(float(sum(squares)) / len(squares), rel=1e-12)


def test_labels_have_their_share_and_unlabeled_images_none() -> None:
    student, teacher = _random(2, 4, K), _random(2, 4, K, seed=1)
    labels = torch.tensor([3, -1, 0, -1])
    terms = [
        -math.log(_softmax(student[view, image].tolist())[int(labels[image])])
        for view in range(2)
        for image in (0, 2)
    ]
    method = _logits(label_weight=0.25, temperature=1.0)
    soft = loss_of(_logits(temperature=1.0), student, targets=teacher)
    batch = Batch(views={}, labels=labels, index=_NONE, key=_NONE, added={"targets": teacher})
    parts = method(student, batch)
    assert isinstance(parts, dict)
    assert parts["labels"].item() == pytest.approx(0.25 * sum(terms) / 8, rel=1e-12)
    assert parts["distillation"].item() == pytest.approx(0.75 * soft.item(), rel=1e-12)


def _prototypes(trained: TrainedNetwork, **config: Any) -> DistillPrototypes:
    method = DistillPrototypes(DistillPrototypes.Config(teacher=NOWHERE, **config))
    method.out_dim = trained.width
    assert trained.scores is not None
    method.targets = method.build_targets(trained.scores)
    return method.double()


def _trained(center: Tensor | None = None, targets: Any = "softmax") -> TrainedNetwork:
    scores = Scores(nn.Identity(), 0.2, targets, center)
    return TrainedNetwork(Network(nn.Identity(), nn.Identity()), K, 3, [], scores)


def test_prototypes_are_sharpened_and_centered_as_the_teacher_was() -> None:
    student, teacher, center = _random(1, 3, K), _random(1, 3, K, seed=1), _random(K, seed=2)
    rows = zip((teacher[0] - center) / 0.2, student[0] / 0.1, strict=True)
    terms = [_cross_entropy(*pair) for pair in rows]
    method = _prototypes(_trained(center, "centering"))
    loss = loss_of(method, student, targets=method.targets(teacher))
    assert loss.item() == pytest.approx(sum(terms) / 3, rel=1e-9)
    plain = _prototypes(_trained(center, "centering"), targets="softmax", teacher_temperature=1.0)
    assert torch.allclose(plain.targets(teacher), teacher.softmax(dim=2), atol=1e-12)
    even = loss_of(method, torch.zeros(1, 3, K).double(), targets=method.targets(teacher))
    assert method.chance_loss == pytest.approx(even.item())
    with pytest.raises(UserError, match=r"targets=centering: .* has no center"):
        _prototypes(_trained(), targets="centering")


def test_sinkhorn_balances_each_view() -> None:
    """The listing of SwAV's appendix A, view by view."""
    scores = _random(2, 6, K, seed=3)
    expected = []
    for view in scores:
        q = np.exp(view.numpy().T / 0.2)  # (K, B)
        for _ in range(4):
            q = q / q.sum(axis=1, keepdims=True)
            q = q / q.sum(axis=0, keepdims=True)
        expected.append(q.T)
    method = _prototypes(_trained(targets="sinkhorn"), sinkhorn_iterations=4)
    assert np.allclose(method.targets(scores).numpy(), np.stack(expected), atol=1e-12)


def test_different_views_are_compared_in_pairs() -> None:
    """Eq. 3 of DINO: each of two global views with all views but itself."""
    student, teacher, center = _random(4, 3, K), _random(2, 3, K, seed=1), _random(K, seed=2)
    terms = [
        _cross_entropy((teacher[a, image] - center) / 0.2, student[v, image] / 0.1)
        for a in range(2)
        for v in range(4)
        for image in range(3)
        if a != v
    ]
    method = _prototypes(_trained(center, "centering"), pairs="different")
    loss = loss_of(method, student, targets=method.targets(teacher))
    assert len(terms) == 6 * 3
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_patches_have_their_weight() -> None:
    """Eq. 2 of iBOT without a mask: the mean cross-entropy of all patches, beside the images'."""
    images, targets = _random(2, 3, K), _random(2, 3, K, seed=1).softmax(dim=2)
    patches, teacher, center = _random(12, K, seed=2), _random(12, K, seed=3), _random(K, seed=4)
    rows = zip((teacher - center) / 0.3, patches / 0.1, strict=True)
    terms = [_cross_entropy(*pair) for pair in rows]
    method = _prototypes(_trained(), patch_weight=0.25)
    patch_targets = method.build_targets(Scores(nn.Identity(), 0.3, "centering", center))
    alone = loss_of(_prototypes(_trained()), images, targets=targets).item()
    batch = Batch(views={}, labels=_NONE, index=_NONE, key=_NONE)
    batch["targets"], batch["patch_targets"] = targets, patch_targets(teacher[None])[0]
    actual = method(ImageAndPatchScores(images, patches), batch)
    assert actual["patches"].item() == pytest.approx(0.25 * sum(terms) / 12, rel=1e-12)
    assert actual["images"].item() == pytest.approx(0.75 * alone, rel=1e-12)


# -- teacher and student in training ---------------------------------------------------------------


class Wide(nn.Module):
    """Images -> 9 features, by layers that behave differently in training."""

    embed_dim = 9

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.conv = nn.Conv2d(3, 9, 3)
        self.norm, self.drop = nn.BatchNorm2d(9), nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.norm(self.conv(images)))).mean(dim=(2, 3))


class TaughtFeatures(DistillFeatures):
    """Its teacher comes from memory."""

    def open_trained(self, name: str, task: Any, *, scores: bool = False) -> TrainedNetwork:
        return TrainedNetwork(Network(Wide(), nn.Identity()), 9, 3, [])


class _TaughtScores:
    """Its teacher comes from memory."""

    def open_trained(self, name: str, task: Any, *, scores: bool = False) -> TrainedNetwork:
        head = Scores(nn.Linear(9, K, bias=False), 0.2, "sinkhorn")
        with torch.no_grad():
            head.head.weight.copy_(_random(K, 9, seed=4))
        return TrainedNetwork(Network(Wide(), head.head), K, 3, [], head)


class TaughtLogits(_TaughtScores, DistillLogits): ...


class TaughtPrototypes(_TaughtScores, DistillPrototypes): ...


class PatchTaught(DistillPrototypes):
    """Its teacher has two heads and comes from memory."""

    def open_trained(self, name: str, task: Any, *, scores: bool = False) -> TrainedNetwork:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            backbone, *heads = TinyTokens(), nn.Linear(6, K), nn.Linear(6, K + 2)
        patches = Scores(heads[1], 0.1, "centering", _random(K + 2, seed=6, scale=0.1))
        images = Scores(heads[0], 0.2, "sinkhorn", patches=patches)
        return TrainedNetwork(Network(backbone, heads[0]), K, 3, [], images)


PATCHES = {"pairs": "different", "patch_weight": 0.5, "hidden_dim": 7}


def _patch_task(*sizes: int, **config: Any) -> MiniTask:
    """Views of 9 pixels have 9 patches, views of 6 pixels have 4."""
    config = {"teacher": NOWHERE, **PATCHES, "bottleneck": 4, **config}
    task = MiniTask(PatchTaught, config, backbone=TinyTokens, sizes=(8,) * len(sizes), epochs=20)
    task.views = [_random(24, 3, size, size, seed=n) for n, size in enumerate(sizes)]
    return task


PROTOTYPES = {"teacher": NOWHERE, "hidden_dim": 7, "bottleneck": 4}
STUDENTS: list[tuple[type[Method], dict[str, Any]]] = [
    (TaughtFeatures, {"teacher": NOWHERE}),
    (TaughtFeatures, {"teacher": NOWHERE, "loss": "mse"}),
    (TaughtLogits, {"teacher": NOWHERE}),
    (TaughtPrototypes, PROTOTYPES),
]


@pytest.mark.parametrize(("method", "config"), STUDENTS)
def test_the_student_learns_and_the_teacher_stays(
    method: type[Method], config: dict[str, Any]
) -> None:
    task = MiniTask(method, config, lr=0.3, epochs=20)
    task.loss.train()
    network = task.loss.teacher.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert not any(module.training for module in network.modules())
    task.run(40)
    assert task.losses[-1] < task.losses[0]
    assert tiny.differences(dict(network.state_dict()), before) == []
    assert not any(p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_the_student_learns_scores_of_patches(weight: float) -> None:
    """Its own scores of patches come nearer to the teacher's, and the teacher stays."""
    task = _patch_task(9, 9, 6, patch_weight=weight)
    before = {name: value.clone() for name, value in task.loss.teacher.network.state_dict().items()}

    def patch_loss() -> float:
        batch = task.forward(torch.arange(24))
        return task.loss(batch.output, batch)["patches"].item()  # type: ignore[no-any-return]

    first = patch_loss()
    task.run(40)
    assert patch_loss() < first - 0.1
    assert task.losses[-1] < task.losses[0]
    assert tiny.differences(dict(task.loss.teacher.network.state_dict()), before) == []


def test_the_teacher_sees_the_first_two_views_and_their_patches() -> None:
    task = _patch_task(9, 9, 6, 6)
    batch = task.forward(torch.arange(4))
    teacher, student = task.loss.teacher.network, task.base_model
    with torch.no_grad():
        seen = [teacher.backbone.extract(view) for view in batch.all_views[:2]]
        scores = torch.stack([teacher.head(view.pooled) for view in seen])
        tokens = torch.stack([teacher.patch_head(view.tokens.patches) for view in seen])
        own = [student.backbone.extract(view) for view in batch.all_views]
        images = torch.stack([student.head(view.pooled) for view in own])
        patches = torch.stack([student.patch_head(view.tokens.patches) for view in own[:2]])
    expected = (tokens - _random(K + 2, seed=6, scale=0.1)).div(0.1).softmax(dim=-1)
    assert batch["patch_targets"].shape == (2 * 4 * 9, K + 2)
    assert torch.allclose(batch["patch_targets"], expected.flatten(0, 2), rtol=0, atol=1e-6)
    assert torch.allclose(batch["targets"], task.loss.targets(scores), rtol=0, atol=1e-12)
    assert torch.allclose(batch.output.images, images, rtol=0, atol=1e-12)
    assert torch.allclose(batch.output.patches, patches.flatten(0, 2), rtol=0, atol=1e-12)
    same = _patch_task(9, 6, pairs="same").forward(torch.arange(4))
    assert len(same["targets"]) == 2
    assert len(same["patch_targets"]) == len(same.output.patches) == 4 * (9 + 4)


def test_a_student_with_the_teachers_scores_has_no_gradient() -> None:
    """With equal temperatures: the cross-entropy of a distribution with itself is least."""
    task = _patch_task(9, 9, pairs="same", temperature=0.3, teacher_temperature=0.3)
    task.loss.targets.how = task.loss.patch_targets.how = "softmax"
    task.loss.patch_targets.center.zero_()
    task.base_model = task.loss.teacher.network.requires_grad_()
    batch = task.forward(torch.arange(4))
    loss = total(task.loss(batch.output, batch))
    for gradient in torch.autograd.grad(loss, list(task.base_model.parameters())):
        assert torch.allclose(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)


def test_patches_resume_and_two_ranks_are_one() -> None:
    """Scores of images and of patches are balanced over all ranks by Sinkhorn-Knopp."""
    alone = _train_patches(0)
    half = _patch_task(9, 9, 6, targets="sinkhorn").run(2).state()
    rest = _patch_task(9, 9, 6, targets="sinkhorn").resume(half).run(2).state()
    assert largest_difference(alone["network"], rest["network"]) == 0.0
    assert list(alone["method"]) == ["teacher.digest"]
    for state in run_ranks(_train_patches, 2):
        assert largest_difference(alone, state) < 1e-9


def _train_patches(rank: int) -> dict[str, Any]:
    return _patch_task(9, 9, 6, targets="sinkhorn").run(4).state()


def test_patches_of_another_grid_or_none_are_refused() -> None:
    class Coarse(TinyTokens):
        patch_size = (5, 5)

    config = {"teacher": NOWHERE, **PATCHES}
    with pytest.raises(UserError, match="student has patches of 5 pixels and the teacher of 3"):
        MiniTask(PatchTaught, config, backbone=Coarse)
    with pytest.raises(UserError, match="gives one vector an image and no patches"):
        MiniTask(PatchTaught, config)
    with pytest.raises(UserError, match="patch_weight: - scores whole images and no patches"):
        MiniTask(TaughtPrototypes, config, backbone=TinyTokens)


def test_a_student_that_is_the_teacher_has_nothing_to_learn() -> None:
    for loss in ("mse", "cosine"):
        config = {"teacher": NOWHERE, "loss": loss}
        task = MiniTask(TaughtFeatures, config, backbone=Wide, sizes=(8, 5))
        task.base_model.eval()
        assert isinstance(task.base_model.head, nn.Identity)
        batch = task.forward(torch.arange(4))
        assert task.loss(batch.output, batch).item() == pytest.approx(0.0, abs=1e-12)
        task = MiniTask(TaughtFeatures, {**config, "project": "linear"}, backbone=Wide)
        task.base_model.eval()
        batch = task.forward(torch.arange(4))
        assert task.loss(batch.output, batch).item() > 0.01


def test_student_and_teacher_see_the_same_views() -> None:
    task = MiniTask(TaughtFeatures, {"teacher": NOWHERE}, sizes=(8, 5, 8))
    batch = task.forward(torch.arange(4))
    with torch.no_grad():
        expected = torch.stack([Wide().double().eval()(view) for view in batch.all_views])
    assert torch.allclose(batch["targets"], expected, atol=1e-12)


def test_a_checkpoint_names_the_teacher_by_its_digest() -> None:
    task = MiniTask(TaughtFeatures, {"teacher": NOWHERE}).run(3)
    state = task.state()
    assert list(state["method"]) == ["teacher.digest"]
    straight = MiniTask(TaughtFeatures, {"teacher": NOWHERE}).run(5).state()
    resumed = MiniTask(TaughtFeatures, {"teacher": NOWHERE}).resume(state).run(2).state()
    assert largest_difference(straight["network"], resumed["network"]) == 0.0
    other = MiniTask(TaughtLogits, {"teacher": NOWHERE})
    ours, theirs = (bytes(t.loss.teacher.digest.tolist()).hex()[:12] for t in (other, task))
    text = rf"method.teacher: .* \(SHA-256 {ours}\) are not those .* run began \({theirs}\)"
    with pytest.raises(UserError, match=text):
        other.loss.load_state_dict(state["method"])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*teacher\.more"):
        task.loss.load_state_dict({**state["method"], "teacher.more": torch.zeros(1)})
