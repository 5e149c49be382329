"""Probes beside training: their arithmetic, and that the network does not notice them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import tiny
from ranks import run_ranks
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import World
from selftask.errors import ConfigError, UserError
from selftask.evaluate.online import evaluate_task
from selftask.hooks.base import function_hook
from selftask.models.features.extract import pooled
from selftask.models.features.layer_outputs import LayerOutputs
from selftask.models.features.pooled_layers import PooledLayers
from selftask.models.linear_probes import LinearProbes
from selftask.task import Task
from selftask.task.loop import train_loop
from selftask.train_steps.grad_cache import _forward

PROBE = "hooks.online_probe={layers: [1], lr: [1, 3], k: 3, queue_size: 40}"
RATES = [0.5, 2.0]


def stream(steps: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Batches of 12 images of 4 classes with 5 features; some images have no label."""
    draws = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        labels = torch.randint(-1, 4, (12,), generator=draws)
        x = torch.randn(12, 5, dtype=torch.float64, generator=draws)
        batches.append((3 * x + 2 * torch.eye(5).double()[labels] + 7, labels))
    return batches


def of_ranks() -> dict[str, Tensor]:
    """The state after a stream whose batches the ranks share unevenly, two of them in a step."""
    probes = LinearProbes(RATES, 5, 4, torch.device("cpu")).double()
    probes.lr, probes._sums = probes.lr.double(), probes._sums.double()
    sizes = {1: [12], 3: [3, 8, 1]}[world_size()]
    for number, (x, labels) in enumerate(stream()):
        probes.add(x.split(sizes)[rank()], labels.split(sizes)[rank()])
        if number % 2:
            probes.update()
    return dict(probes.state_dict())


def as_rank(rank: int) -> dict[str, Tensor]:
    return of_ranks()


def test_steps_are_those_of_autograd_and_sgd() -> None:
    """Standardized by hand; a network of torch for each learning rate, with torch's SGD."""
    state = of_ranks()
    models = [nn.Linear(5, 4).double() for _ in RATES]
    for model in models:
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for model, lr in zip(models, RATES, strict=True)
    ]
    hits, mean, variance = [0, 0], torch.zeros(5), torch.ones(5)
    batches = stream()
    for step in range(3):
        x = torch.cat([batches[2 * step][0], batches[2 * step + 1][0]])
        labels = torch.cat([batches[2 * step][1], batches[2 * step + 1][1]])
        x, labels = x[labels >= 0], labels[labels >= 0]
        z = (x - mean) / (variance + 1e-6 * variance.mean()).sqrt() / 5**0.5
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            scores = model(z)
            hits[number] += int((scores.argmax(dim=1) == labels).sum())
            if step:  # the first one measures the features only
                optimizer.zero_grad()
                nn.functional.cross_entropy(scores, labels).backward()
                optimizer.step()
        share = 0.1 if step else 1.0
        variance = (1 - share) * variance + share * x.var(dim=0, correction=0)
        mean = (1 - share) * mean + share * x.mean(dim=0)
    for number, model in enumerate(models):
        expected = torch.cat([model.weight, model.bias[:, None]], dim=1)
        torch.testing.assert_close(state["weights"][number], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state["mean"], mean.double(), rtol=1e-10, atol=0)
    torch.testing.assert_close(state["variance"], variance.double(), rtol=1e-10, atol=0)
    assert state["hits"].tolist() == hits
    assert state["images"] == sum(int((labels >= 0).sum()) for _, labels in batches)


def test_three_ranks_with_uneven_parts_are_one() -> None:
    expected = of_ranks()
    for state in run_ranks(as_rank, 3):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_separable_classes_are_learned_at_any_scale() -> None:
    for scale in (1e-4, 1.0, 1e4):
        probes = LinearProbes([3.0], 16, 4, torch.device("cpu"))
        draws = torch.Generator().manual_seed(1)
        for _ in range(60):
            labels = torch.randint(4, (32,), generator=draws)
            x = torch.eye(4, 16)[labels] + 0.1 * torch.randn(32, 16, generator=draws)
            probes.clear()
            probes.add(scale * (x + 5), labels)
            probes.update()
        assert probes.count_hits(scale * (x + 5), labels).tolist() == [32]


def train(folder: Path, out: str, *more: str, method: str = "simclr") -> Task:
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 460)}"
    knn = ("eval.evaluations={knn: {k: [5]}}", "eval.every='4 steps'")
    length = ("train.max_steps=9", "train.log_every=3")
    task = tiny.task(method, folder, out, val, *knn, *length, *more)
    task.evaluate = evaluate_task
    return tiny.loop(task)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "ms_probe"} for row in tiny.rows(out)]


