"""Distillation against formulas in float64, and its teachers against the runs they come from."""

from __future__ import annotations

import math
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import tiny
from minitask import MiniTask, largest_difference, loss_of
from ranks import run_ranks
from selftask.api.learner import Learner
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.methods.distill import Distill
from selftask.models.build import build_backbone
from selftask.models.network import Network
from selftask.models.teacher import FrozenTeacher
from selftask.models.weights.trained import (
    Scores,
    TrainedNetwork,
    open_features,
    open_scores,
)
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

K = 5


def _random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=draws)


def _method(**config: Any) -> Distill:
    return Distill(Distill.Config(teacher="runs/none", **config))


def _softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "entropy"), [("kl", 1.0), ("cross_entropy", 0.0)])
def test_logits_at_a_temperature(loss: str, entropy: float) -> None:
    """Hinton et al., section 2, as loops over views and images."""
    student, teacher, tau = _random(2, 3, K), _random(2, 3, K, seed=1), 2.5
    terms = []
    for s_row, t_row in zip(student.flatten(0, 1).tolist(), teacher.flatten(0, 1), strict=True):
        p = _softmax((t_row / tau).tolist())
        q = _softmax([x / tau for x in s_row])
        cross = -sum(a * math.log(b) for a, b in zip(p, q, strict=True))
        terms.append(tau**2 * (cross + entropy * sum(a * math.log(a) for a in p)))
    found = loss_of(_method(match="logits", loss=loss, temperature=tau), student, targets=teacher)
    assert found.item() == pytest.approx(sum(terms) / 6, rel=1e-12)


def test_gradients_of_logits_do_not_grow_or_fade_with_the_temperature() -> None:
    """Eq. 4 of Hinton et al.: at a high temperature it is that of half the squared distance."""
    student, teacher = _random(1, 4, K), _random(1, 4, K, seed=1)
    student, teacher = (x - x.mean(dim=2, keepdim=True) for x in (student, teacher))
    student.requires_grad_()
    loss = loss_of(_method(match="logits", temperature=1e4), student, targets=teacher)
    (gradient,) = torch.autograd.grad(loss, student)
    assert torch.allclose(gradient, (student - teacher).detach() / (K * 4), rtol=1e-3, atol=1e-4)


def test_distances_of_features_and_logits() -> None:
    student, teacher = _random(2, 3, K), _random(2, 3, K, seed=1)
    cosines = [
        float(s @ t / (s.norm() * t.norm()))
        for s, t in zip(student.flatten(0, 1), teacher.flatten(0, 1), strict=True)
    ]
    found = loss_of(_method(), student, targets=teacher)
    assert found.item() == pytest.approx(1 - sum(cosines) / 6, rel=1e-12)
    squares = [(s - t) ** 2 for s, t in zip(student.flatten(), teacher.flatten(), strict=True)]
    for match in ("features", "logits"):
        found = loss_of(_method(match=match, loss="mse"), student, targets=teacher)
        assert found.item() == pytest.approx(float(sum(squares)) / len(squares), rel=1e-12)


def test_labels_have_their_share_and_unlabelled_images_none() -> None:
    student, teacher = _random(2, 4, K), _random(2, 4, K, seed=1)
    labels = torch.tensor([3, -1, 0, -1])
    terms = [
        -math.log(_softmax(student[view, image].tolist())[int(labels[image])])
        for view in range(2)
        for image in (0, 2)
    ]
    method = _method(match="logits", label_weight=0.25, temperature=1.0)
    soft = loss_of(_method(match="logits", temperature=1.0), student, targets=teacher)
    none = torch.empty(0)
    batch = Batch(views={}, labels=labels, index=none, key=none, added={"targets": teacher})
    parts = method(student, batch)
    assert isinstance(parts, dict)
    assert parts["labels"].item() == pytest.approx(0.25 * sum(terms) / 8, rel=1e-12)
    assert parts["distillation"].item() == pytest.approx(0.75 * soft.item(), rel=1e-12)


def _prototypes(trained: TrainedNetwork, **config: Any) -> Distill:
    method = _method(match="prototypes", **config)
    method.out_dim = trained.width
    method._set_targets(trained)
    return method.double()


def _trained(center: Tensor | None = None, targets: Any = "softmax") -> TrainedNetwork:
    scores = Scores(nn.Identity(), 0.2, targets, center)
    return TrainedNetwork(Network(nn.Identity(), nn.Identity()), K, 3, [], scores)


