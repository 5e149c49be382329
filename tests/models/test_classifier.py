"""Heads of classifiers from a config: chains of blocks, several heads, a head of another run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import MLP

import tiny
from minitask import TinyBackbone
from selftask.cli.main import main
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import Component, FrozenModule
from selftask.errors import ConfigError, UserError
from selftask.methods.multilabel import Multilabel
from selftask.models.build import build_backbone
from selftask.models.classifier.classifier import Classifier, build_chain
from selftask.models.features.extract import extract
from selftask.models.weights.trained import open_scores
from selftask.registry import HEAD_BLOCKS

E, C = 6, 4


def _random(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draws)


def _backbone() -> nn.Module:
    torch.manual_seed(1)
    return TinyBackbone()


def _chain(*blocks: dict[str, Any]) -> nn.Module:
    torch.manual_seed(2)
    return build_chain(blocks, E, C, "method.head").double()


# -- blocks ----------------------------------------------------------------------------------------


def test_no_blocks_are_one_linear_layer_bit_for_bit() -> None:
    for frozen in (False, True):
        torch.manual_seed(3)
        ours = Classifier(_backbone(), C, frozen=frozen).head
        torch.manual_seed(3)
        _backbone()
        theirs = nn.Linear(E, C)
        if frozen:
            nn.init.zeros_(theirs.bias)
            nn.init.normal_(theirs.weight, std=0.01)
        assert isinstance(ours, nn.Linear)
        assert tiny.differences(ours.state_dict(), theirs.state_dict()) == []


def test_the_bn_probe_is_that_of_mae() -> None:
    """models_mae's probe: BatchNorm1d(affine=False, eps=1e-6), then the linear layer."""
    head, x = _chain({"name": "bn_linear"}), _random(8, E).double()
    weights = {key: value for key, value in head.state_dict().items() if value.ndim}
    assert {tuple(value.shape) for value in weights.values()} == {(E,), (C, E), (C,)}
    normed = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-6).sqrt()
    linear = head[0][1]
    assert torch.allclose(head(x), normed @ linear.weight.T + linear.bias, atol=1e-12)
    wide = build_chain([{"name": "bn_linear"}], 500, 100, "method.head")
    assert wide[0][1].weight.std().item() == pytest.approx(0.01, rel=0.02)


def test_an_mlp_is_torchvisions() -> None:
    for norm, layer in ((False, None), (True, nn.BatchNorm1d)):
        head = _chain({"name": "mlp", "hidden_dims": [5, 7], "norm": norm})
        theirs = MLP(E, [5, 7, C], norm_layer=layer).double().eval()
        theirs.load_state_dict(
            dict(zip(theirs.state_dict(), head.state_dict().values(), strict=True))
        )
        x = _random(8, E).double()
        assert torch.allclose(head.eval()(x), theirs(x), atol=1e-12)


def test_a_chain_with_a_shortcut() -> None:
    head = _chain(
        {"name": "linear", "out_dim": 3},
        {"name": "residual_mlp", "hidden_dim": 5, "norm": False},
        {"name": "linear"},
    )
    x = _random(8, E).double()
    state = {key: value.numpy() for key, value in head.state_dict().items()}
    y = x.numpy() @ state["0.weight"].T + state["0.bias"]
    hidden = (y @ state["1.inner.0.weight"].T + state["1.inner.0.bias"]).clip(min=0)
    y = y + hidden @ state["1.inner.2.weight"].T + state["1.inner.2.bias"]
    expected = y @ state["2.weight"].T + state["2.bias"]
    assert abs(head(x).detach().numpy() - expected).max() < 1e-12


def test_pooled_tokens_are_those_of_timm() -> None:
    """DINOv2's probe on the last layer: the class token and the mean of the patches."""
    torch.manual_seed(0)
    vit = timm.create_model("test_vit", num_classes=0, img_size=32, reg_tokens=2).eval()
    vit.embed_dim = width = vit.num_features
    chain = build_chain([{"name": "pooled_tokens"}, {"name": "linear"}], width, C, "method.head")
    network = Classifier(vit, C, frozen=True, head=chain)
    images = _random(3, 3, 32, 32)
    with torch.no_grad():
        tokens = vit.forward_features(images)
        both = torch.cat([tokens[:, 0], tokens[:, 3:].mean(dim=1)], dim=1)
        assert torch.allclose(network(images), chain[1](both), atol=1e-6)
    cnn = build_backbone(Component(name="small_resnet", args={"width": 2}))
    chain = build_chain([{"name": "pooled_tokens"}, {"name": "linear"}], 8, C, "method.head")
    images = _random(3, 3, 32, 32)
    network = Classifier(cnn, C, frozen=False, head=chain).eval()
    pooled = extract(cnn, images).pooled
    assert torch.allclose(network(images), chain[1](torch.cat([pooled, pooled], 1)), atol=1e-6)