def without_probe(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if "probe" not in k and k != "train_knn_top1"} for row in rows
    ]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("simclr", ()),
        ("ibot", ("backbone.drop_path=0.2",)),
        ("mae", ()),
        ("simclr", ("train.step=accumulate", "train.accumulate=2")),
        ("simclr", ("train.step=sam",)),
        ("simclr", ("hooks.mixup={}",)),
    ],
)
def test_the_run_is_the_same_with_and_without(
    method: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Weights, optimizer, random states and every other column, bit for bit."""
    train(tmp_path, "without", *more, method=method)
    train(tmp_path, "with", PROBE, *more, method=method)
    rows, expected = (tiny.rows(tmp_path / out) for out in ("with", "without"))
    assert without_probe(rows) == expected
    states = [tiny.last_state(tmp_path / out) for out in ("with", "without")]
    probes = states[0]["hooks"].pop("online_probe")
    assert probes[""]["weights"].abs().sum() > 0 and "_layer1" in probes
    for state in states:
        state.pop("history", None)
    assert tiny.differences(*states) == []
    assert any("train_probe_top1_layer1" in row for row in rows)
    assert any("train_knn_top1" in row for row in rows)
    assert [row["step"] for row in rows if "probe_top1" in row] == [4, 8, 9]
    assert all("knn_top1" in row for row in rows if "probe_top1" in row)


def test_stopped_and_resumed_is_never_stopped(tmp_path: Path) -> None:
    """Between two rows, so that counts are restored, too."""
    train(tmp_path, "whole", PROBE)
    for stop in ("train.stop_at=5", "train.stop_at=null"):
        train(tmp_path, "parts", PROBE, stop)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    states = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert tiny.differences(*states) == []


def test_columns_are_the_accuracies_of_the_saved_classifiers(tmp_path: Path) -> None:
    """On the images of data.val, and on the training stream before each update."""
    seen: list[Tensor] = []
    task = tiny.task(
        "simclr",
        tmp_path,
        "run",
        f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 460)}",
        "hooks.online_probe={lr: [3]}",
        "eval.evaluations={}",
        "train.max_steps=12",
        "train.log_every=6",
    )
    task.evaluate = evaluate_task

    def predict(task: Task) -> None:
        (probe,) = task.named_hooks["online_probe"].probes.values() or (None,)
        labels = task.last_batch.labels
        if probe is None:
            seen.append((labels == 0).float())
            return
        x = task.base_model.embedding[: len(labels)]
        seen.append(hits(probe.state_dict(), x, labels))

    task.add_hook(function_hook(priority=1, on_loss_and_meter=predict))
    train_loop(task)
    rows = tiny.rows(tmp_path / "run")
    shown = [row["train_probe_top1"] for row in rows if "train_probe_top1" in row]
    expected = [float(torch.cat(seen[i : i + 6]).mean()) for i in (0, 6)]
    assert shown == pytest.approx(expected, abs=1e-6)
    state = tiny.last_state(task.out)["hooks"]["online_probe"][""]
    task.base_model.eval()
    batches = [(b.all_views[0], b.labels) for b in task.data_module.test_samples()]
    with torch.no_grad():
        right = [hits(state, pooled(task.base_model.backbone, x), y) for x, y in batches]
    assert rows[-1]["probe_top1"] == pytest.approx(float(torch.cat(right).mean()), abs=1e-6)
    assert rows[-1]["step"] == 12


@pytest.mark.parametrize("method", ["byol", "ibot"])
def test_probes_of_the_teacher(method: str, tmp_path: Path) -> None:
    """The run is the same, a resume continues them, and figures are those of its backbone."""
    of_teacher = "hooks.online_probe={lr: [3], teacher: true}"
    train(tmp_path, "without", method=method)
    for stop in ("train.stop_at=5", "train.stop_at=null"):
        train(tmp_path, "parts", of_teacher, stop, method=method)
    task = train(tmp_path, "whole", of_teacher, method=method)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    states = {out: tiny.last_state(tmp_path / out) for out in ("whole", "parts", "without")}
    assert tiny.differences(states["whole"], states["parts"]) == []
    rows = tiny.rows(tmp_path / "whole")
    assert without_probe(rows) == tiny.rows(tmp_path / "without")
    state = states["whole"]["hooks"]["online_probe"]["_teacher"]
    for name in ("whole", "without"):
        states[name]["hooks"].pop("online_probe", None)
        states[name].pop("history", None)
    assert tiny.differences(states["whole"], states["without"]) == []
    backbone = task.loss.teacher.network.backbone.eval()
    with torch.no_grad():
        right = [
            hits(state, pooled(backbone, batch.all_views[0]), batch.labels)
            for batch in task.data_module.test_samples()
        ]
    expected = float(torch.cat(right).mean())
    assert rows[-1]["probe_top1_teacher"] == pytest.approx(expected, abs=1e-6)
    assert any("train_probe_top1_teacher" in row for row in rows)


def test_the_teacher_is_probed_with_its_own_features(tmp_path: Path) -> None:
    """Their running mean by hand; they differ from the student's from the second step on."""
    seen: list[Tensor] = []
    words = ("hooks.online_probe={teacher: true}", "train.max_steps=4")
    task = tiny.task("byol", tmp_path, "run", *words)

    def keep(task: Task) -> None:
        seen.append(task.loss.teacher.network.embedding[: len(task.last_batch.labels)])

    task.add_hook(function_hook(priority=1, on_loss_and_meter=keep))
    train_loop(task)
    state = tiny.last_state(task.out)["hooks"]["online_probe"]
    mean = seen[0].mean(dim=0)
    for features in seen[1:]:
        mean = 0.9 * mean + 0.1 * features.mean(dim=0)
    torch.testing.assert_close(state["_teacher"]["mean"], mean)
    assert len(seen) == 4
    assert not torch.allclose(state["_teacher"]["mean"], state[""]["mean"])


def moco_on_ranks(_: int, folder: Path) -> str:
    words = ("hooks.online_probe={teacher: true}", "train.max_steps=2")
    task = tiny.task("moco", folder, "ranks", *words)
    task.world = World(rank(), world_size(), rank(), world_size())
    with pytest.raises(UserError) as caught:
        train_loop(task)
    return str(caught.value)


def test_a_teacher_that_sees_other_images_is_refused(tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    for message in run_ranks(moco_on_ranks, 2, tmp_path):
        assert "the teacher's features are not those of this rank's images" in message


def hits(state: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    spread = (state["variance"] + 1e-6 * state["variance"].mean()).sqrt()
    z = (x.float() - state["mean"]) / spread / x.shape[1] ** 0.5
    scores = z @ state["weights"][0, :, :-1].T + state["weights"][0, :, -1]
    return (scores.argmax(dim=1) == labels).float()


SWIN: dict[str, Any] = {"embed_dim": 12, "depths": (1, 2), "num_heads": (2, 2), "num_classes": 0}


@pytest.mark.parametrize(
    "build",
    [
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0),
        lambda: timm.create_model("resnet18", num_classes=0),
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=64, **SWIN),
        lambda: torchvision.models.resnet18(),
        lambda: torchvision.models.VisionTransformer(64, 32, 3, 2, 24, 48),
        lambda: torchvision.models.SwinTransformer([4, 4], 12, [1, 2], [2, 2], [7, 7]),
    ],
)
def test_outputs_of_a_pass_are_those_of_eval_layers(build: Any) -> None:
    backbone = build().eval()
    images = torch.randn(2, 3, *((64, 64) if "win" in type(backbone).__name__ else (32, 32)))
    if hasattr(backbone, "image_size"):
        images = torch.randn(2, 3, 64, 64)
    layers = PooledLayers(backbone, [0, 1, -1])
    with torch.no_grad():
        expected = layers(images).split(layers.widths, dim=1)
        outputs = LayerOutputs(backbone, [0, -1, 1])
        outputs.start()
        backbone(images)
        backbone(images + 1)  # a later pass, of other views
        taken = outputs.take()
        backbone(images)
        outputs.stop()
        backbone(images)
    assert outputs.take() == {}
    for number, rows in zip(layers.numbers, expected, strict=True):
        torch.testing.assert_close(taken[number], rows)


def test_the_embedding_of_grad_cache_is_in_view_order(tmp_path: Path) -> None:
    """Else half of the images would be learned with the labels of others."""
    task = tiny.task("simclr", tmp_path)
    task.prepare()
    task.base_model.eval()  # BatchNorm of chunks is another
    batch = next(task.data_module.train_batches(0))
    task.loss.prepare_batch(batch, task)
    task.base_model(batch.input)
    expected = task.base_model.embedding
    _forward(task, batch, [slice(0, 5), slice(5, 11), slice(11, 16)])
    torch.testing.assert_close(task.base_model.embedding, expected, rtol=1e-5, atol=1e-6)
    task.close()


def test_what_does_not_fit_is_told_before_training(tmp_path: Path) -> None:
    for words, text in {
        ("train.compile=model",): "layers: a compiled model shows no hidden layers",
        ("train.step=grad_cache",): r"layers: train\.step=grad_cache passes parts of a batch",
        ("hooks.online_probe.lr=[]",): r"lr=\[\]: one or more are expected",
        ("hooks.online_probe.lr=[0]",): "above 0",
    }.items():
        with pytest.raises(ConfigError, match=text):
            tiny.config("simclr", tmp_path, "run", PROBE, *words)
    for method in ("simclr", "data2vec"):  # no teacher, and one of hidden layers only
        task = tiny.task(method, tmp_path, method, "hooks.online_probe={teacher: true}")
        with pytest.raises(UserError, match=f"teacher: {method} has no EMA teacher with pooled"):
            train_loop(task)
    for words, text in {
        ("data.relabel=none",): "hooks.online_probe: the images of data have no labels",
        ("hooks.online_probe.layers=[9]",): "hooks.online_probe: layers: 9; the backbone has la",
    }.items():
        task = tiny.task("simclr", tmp_path, "run", PROBE, *words)
        with pytest.raises(UserError, match=text):
            train_loop(task)


def test_other_classes_at_a_resume_start_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, "run", PROBE, "train.stop_at=5")
    with caplog.at_level("WARNING", logger="selftask"):
        train(tmp_path, "run", "hooks.online_probe={layers: [1], lr: [1, 2, 3]}")
    assert "the probes start anew" in caplog.text
