"""``selftask adapt``: what it chooses, and what it says at the end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.cli.adapt.choices import choose_method, choose_schedule, choose_side
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.models.weights.model_source import open_model
from selftask.plan.memory import USABLE


def facts(model: str, side: int = 224, method: str = "timm") -> dict[str, Any]:
    library = {"name": "timm", "args": {"model": model, "args": {}}}
    return {"architecture": library, "input_size": side, "method": method}


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("vit_small_patch14_dinov2", "dinov2"),
        ("vit_small_patch16_dinov3", "dinov3"),
        ("vit_base_patch16_224.mae", "mae"),
        ("vit_base_patch32_clip_224.openai", "dino"),
        ("vit_small_patch16_224.augreg_in21k", "dino"),
        ("resnet50.a1_in1k", "moco"),
        ("convnext_tiny.dinov3_lvd1689m", "moco"),
    ],
)
def test_the_method_follows_from_the_model(model: str, method: str) -> None:
    assert choose_method(facts(model))[0] == method


def test_a_run_is_continued_by_its_method_unless_it_needs_labels() -> None:
    assert choose_method(facts("vit_small_patch16_224", method="ijepa"))[0] == "ijepa"
    for trained in ("supervised", "multilabel", "supcon", "clip", "siglip"):
        assert choose_method(facts("vit_small_patch16_224", method=trained))[0] == "dino"


def test_sides_are_multiples_of_the_patch() -> None:
    (choice,) = choose_side(facts("vit_small_patch14_dinov2", 518))
    assert choice.value == 224 and choice.value % 14 == 0
    assert choose_side(facts("vit_base_patch16_224", 96))[0].value == 96


def test_more_images_need_fewer_epochs() -> None:
    epochs = [
        next(c.value for c in choose_schedule(n, 64, is_small=False, has_layers=True))
        for n in (1_000, 10_000, 100_000, 1_000_000)
    ]
    assert epochs == sorted(epochs, reverse=True) and len(set(epochs)) == 4


def test_bad_arguments_of_adapt_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["data=digits"], "adapt needs a run or model before any key=value"),
        (["timm:resnet18"], "adapt: data is missing"),
        (["timm:resnet18", "data=digits", "weights=none"], "weights=none are random"),
        (["timm:resnet81", "data=digits"], "did you mean"),
    ):
        assert main(["adapt", *words]) == 2
        error = capfd.readouterr().err
        assert text in error and "Traceback" not in error


@pytest.mark.slow
def test_memory_decides_between_all_weights_and_lora(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["adapt", "timm:vit_small_patch14_dinov2", "data=digits", "--dry-run"]
    words += ["train.precision=float32"]  # not by this CPU
    assert main([*words, "memory=40GB", "train.epochs=3"]) == 0
    printed = capfd.readouterr().out
    assert "backbone.lora" not in printed and "optimizer.layer_decay=0.8" in printed
    assert "train.epochs=100: 1,347 images (overridden)" in printed
    assert main([*words, "memory=12GB"]) == 0
    printed = capfd.readouterr().out
    assert "backbone.lora={rank: 8}: all weights need" in printed
    assert main([*words, "memory=100MB"]) == 2
    assert "even LoRA" in capfd.readouterr().err


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a transformer on digits, for a few steps."""
    folder = tmp_path_factory.mktemp("start")
    words = ["backbone=vit_micro", "image_size=16", "train.max_steps=30", "train.batch_size=64"]
    here = ["train.threads=1", "data.num_workers=0", f"out={folder / 'run'}"]
    assert main(["train", "simclr/digits", *words, *here]) == 0
    return folder / "run"


def adapted(start: Path | str, out: Path, *more: str) -> int:
    data = ["data=digits", "data.val={name: digits, split: val}"]
    here = ["train.threads=1", "data.num_workers=0", "train.batch_size=32", f"out={out}"]
    return main(["adapt", str(start), *data, *here, *more])


@pytest.mark.slow
def test_what_harms_is_said_and_not_exported(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rate that destroys the features: the export has the weights of the start."""
    out = tmp_path / "harmed"
    harm = ["optimizer.lr=0.1", "optimizer.groups=[]", "hooks.preserve.weight=0"]
    assert adapted(start, out, *harm, "train.max_steps=10") == 0
    printed = capfd.readouterr().out
    assert "adapt: the features are worse than at the start; export/ has those of the start" in (
        printed
    )
    theirs, about = open_model(str(start))
    ours, facts_of = open_model(str(out / "export/backbone.pt"))
    assert facts_of["step"] == 0 and about["architecture"] == facts_of["architecture"]
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    scores = [row["knn_top1"] for row in tiny.rows(out) if "knn_top1" in row]
    assert scores[0] == max(scores) > scores[-1]
    assert adapted(start, out, *harm, "train.max_steps=10") == 0  # finished already
    assert "worse than at the start" in capfd.readouterr().out


@pytest.mark.slow
def test_the_rate_follows_from_overrides(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dry = (start, tmp_path / "dry", "--dry-run")
    assert adapted(*dry, "train.batch_size=16", "train.step=accumulate", "train.accumulate=3") == 0
    printed = capfd.readouterr().out
    assert "lr={base: 0.0001," in printed and "already; for 48 images a step" in printed
    assert adapted(*dry, "backbone.lora.rank=4") == 0
    printed = capfd.readouterr().out
    assert "lr={base: 0.001," in printed and "from 0; for 32 images a step" in printed
    assert "layer_decay" not in printed


@pytest.mark.slow
def test_a_resumed_run_keeps_its_choices(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if there is more free memory than before."""
    out = tmp_path / "resumed"
    short = ["train.max_steps=4", "hooks.early_stopping=null"]
    assert adapted(start, out, "memory=1MB") == 2
    least = re.search(r"even LoRA .* needs ([\d.]+) MB", capfd.readouterr().err)
    assert least is not None
    little = f"memory={1.01 * float(least[1]) / USABLE}MB"
    assert adapted(start, out, *short, "train.stop_at=2", little) == 75
    assert "backbone.lora={rank: 8}: all weights need" in capfd.readouterr().out
    assert adapted(start, out, *short) == 0
    printed = capfd.readouterr().out
    assert "adapt: backbone.lora={rank: 8" in printed and "as the run began" in printed
    assert "all weights need" not in printed and "cosine of the features" in printed
    saved = load_config(str(out / "config.yaml"), [])
    assert saved.backbone.lora is not None and saved.optimizer.lr.base == 1e-3


@pytest.mark.slow
def test_the_best_weights_are_exported(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "adapted"
    assert adapted(start, out, "train.max_steps=40", "backbone.lora.rank=4") == 0
    printed = capfd.readouterr().out
    scores = {row["step"]: row["knn_top1"] for row in tiny.rows(out) if "knn_top1" in row}
    best = max(scores, key=lambda step: (scores[step], -step))
    last = max(scores)
    exported = json.loads((out / "export/backbone.json").read_text())["step"]
    assert exported in (best, last) and scores[exported] == scores[best]
    assert f"k-NN {scores[0]:.4f} at the start, {scores[best]:.4f} at best" in printed
    assert "cosine of the features and those at the start: " in printed
