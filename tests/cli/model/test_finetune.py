"""``selftask finetune``: a run's backbone, trained on labels as the run has shown images to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from selftask.checkpoint import rotation, store
from selftask.cli.main import main
from selftask.cli.model.finetune import RECIPE, recipe_words
from selftask.config.load import load_config
from selftask.config.schema import Component, Config
from selftask.config.schema.component import BackboneComponent
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of 64 pixels, as a run on photographs leaves it."""
    args = {"img_size": 64, "patch_size": 16, "depth": 1, "pool": "avg"}
    meta = {
        "architecture": {"name": "vit_tiny", "args": args},
        "input_size": 64,
        "transforms": [
            {"name": "resize", "size": 80, "interpolation": "bicubic"},
            {"name": "center_crop", "size": 64},
            {"name": "normalize", "mean": MEAN, "std": STD},
        ],
    }
    component = Component(name="vit_tiny", args=args)
    return save_backbone(build_backbone(component), tmp_path_factory.mktemp("vit"), meta)


def resolved(address: object, *words: str) -> Config:
    return load_config(RECIPE, recipe_words(str(address), list(words)))


def test_backbone_size_and_normalization_are_the_model_s(exported: Path) -> None:
    config = resolved(exported, "data=no/such/folder")
    assert config.backbone.args["img_size"] == 64 and config.backbone.args["pool"] == "avg"
    assert config.init.backbone == str(exported) and config.out == "runs/finetune_backbone"
    crop, _, normalize = config.views["main"].transforms
    assert crop.args["size"] == 64 and normalize.args["mean"] == MEAN
    assert [t.args.get("size") for t in config.eval.transforms] == [80, 64, None]
    larger = resolved(exported, "data=no/such/folder", "image_size=128", "optimizer.lr=0.01")
    assert larger.backbone.args["img_size"] == 128 and larger.optimizer.lr == 0.01
    assert larger.views["main"].transforms[0].args["size"] == 128
    assert [t.args.get("size") for t in larger.eval.transforms] == [160, 128, None]


def test_a_file_of_others_by_its_model(exported: Path) -> None:
    words = ["weights=my weights.pth", "data=no/such/folder"]
    with pytest.raises(UserError, match=r"weights=my weights.pth: there is no such file"):
        resolved("torchvision:resnet18", *words)
    words[0] = f"weights={exported}"
    config = resolved("torchvision:resnet18", *words)
    assert config.init.backbone == str(exported)
    args = {"model": "resnet18", "args": {}}
    assert config.backbone == BackboneComponent(name="torchvision", args=args)


def test_from_a_run_on_the_images_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the run, labels that it has not used, and its own images; a new classifier."""
    monkeypatch.chdir(tmp_path)
    words = tiny.overrides("simclr", tmp_path, "pretrained", "train.epochs=1")
    assert main(["train", "simclr/digits", *words]) == 0
    val = tiny.digits_file(tmp_path, "val.npz", 80, 120)
    words = ["finetune", "pretrained", f"data.val={val}", "train.batch_size=16", "train.epochs=2"]
    words += ["train.threads=1", "data.num_workers=0", "train.device=cpu"]
    assert main([*words, "method.freeze_backbone=true", "train.checkpoint_every='1 steps'"]) == 0
    out = tmp_path / "runs/finetune_pretrained"
    state, earlier = (store.load(p)["model"] for p in rotation.checkpoints(out / "checkpoints")[:2])
    before = torch.load(tmp_path / "pretrained/export/backbone.pt")
    assert all(torch.equal(state[f"backbone.{key}"], before[key]) for key in before)
    assert not torch.equal(state["head.weight"], earlier["head.weight"])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= rows[-1]["test_accuracy_top_1"] <= 1
    config = load_config(str(out / "config.yaml"), [])
    pretrained = load_config(str(tmp_path / "pretrained/config.yaml"), [])
    assert config.views["main"].transforms == pretrained.eval.transforms
    assert config.data.source == pretrained.data.source
    step = rotation.step_of(rotation.checkpoints(tmp_path / "pretrained/checkpoints")[0])
    assert resolved(f"pretrained@{step}").data.source == pretrained.data.source


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no such file or run"),
        (["torchvision:resnet19", "data=digits"], "did you mean 'resnet1"),
        (["torchvision:resnet18", "image_size=big"], "expected a whole number of pixels"),
        (["data=digits"], "needs a run or model"),
        (["torchvision:resnet18", "weights=none"], "data is missing"),
        (["torchvision:resnet18", "weights=none", "data=digits", "train.epoch=3"], "train.epochs"),
    ],
)
def test_bad_arguments_of_finetune_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", *words]) == 2
    assert message in capsys.readouterr().err


def test_code_of_a_received_model_is_refused(exported: Path, tmp_path: Path) -> None:
    facts = json.loads(exported.with_suffix(".json").read_text())
    facts["architecture"] = {"name": "custom", "args": {"model": "os:system", "args": {}}}
    (tmp_path / "backbone.pt").write_bytes(exported.read_bytes())
    (tmp_path / "backbone.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="os:system"):
        recipe_words(str(tmp_path / "backbone.pt"), ["data=digits"])


@pytest.mark.slow
def test_few_labels_are_worth_more_after_pretraining(tmp_path: Path) -> None:
    """100 labeled digits: a short pretraining on all images wins over random weights."""
    one = ("train.threads=1", "data.num_workers=0")
    words = [*one, "train.epochs=25", f"out={tmp_path / 'simclr'}"]
    assert main(["train", "simclr", *words]) == 0
    top1 = {}
    for name, start in (("pretrained", ()), ("scratch", ("init.backbone=null",))):
        out = tmp_path / name
        subset = "data.subset={count: 10, per_class: true}"
        words = [str(tmp_path / "simclr"), subset, *one, *start, f"out={out}"]
        assert main(["finetune", *words]) == 0
        rows = (out / "metrics.jsonl").read_text().splitlines()
        top1[name] = json.loads(rows[-1])["test_accuracy_top_1"]
    assert top1["pretrained"] >= top1["scratch"] + 0.1  # 0.52 and 0.35; after 80 epochs 0.79
