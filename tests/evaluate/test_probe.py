"""Probes by the protocols of papers: beside plain torch, timm, and torch's attention."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import stats
from torch import Tensor, nn

import selftask
from page_blocks import ROOT
from selftask.cli.main import main
from selftask.config.run_length import RunLength
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.evaluate.probe.heads import AttentiveHead, HeadGrid, LinearHead, normalization
from selftask.evaluate.probe.inputs import Input, ProbeInputs, augmented, regrouped
from selftask.evaluate.probe.protocols import PROTOCOLS
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone
from selftask.optim.optimizers.lars import LARS
from selftask.optim.schedules import build_schedule

GRID = [(0.1, 0.0), (0.1, 0.01), (1.0, 0.01)]  # lr, weight decay


def _batches(*shape: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    target = torch.arange(12) % 3
    return [
        (drawn.double() + target.view(12, *[1] * len(shape)), target)
        for drawn in (torch.randn(12, *shape, generator=draws) for _ in range(8))
    ]


def _alone(optimizer: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    if optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    if optimizer == "lars":
        adapted = [{"adapt": n == 0, **group} for n, group in enumerate(groups)]
        return LARS(adapted, lr=lr, trust_coefficient=0.1)
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
@pytest.mark.parametrize("attentive", [False, True])
def test_each_head_of_the_grid_is_as_if_trained_alone(optimizer: str, attentive: bool) -> None:
    torch.manual_seed(0)
    head = (AttentiveHead(6, 3, queries=2) if attentive else LinearHead(6, 3)).double()
    options = {"sgd": {"nesterov": True}, "lars": {"trust_coefficient": 0.1}}.get(optimizer, {})
    grid = HeadGrid(head, normalization("batch", 6).double(), GRID, optimizer, options)
    batches = _batches(*((4, 6) if attentive else (6,)))
    for number, (x, target) in enumerate(batches):
        grid.fit(x, target, 1 - number / 8)
    for index, (lr, decay) in enumerate(GRID):
        alone = copy.deepcopy(head)
        norm = nn.BatchNorm1d(6, eps=1e-6, affine=False).double()
        weights = [p for p in alone.parameters() if p.ndim > 1]
        groups = [
            {"params": weights, "weight_decay": decay},
            {"params": [alone.linear.bias], "weight_decay": 0.0},
        ]
        steps = _alone(optimizer, groups, lr)
        for number, (x, target) in enumerate(batches):
            for group in steps.param_groups:
                group["lr"] = lr * (1 - number / 8)
            steps.zero_grad()
            rows = norm(x.reshape(-1, 6)).view_as(x)
            F.cross_entropy(alone(rows), target).backward()
            steps.step()
        for name, value in alone.named_parameters():
            torch.testing.assert_close(grid.stacked[name][index], value, atol=1e-9, rtol=1e-7)
        x, target = batches[0]
        correct = alone(norm.eval()(x.reshape(-1, 6)).view_as(x)).argmax(dim=1) == target
        assert torch.equal(grid.hits(x, target)[index], correct)
    moved = (grid.stacked["linear.weight"][0] - head.linear.weight).abs().max()
    assert moved > 1e-3


@pytest.mark.parametrize(("width", "heads"), [(128, 2), (96, 1)])
def test_attentive_pooling_is_torchs_attention_without_other_projections(
    width: int, heads: int
) -> None:
    torch.manual_seed(0)
    head = AttentiveHead(width, 5, queries=3).double()
    patches = torch.randn(4, 7, width, dtype=torch.float64)
    reference = nn.MultiheadAttention(width, heads, bias=False, batch_first=True).double()
    eye = torch.eye(width, dtype=torch.float64)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([eye, head.key.weight, head.value.weight]))
        reference.out_proj.weight.copy_(eye)
        pooled = reference(head.query.expand(4, -1, -1), patches, patches)[0].mean(dim=1)
        torch.testing.assert_close(head(patches), head.linear(pooled), atol=1e-12, rtol=1e-10)


def test_batches_have_the_size_and_rows_keep_their_order() -> None:
    parts = [(torch.arange(a, b), torch.arange(a, b) % 2) for a, b in ((0, 3), (3, 4), (4, 11))]
    rows = [x.tolist() for x, _ in regrouped(parts, 4)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small transformer, twenty images to learn from and twenty to test on."""
    home = tmp_path_factory.mktemp("probe")
    torch.manual_seed(0)
    args = {"img_size": 32, "patch_size": 16, "depth": 3}
    component = Component(name="vit_tiny", args=args)
    transforms = [
        {"name": "resize", "size": 32},
        {"name": "center_crop", "size": 32},
        {"name": "normalize", "stats": "half"},
    ]
    meta = {"architecture": {"name": "vit_tiny", "args": args}, "transforms": transforms}
    save_backbone(build_backbone(component), home / "export", meta)
    draws = np.random.default_rng(0)
    for number in range(40):
        folder = home / ("train", "val")[number // 20] / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 160, (40, 40, 3)) + 60 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    return home


def _words(home: Path, *words: str) -> list[str]:
    data = [f"data={home / 'train'}", f"data.val={home / 'val'}"]
    model = str(home / "export" / "backbone.pt")
    return ["eval", "linear", model, *data, "train.device=cpu", "data.num_workers=0", *words]


def _row(home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main(_words(home, *words)) == 0, capsys.readouterr().err
    row: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return row


def test_blocks_and_poolings_are_timms(home: Path) -> None:
    """Each block has the final norm, as in DINOv2's ``get_intermediate_layers``."""
    from selftask.cli.model.load_model import open_frozen

    frozen = open_frozen(str(home / "export" / "backbone.pt"), [f"data={home / 'train'}"])
    kinds = [Input(p, b) for p, b in (("class", 2), ("mean", 2), ("both", 1), ("attentive", 1))]
    backbone = frozen.backbone.eval()
    inputs = ProbeInputs(backbone, kinds, frozen.config, frozen.device)
    images = torch.randn(3, 3, 32, 32)
    before, last = backbone.forward_intermediates(images, indices=2, norm=True, output_fmt="NLC",
                                                  return_prefix_tokens=True,
                                                  intermediates_only=True)  # fmt: skip
    final = backbone.forward_features(images)
    cls, mean = final[:, 0], final[:, 1:].mean(dim=1)
    expected = [
        torch.cat([before[1][:, 0], cls], dim=1),
        torch.cat([before[0].mean(dim=1), mean], dim=1),
        torch.cat([cls, mean], dim=1),
        final[:, 1:],
    ]
    assert last[0].shape == before[0].shape
    for actual, wanted in zip(inputs._features(images), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_a_protocol_is_plain_training_on_its_features(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MoCo's protocol, with all images in each step; by torch's own classes."""
    from selftask.cli.model.load_model import open_frozen

    row = _row(home, capsys, "protocol=moco", "augment=false", "lr=[3]")
    frozen = open_frozen(str(home / "export" / "backbone.pt"), [f"data={home / 'train'}"])
    x, test = (
        torch.stack(
            [
                torch.tensor(np.asarray(Image.open(path).resize((32, 32), 2))).permute(2, 0, 1)
                for path in sorted((home / part).rglob("*.png"))
            ]
        )
        for part in ("train", "val")
    )
    backbone = frozen.backbone.eval()
    with torch.no_grad():
        x, test = (backbone.forward_features(part / 127.5 - 1)[:, 0] for part in (x, test))
    y = torch.arange(20) // 10
    linear = nn.Linear(x.shape[1], 2)
    nn.init.zeros_(linear.weight)
    optimizer = torch.optim.SGD(linear.parameters(), lr=3 * 20 / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [60, 80])
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(linear(x), y).backward()
        optimizer.step()
        schedule.step()
    expected = float((linear(test).argmax(dim=1) == y).float().mean())
    assert expected > 0.7, "else this shows nothing"
    assert row["probe_moco_top1"] == pytest.approx(expected, abs=0.051)


PUBLISHED: dict[str, dict[str, Any]] = {  # the sections of the papers named in protocols.py
    "dinov2": {
        "optimizer": ("sgd", {}),
        "epochs": 10,
        "batch_size": 1024,
        "blocks": [1, 4],
        "pool": ["class", "both"],
        "norm": "none",
    },
    "mae": {
        "optimizer": ("lars", {}),
        "epochs": 90,
        "batch_size": 16_384,
        "lr": [0.1],
        "weight_decay": [0.0],
        "norm": "batch",
    },
    "moco": {
        "optimizer": ("sgd", {}),
        "epochs": 100,
        "batch_size": 256,
        "lr": [30.0],
        "weight_decay": [0.0],
        "norm": "none",
    },
    "simclr": {
        "optimizer": ("sgd", {"nesterov": True}),
        "epochs": 90,
        "batch_size": 4096,
        "lr": [0.1],
        "weight_decay": [0.0],
        "norm": "none",
    },
    "vissl": {
        "optimizer": ("sgd", {"nesterov": True}),
        "epochs": 28,
        "batch_size": 256,
        "lr": [0.01],
        "weight_decay": [0.0005],
        "norm": "batch",
    },
}
DINOV2_RATES = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_protocols_are_those_of_the_papers(name: str) -> None:
    """Learning rates of MoCo and VISSL drop to a tenth; the others decay by a cosine."""
    protocol = PROTOCOLS[name]
    published = {**PUBLISHED[name]}
    assert (protocol.optimizer, protocol.options) == published.pop("optimizer")
    assert {key: getattr(protocol, key) for key in published} == published
    if name == "dinov2":
        assert protocol.lr == pytest.approx(DINOV2_RATES)
        assert LinearHead(2000, 10).linear.weight.std().item() == pytest.approx(0.01, rel=0.03)
    length = RunLength(2560, 256, epochs=protocol.epochs)  # 10 steps an epoch
    factor = build_schedule(protocol.schedule, length)

    def expected(progress: float) -> float:
        epoch = progress * protocol.epochs
        if milestones := {"moco": (60, 80), "vissl": (8, 16, 24)}.get(name):
            return 0.1 ** sum(epoch >= end for end in milestones)
        warmup = 10 if name == "mae" else 0
        if epoch < warmup:
            return epoch / warmup
        rest = (epoch - warmup) / (protocol.epochs - warmup)
        return (1 + math.cos(math.pi * rest)) / 2

    for progress in (0, 0.05, 0.3, 0.59, 0.605, 0.79, 0.81, 0.86, 0.99):
        assert factor(progress) == pytest.approx(expected(progress), rel=1e-6), progress


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_protocols_repeat_with_new_crops_in_each_epoch(
    protocol: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"protocol={protocol}", "epochs=2", "batch_size=4"]
    if protocol == "dinov2":
        words.append("blocks=[1,3]")
    row = _row(home, capsys, *words)
    assert row == _row(home, capsys, *words)
    low, high = (row[f"probe_{protocol}_top1_{end}"] for end in ("low", "high"))
    assert low <= row[f"probe_{protocol}_top1"] <= high
    settings = PROTOCOLS[protocol]
    assert row[f"probe_{protocol}_lr"] in settings.lr
    is_grid = len(settings.lr) * len(settings.pool) > 1
    assert (f"probe_{protocol}_held_out_top1" in row) == is_grid


def test_seeds_are_repeated_runs_and_have_an_interval(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["protocol=dinov2", "blocks=[1]", "epochs=1", "batch_size=4", "lr=[0.00001,0.00002]"]
    rows = [_row(home, capsys, *words, f"seed={seed}") for seed in (3, 4, 5)]
    row = _row(home, capsys, *words, "seed=3", "seeds=3")
    for name in ("probe_dinov2_top1", "probe_dinov2_held_out_top1"):
        values = [each[name] for each in rows]
        assert row[name] == pytest.approx(np.mean(values))
        half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / 3**0.5
        ends = [row[f"{name}_seeds_{end}"] for end in ("low", "high")]
        assert ends == pytest.approx([np.mean(values) - half, np.mean(values) + half])
    assert len({each["probe_dinov2_top1"] for each in rows}) > 1, "else seeds do nothing"
    assert not any("_lr" in name for name in row), "each seed may choose another"


def test_each_validation_set_has_the_figures_it_has_alone(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, other in ("ab", "ba"):
        shutil.copytree(home / "val" / name, tmp_path / other)
    words = ["protocol=moco", "augment=false", "epochs=3", "batch_size=4"]
    sets = f"data.val_sets={{swapped: {tmp_path}, again: {home / 'val'}}}"
    alone = _row(home, capsys, *words)
    row = _row(home, capsys, *words, sets)
    for end in ("", "_low", "_high"):
        name = f"probe_moco_top1{end}"
        assert row[name] == row[f"again/{name}"] == alone[name] > 0.6
    assert row["swapped/probe_moco_top1"] == pytest.approx(1 - alone["probe_moco_top1"])
    without = _row(home, capsys, *words, "data.val=null", sets)
    assert "probe_moco_top1" not in without
    assert without["again/probe_moco_top1"] == alone["probe_moco_top1"]


class Read:
    """The images of a folder; their labels are known after reading only."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.png"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        label = 7 + 5 * (self.paths[index].parent.name == "b")
        return np.asarray(Image.open(self.paths[index])), label


def test_labels_may_be_known_after_reading_only(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"protocol": "moco", "epochs": 3, "batch_size": 4, "train.device": "cpu"}
    row = selftask.evaluate(
        home / "export" / "backbone.pt",
        "linear",
        data=Read(home / "train"),
        data_val=Read(home / "val"),
        **words,
    )
    known = _row(home, capsys, "protocol=moco", "epochs=3", "batch_size=4")
    assert row["probe_moco_top1"] == known["probe_moco_top1"]


def test_crops_are_of_the_epoch(home: Path) -> None:
    from selftask.cli.model.load_model import open_frozen

    frozen = open_frozen(str(home / "export" / "backbone.pt"), [f"data={home / 'train'}"])
    inputs = ProbeInputs(frozen.backbone.eval(), [Input("class", 1)], frozen.config, frozen.device)
    train = frozen.sources.train
    first, again, second = (next(inputs.batches(train, "data", [3, 1], s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, second)
    swapped = next(inputs.batches(train, "data", [1, 3], 1))[0]
    torch.testing.assert_close(swapped, first.flip(0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["protocol=mea"], "protocol"),
        (["protocol=mae", "lr=[]"], "lr=[]: one or more are expected"),
        (["protocol=mae", "lr=[0]"], "lr"),
        (["protocol=mae", "few_labels=[1]"], "there is no 'few_labels'"),
        (["protocol=dinov2"], "blocks: 4; a VisionTransformer has 3; use at most 3"),
        (["protocol=mae", "data.val=null"], "data.val is missing"),
        (["protocol=mae", "data.relabel=none"], "probe, data: 20 of 20 images have no label"),
        (["protocol=mae", "eval.transforms=[normalize]"], "use augment=false"),
    ],
)
def test_mistakes_are_one_message(
    words: list[str], message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words(home, *words)) == 2
    assert message in capsys.readouterr().err


def test_random_crops_need_a_size() -> None:
    with pytest.raises(UserError, match="augment"):
        augmented([Component(name="normalize", args={})])


def test_the_output_is_that_of_the_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = _row(home, capsys, "protocol=dinov2", "blocks=[1,2]", "augment=false")
    lines = (ROOT / "docs" / "evaluation.md").read_text().splitlines()
    sample = next(line for line in lines if line.startswith('{"probe_dinov2_top1"'))
    assert list(json.loads(sample)) == list(row)