def test_two_views_side_by_side() -> None:
    """Of any sizes; each view has its place."""
    chain = build_chain([{"name": "concat_views", "num_views": 2}, {"name": "linear"}], E, C, "h")
    network = Classifier(_backbone(), C, frozen=False, head=chain)
    left, right = _random(3, 3, 8, 8), _random(3, 3, 6, 6, seed=1)
    features = [network.backbone(view) for view in (left, right)]
    expected = chain[1](torch.cat(features, dim=1))
    assert torch.allclose(network([left, right]), expected, atol=1e-6)
    assert not torch.allclose(network([right, left]), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([{"name": "linear", "out_dim": 9}], "method.head: ends with 9 outputs, and there are 4"),
        ([{"name": "residual_mlp"}], "ends with 6 outputs"),
        ([{"name": "linear"}, {"name": "pooled_tokens"}], r"method.head.1: pooled_tokens .* first"),
    ],
)
def test_blocks_that_do_not_fit(blocks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_chain(blocks, E, C, "method.head")


# -- in a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


HEADS = "method.heads={main: [{name: mlp, hidden_dims: [8]}], aux: [bn_linear]}"


def test_several_heads_add_their_losses(folder: Path) -> None:
    """Each a term by its name, with its weight; meters see the first one, or which they name."""
    words = [HEADS, "method.head_weights={aux: 0.25}", "train.epochs=1"]
    words += [f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"]
    words += ["meters={accuracy: {topk: [1]}, of_aux: {name: accuracy, topk: [1], head: aux}}"]
    words += ["method.loss_args={label_smoothing: 0.1}"]
    task = tiny.train("supervised", folder, "several", *words)
    last = [row for row in tiny.rows(folder / "several") if "main" in row][-1]
    assert last["main"] + last["aux"] == pytest.approx(last["loss"], rel=1e-5)
    task.base_model.eval()
    images, labels = [], []
    for batch in task.data_module.test_batches():
        images.append(batch.all_views[0]), labels.append(batch.labels)
    features = task.base_model.backbone(torch.cat(images))
    heads, label = task.base_model.head, torch.cat(labels)
    main_scores, aux_scores = heads["main"](features), heads["aux"](features)
    smooth = 0.9 * F.one_hot(label, 10) + 0.01
    main, aux = (-(smooth * s.log_softmax(1)).sum(1).mean() for s in (main_scores, aux_scores))
    expected = main + 0.25 * aux
    scored = task.score()
    assert scored["loss"] == pytest.approx(expected.item(), rel=1e-5)
    right = (main_scores.argmax(dim=1) == label).double().mean().item()
    assert scored["accuracy_top_1"] == pytest.approx(right)
    right = (aux_scores.argmax(dim=1) == label).double().mean().item()
    assert scored["of_aux_top_1"] == pytest.approx(right)
    assert task.loss.chance_loss == pytest.approx(1.25 * torch.tensor(10.0).log().item())
    task.close()


def test_a_meter_of_no_head(folder: Path) -> None:
    for heads, hint in (([HEADS], "did you mean 'aux'"), ([], "there are none")):
        with pytest.raises(ConfigError, match=f"'auxx' is not in method.heads; .*{hint}"):
            tiny.config("supervised", folder, "no", *heads, "meters.accuracy={head: auxx}")


def test_heads_have_rates_and_decays_of_their_own(folder: Path) -> None:
    """A grid of linear probes on one frozen backbone: each as a plain step of SGD."""
    words = ["method.heads={a: [linear], b: [linear], c: [linear]}", "method.freeze_backbone=true"]
    words += ["optimizer={name: sgd, lr: 0.1, schedule: constant, warmup: 0, weight_decay: 0}"]
    words += ["optimizer.groups=[{match: network.head.b, lr: 3.0}, {match: network.head.c, "]
    words[-1] += "lr: 0.5, weight_decay: 0.2}]"
    task = tiny.task("supervised", folder, "grid", *words, "train.max_steps=1")
    task.prepare()
    first = copy.deepcopy(task.base_model)
    task.on_start(), task.on_phase_start(), task.step()
    labels = task.last_batch.labels
    features = first.backbone.eval()(task.last_batch.input).detach()
    for name, lr, decay in (("a", 0.1, 0.0), ("b", 0.3, 0.0), ("c", 0.05, 0.2)):
        head = first.head[name]
        F.cross_entropy(head(features), labels).backward()
        for parameter, ours in zip(
            head.parameters(), task.base_model.head[name].parameters(), strict=True
        ):
            step = parameter.grad + decay * parameter.detach()
            assert torch.allclose(ours, parameter - lr * step, atol=1e-6), name
    task.close()


def test_pairs_of_images_train(folder: Path) -> None:
    words = ["method.head=[concat_views, linear]", "views.main.count=2", "train.epochs=1"]
    task = tiny.train("supervised", folder, "pairs", *words)
    assert task.losses[-1] < task.losses[0]
    assert task.base_model.head[1].in_features == 2 * task.base_model.backbone.embed_dim
    task.close()


def test_a_chain_resumes_and_teaches(folder: Path) -> None:
    """Bit for bit; its scores are those that `distill` reads."""
    words = [
        "method.head=[{name: linear, out_dim: 12}, {name: residual_mlp, hidden_dim: 5}, linear]"
    ]
    words += ["train.epochs=1"]
    whole = tiny.train("supervised", folder, "whole", *words)
    for stop in ("2", "null"):
        tiny.train("supervised", folder, "parts", *words, f"train.stop_at={stop}").close()
    states = [tiny.last_state(folder / out) for out in ("whole", "parts")]
    assert tiny.differences(*states) == []
    teacher, images = open_scores(FrozenModule(model=str(folder / "whole"))), _random(2, 3, 32, 32)
    with torch.no_grad():
        expected = whole.base_model.eval()(images)
        assert torch.allclose(teacher.network.eval()([images])[0], expected, atol=1e-6)
    whole.close()


def test_the_head_of_another_run_is_loaded_and_scored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frozen backbone and head, as evaluated by a test phase before any step."""
    words = ["method.head=[mlp]", "train.epochs=1"]
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    first = tiny.train("supervised", folder, "first", *words)
    address = folder / "first"
    start = [f"init.backbone={address}", "init.head=true", "method.freeze_backbone=true"]
    task = tiny.task("supervised", folder, "second", *words, *start, val)
    task.prepare()
    trained, loaded = first.base_model.state_dict(), task.base_model.state_dict()
    assert tiny.differences(dict(trained), dict(loaded)) == []
    assert not any(p.requires_grad for p in task.base_model.backbone.parameters())
    scored = task.score()
    task.close()
    (address / "config.yaml").write_text(to_yaml(first.config))
    first.close()
    assert main(["test", str(address), val.replace("data.val", "data")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["loss"] == pytest.approx(scored["loss"], rel=1e-6)
    assert printed["accuracy_top_1"] == pytest.approx(scored["accuracy_top_1"])
    for wrong, message in (
        (["init.backbone=timm:test_vit", "init.head=true"], "timm:test_vit has no head"),
        (["init.head=true"], "init.head=True has no effect without init.backbone"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny.config("supervised", folder, "third", *wrong)
    task = tiny.task("supervised", folder, "fourth", *start)
    with pytest.raises(UserError, match=r"init\.head: the head of .* is not .* Missing key"):
        task.prepare()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method.head=[lnear]"], "no head_block named 'lnear'; did you mean 'linear'"),
        (["method.head=[{name: mlp, hidden: 3}]"], "unknown key 'method.head.0.hidden'"),
        (["method.heads={a: [{name: mlp, hidden_dims: [0]}]}"], r"heads\.a\.0\.hidden_dims"),
        ([HEADS, "method.head=[linear]"], "heads: there is method.head, too"),
        (
            [HEADS, "method.head_weights={other: 1}"],
            "head_weights.other: no such head .* main, aux",
        ),
        ([HEADS, "train.step=grad_cache"], "heads: train.step=grad_cache divides one output"),
        (["views.main.count=2"], "supervised needs 1 view of an image, got 2; .* concat_views"),
        (["method.head=[concat_views, linear]"], "supervised needs 2 views of an image, got 1"),
        (["method.heads={a: []}"], "heads.a: a list of blocks is expected"),
    ],
)
def test_mistakes_in_the_config(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("supervised", words)


def test_a_backbone_without_patches_is_told() -> None:
    config = Multilabel.Config(
        targets=["a", "b"], head=[{"name": "pooled_tokens"}, {"name": "linear"}]
    )
    task: Any = None
    with pytest.raises(UserError, match="pooled_tokens needs patch tokens"):
        Multilabel(config).build_network(_backbone(), task)


def test_every_block_is_tried_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in text or f"[{name}]" in text for name in HEAD_BLOCKS)


class Own:
    """No attribute but ``build``, as docs/finetune.md says."""

    def build(self, width: int, num_classes: int) -> Any:
        return nn.Linear(width, 5), 5


class OnlyModule:
    def build(self, width: int, num_classes: int) -> Any:
        return nn.Linear(width, num_classes)


class OtherArguments:
    def build(self, width: int) -> Any:
        return nn.Linear(width, C), C


def test_a_block_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Own, OnlyModule, OtherArguments):
        monkeypatch.setitem(HEAD_BLOCKS._registered, kind.__name__, kind)
    chain = build_chain([{"name": "Own"}, {"name": "linear"}], E, C, "method.head")
    assert chain(torch.zeros(2, E)).shape == (2, C)
    match = r"test_classifier.py:\d+: build of method.head.0 returned Linear; the module and its nu"
    with pytest.raises(UserError, match=match):
        build_chain([{"name": "OnlyModule"}], E, C, "method.head")
    match = r"test_classifier.py:\d+: build of method.head.0 is called with \(width, num_classes\)"
    with pytest.raises(UserError, match=match):
        build_chain([{"name": "OtherArguments"}], E, C, "method.head")