def test_prototypes_are_sharpened_and_centred_as_the_teacher_was() -> None:
    student, teacher, center = _random(1, 3, K), _random(1, 3, K, seed=1), _random(K, seed=2)
    terms = []
    for image in range(3):
        p = _softmax(((teacher[0, image] - center) / 0.2).tolist())
        q = _softmax((student[0, image] / 0.1).tolist())
        terms.append(-sum(a * math.log(b) for a, b in zip(p, q, strict=True)))
    method = _prototypes(_trained(center, "centering"))
    found = loss_of(method, student, targets=method.probabilities(teacher))
    assert found.item() == pytest.approx(sum(terms) / 3, rel=1e-9)
    plain = _prototypes(_trained(center, "centering"), targets="softmax", teacher_temperature=1.0)
    assert torch.allclose(plain.probabilities(teacher), teacher.softmax(dim=2), atol=1e-12)
    even = loss_of(method, torch.zeros(1, 3, K).double(), targets=method.probabilities(teacher))
    assert method.chance_loss == pytest.approx(even.item())
    with pytest.raises(UserError, match=r"targets=centering: .* has no centre"):
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
    assert np.allclose(method.probabilities(scores).numpy(), np.stack(expected), atol=1e-12)


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


class Taught(Distill):
    """Its teacher comes from memory."""

    def open_teacher(self, task: Any) -> TrainedNetwork:
        if self.config.match == "features":
            return TrainedNetwork(Network(Wide(), nn.Identity()), 9, 3, [])
        scores = Scores(nn.Linear(9, K, bias=False), 0.2, "sinkhorn")
        with torch.no_grad():
            scores.head.weight.copy_(_random(K, 9, seed=4))
        return TrainedNetwork(Network(Wide(), scores.head), K, 3, [], scores)


CONFIGS: list[dict[str, Any]] = [
    {"match": "features"},
    {"match": "features", "loss": "mse"},
    {"match": "logits"},
    {"match": "prototypes", "hidden_dim": 7, "bottleneck": 4},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config.values())))
def test_the_student_learns_and_the_teacher_stays(config: dict[str, Any]) -> None:
    task = MiniTask(Taught, {"teacher": "-", **config}, lr=0.3, epochs=20)
    task.loss.train()
    network = task.loss.teacher.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert not any(module.training for module in network.modules())
    task.run(40)
    assert task.losses[-1] < task.losses[0]
    assert tiny.differences(dict(network.state_dict()), before) == []
    assert not any(p.requires_grad for p in network.parameters())


def test_a_student_that_is_the_teacher_has_nothing_to_learn() -> None:
    for loss in ("mse", "cosine"):
        task = MiniTask(Taught, {"teacher": "-", "loss": loss}, backbone=Wide, sizes=(8, 5))
        task.base_model.eval()
        assert isinstance(task.base_model.head, nn.Identity)
        batch = task.forward(torch.arange(4))
        assert task.loss(batch.output, batch).item() == pytest.approx(0.0, abs=1e-12)
        task = MiniTask(Taught, {"teacher": "-", "loss": loss, "project": "linear"}, backbone=Wide)
        task.base_model.eval()
        batch = task.forward(torch.arange(4))
        assert task.loss(batch.output, batch).item() > 0.01


def test_student_and_teacher_see_the_same_views() -> None:
    task = MiniTask(Taught, {"teacher": "-"}, sizes=(8, 5, 8))
    batch = task.forward(torch.arange(4))
    with torch.no_grad():
        expected = torch.stack([Wide().double().eval()(view) for view in batch.all_views])
    assert torch.allclose(batch["targets"], expected, atol=1e-12)


def _train(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    return MiniTask(Taught, {"teacher": "-", **config}, sizes=(8, 5)).run(4).state()


def test_two_ranks_are_one() -> None:
    """With prototypes that are balanced over all ranks."""
    alone = _train(0, CONFIGS[3])
    for state in run_ranks(_train, 2, CONFIGS[3]):
        assert largest_difference(alone, state) < 1e-9


def test_a_checkpoint_names_the_teacher_by_its_digest() -> None:
    task = MiniTask(Taught, {"teacher": "-"}).run(3)
    state = task.state()
    assert list(state["method"]) == ["teacher.digest"]
    straight = MiniTask(Taught, {"teacher": "-"}).run(5).state()
    resumed = MiniTask(Taught, {"teacher": "-"}).resume(state).run(2).state()
    assert largest_difference(straight["network"], resumed["network"]) == 0.0
    other = MiniTask(Taught, {"teacher": "-", "match": "logits"})
    with pytest.raises(UserError, match="not those with which this run began"):
        other.loss.load_state_dict(state["method"])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*teacher\.more"):
        task.loss.load_state_dict({**state["method"], "teacher.more": torch.zeros(1)})


# -- where teachers come from ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny finished runs of methods that have scores, and of one that has none."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("dino", "swav", "supervised", "simclr"):
        tiny.train(method, folder, method, "train.epochs=1").close()
    return folder


IMAGES = _random(4, 3, 32, 32).float()


@pytest.mark.parametrize("method", ["dino", "dinov2", "msn", "swav", "supervised"])
def test_scores_are_those_of_the_run(method: str, runs: Path, tmp_path: Path) -> None:
    """As its own task computes them, after a checkpoint of an address of any kind."""
    task = tiny.train(method, tmp_path, "run", "train.epochs=1")
    task.save_checkpoint()
    task.base_model.eval(), task.loss.eval()
    with torch.no_grad():
        if method == "supervised":
            expected = task.base_model(IMAGES)
        elif method == "swav":
            features = nn.functional.normalize(task.base_model([IMAGES])[0], dim=1)
            expected = features @ task.loss.prototypes.weight.T
        elif method == "msn":  # its targets without Sinkhorn are the softmax of sharpened scores
            (features,) = task.loss.teacher(([IMAGES], None, []))
            expected = task.loss.log_probs(features, 0.025)
        else:
            teacher = task.loss.teacher.network
            expected = teacher.head(teacher.backbone(IMAGES))
    (file,) = (tmp_path / "run" / "checkpoints").glob("step_*.pt")
    for address in (tmp_path / "run", f"{tmp_path / 'run'}@{task.steps_done}", file):
        trained = open_scores(str(address), weights=None)
        with torch.no_grad():
            found = trained.network.eval()([IMAGES])[0]
            if method == "msn":
                assert trained.scores is not None
                assert trained.scores.temperature == pytest.approx(0.025)
                found = (found / 0.025).log_softmax(dim=1)
        assert torch.allclose(found, expected, atol=1e-6)
        assert trained.width == expected.shape[1]
    scores = trained.scores
    assert scores is not None
    assert scores.targets == {"dino": "centering", "supervised": "softmax"}.get(method, "sinkhorn")
    if method == "dino":
        assert torch.equal(scores.center, task.loss.center)
        assert scores.temperature == pytest.approx(task.loss.teacher_temperature_at(1 - 1e-9))
    task.close()


def test_a_plan_builds_a_teacher_without_its_weights(runs: Path) -> None:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("error")
        teacher = FrozenTeacher(open_scores(str(runs / "dino"), weights=None).network)
    assert all(tensor.is_meta for tensor in (*teacher.parameters(), teacher.digest))


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_a_classifier_of_timm_from_a_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    trained = open_scores(f"timm:{name}", weights=str(tmp_path / "weights.pt"))
    images = _random(2, 3, 160, 160).float()
    with torch.no_grad():
        assert torch.allclose(trained.network.eval()([images])[0], model(images), atol=1e-5)
        features = open_features(f"timm:{name}", weights=str(tmp_path / "weights.pt"))
        pre_logits = model.forward_head(model.forward_features(images), pre_logits=True)
        assert torch.allclose(features.network([images])[0], pre_logits, atol=1e-5)
    assert trained.width == 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["method.teacher=nowhere/run"],
            "method.teacher=nowhere/run: nowhere/run: there is no such file or run",
        ),
        (["method.teacher=nowhere", "method.match=logits"], "nowhere: there is no such run"),
        (["method.teacher={runs}/simclr", "method.match=logits"], "simclr has no scores"),
        (
            ["method.teacher={runs}/dino", "method.project=none", "backbone.width=4"],
            "project=none: the student has",
        ),
        (
            [
                "method.teacher={runs}/supervised",
                "method.match=logits",
                "method.label_weight=0.5",
                "data={unlabelled}",
            ],
            "label_weight: needs labels, and these images have none",
        ),
    ],
)
def test_what_cannot_teach_is_told(
    words: list[str], message: str, runs: Path, tmp_path: Path
) -> None:
    unlabelled = tmp_path / "unlabelled.npz"
    np.savez(unlabelled, images=np.zeros((40, 32, 32), dtype=np.uint8))
    words = [word.format(runs=runs, unlabelled=unlabelled) for word in words]
    task = tiny.task("distill", tmp_path, "run", "method.teacher_weights=null", *words)
    with pytest.raises(UserError, match=message):
        task.prepare()


def test_a_teacher_without_weights_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = tiny.task("distill", tmp_path)
    task.prepare()
    assert "timm:test_vit has random weights" in caplog.text
    task.close()


def test_other_images_than_the_teachers_are_warned_of(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [f"method.teacher={runs / 'dino'}", "method.teacher_weights=null"]
    for more, expected in ([], False), (["eval.transforms=[normalize]"], True):
        task = tiny.task("distill", tmp_path, "run", *words, *more)
        task.prepare()
        found = "with mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5], and the views have [0.485"
        assert (found in caplog.text) == expected
        task.close()


def test_contradictions_in_the_config() -> None:
    words = ["method.loss=kl", "method.label_weight=0.5", "method.teacher=runs/x"]
    with pytest.raises(ConfigError) as caught:
        load_config("distill", words)
    text = str(caught.value)
    assert "'kl' is not for match: features, which has cosine, mse" in text
    assert "label_weight: has no effect with match: features" in text
    assert "teacher_weights: is for timm:NAME" in text
    with pytest.raises(ConfigError, match="teacher_weights: timm:test_vit needs a file"):
        load_config("distill", ["method.teacher_weights=null"])


@pytest.mark.parametrize("match", ["features", "prototypes", "logits"])
def test_teachers_in_a_loop_of_ones_own(match: str, runs: Path) -> None:
    """``Learner``: the same losses, without a run."""
    torch.manual_seed(0)
    backbone = build_backbone(Component(name="small_resnet", args={"width": 4}))
    teacher = str(runs / ("supervised" if match == "logits" else "dino"))
    options = {"label_weight": 0.5} if match == "logits" else {}
    learner = Learner(
        "distill", backbone, steps=8, batch_size=4, teacher=teacher, match=match, **options
    )
    optimizer = torch.optim.AdamW(learner.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        loss = learner([IMAGES], labels=torch.tensor([1, 0, 3, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.update()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def _student(folder: Path, out: str, *words: str) -> Task:
    """Train the tiny recipe with a backbone of its own in ``words``."""
    options = tiny.overrides("distill", folder, out)
    kept = [word for word in options if not word.startswith("backbone=")]
    config = load_config("distill/digits", [*kept, *words])
    task = Task(config, sources=open_data(config.data))
    with suppress(Interrupted):
        train_loop(task)
    return task


def test_a_run_of_dino_teaches_a_transformer_its_prototypes(runs: Path, tmp_path: Path) -> None:
    """With its centre and temperature; stopped and resumed as if never stopped."""
    words = [
        "method.match=prototypes",
        f"method.teacher={runs / 'dino'}",
        "method.teacher_weights=null",
        "backbone={name: vit_micro, depth: 1}",
        "train.epochs=1",
    ]
    whole = _student(tmp_path, "whole", *words)
    assert whole.loss.how == "centering" and whole.loss.center.any()
    assert whole.losses[-1] < whole.losses[0]
    whole.close()
    for stop in ("3", "null"):
        _student(tmp_path, "parts", *words, f"train.stop_at={stop}").close()
    states = [tiny.last_state(tmp_path / out) for out in ("whole", "parts")]
    assert tiny.differences(*states) == []


@pytest.mark.slow
def test_prototypes_of_digits_reach_a_smaller_transformer(tmp_path: Path) -> None:
    """DINO's digits recipe, then a ViT of three quarters of its parameters with its prototypes."""
    options = [
        "method.match=prototypes",
        f"method.teacher={tmp_path / 'teacher'}",
        "method.teacher_weights=null",
        "backbone={name: vit_micro, depth: 2}",
        "train.epochs=90",
    ]
    for recipe, out, more in (("dino", "teacher", []), ("distill", "student", options)):
        words = [f"out={tmp_path / out}", "train.threads=1", "data.num_workers=1", *more]
        command = [sys.executable, "-m", "selftask", "train", f"{recipe}/digits", *words]
        done = tiny.run(command, tmp_path, 900)
        assert done.returncode == 0, done.stderr
    of_teacher, of_student = (
        [row["knn_top1"] for row in tiny.rows(tmp_path / name) if "knn_top1" in row]
        for name in ("teacher", "student")
    )
    assert of_student[-1] >= of_student[0] + 0.15
    assert of_student[-1] >= of_teacher[-1] - 0.15
