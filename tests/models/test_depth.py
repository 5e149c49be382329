"""Layers and rates of `layer_decay`: beside timm's, and beside the description in the papers."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torchvision
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay
from torch import nn

import tiny
from selftask.config.run_length import RunLength
from selftask.config.schema.optimizer import OptimizerConfig
from selftask.errors import UserError
from selftask.models.depth import parameter_depths
from selftask.optim.param_groups import assign_settings
from selftask.parallel.blocks import find_blocks

SMALL = {
    "vit_tiny_patch16_224": {"depth": 3, "embed_dim": 24, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {
        "depths": (1, 1, 2, 1),
        "embed_dim": 12,
        "num_heads": (1,) * 4,
    },
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (8, 8, 8, 8)},
    "resnet18": {},
}


class Classifier(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize("name", SMALL)
def test_rates_of_layers_are_timms(name: str) -> None:
    """For a classifier of theirs, and our network of the same backbone and a head.

    But for the norm after the last block, which timm counts with that block.
    """
    backbone = timm.create_model(name, num_classes=0, **SMALL[name])
    depths = parameter_depths(backbone, find_blocks(backbone))
    config = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.05, layer_decay=0.75)
    ours = {
        one.parameter.name.removeprefix("network.backbone."): (one.lr, one.weight_decay)
        for one in assign_settings(
            [("network", Classifier(backbone))],
            config,
            RunLength(num_samples=8, batch_size=8, epochs=1),
            {f"network.backbone.{name}": depth for name, depth in depths.items()},
        )
    }
    classifier = timm.create_model(name, num_classes=5, **SMALL[name])
    exempt = getattr(classifier, "no_weight_decay", set)() - {"dist_token"}
    groups = param_groups_layer_decay(
        classifier, weight_decay=0.05, no_weight_decay_list=exempt, layer_decay=0.75
    )
    names = {id(p): n for n, p in classifier.named_parameters()}
    theirs = {
        names[id(p)]: (group["lr_scale"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }
    shared = {n for n, _ in backbone.named_parameters()}
    final = {n for n in shared if n.startswith("norm.")}
    assert {ours[n] for n in final} <= {(1.0, 0.0)}
    assert len(final) == (2 if name.startswith(("vit", "swin")) else 0)
    shared -= final
    assert {n: ours[n] for n in shared} == {n: pytest.approx(theirs[n]) for n in shared}
    assert ours["network.head.weight"] == (1.0, 0.05)
    assert len({lr for lr, _ in ours.values()}) >= 4


def rate_by_the_papers(name: str, decay: float, num_blocks: int) -> float:
    """Layer-wise lr as BEiT (appendix), MAE (appendix A.1) and DINOv2 describe it.

    Layer 0 is all that is added to or becomes tokens, block i is layer i + 1, and the layers above
    the blocks, norm and head, have the full rate.
    """
    if name.startswith(("cls_token", "pos_embed", "patch_embed")):
        return decay ** (num_blocks + 1)
    if name.startswith("blocks."):
        return decay ** (num_blocks - int(name.split(".")[1]))
    return 1.0


@pytest.mark.parametrize("has_matcher", [True, False])
def test_rates_of_a_transformer_are_those_of_the_papers(
    has_matcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "vit_tiny_patch16_224"
    backbone = timm.create_model(name, num_classes=0, init_values=0.1, **SMALL[name])
    if not has_matcher:
        monkeypatch.setattr(type(backbone), "group_matcher", None)
    depths = parameter_depths(backbone, find_blocks(backbone))
    settings = assign_settings(
        [("network", Classifier(backbone))],
        OptimizerConfig(name="adamw", lr=0.1, layer_decay=0.9),
        RunLength(num_samples=8, batch_size=8, epochs=1),
        {f"network.backbone.{name}": depth for name, depth in depths.items()},
    )
    rates = {one.parameter.name.removeprefix("network.backbone."): one.lr for one in settings}
    assert rates == {n: pytest.approx(rate_by_the_papers(n, 0.9, 3), rel=1e-15) for n in rates}
    assert rates["norm.weight"] == 1.0 and len(set(rates.values())) == 5


@pytest.mark.parametrize("name", SMALL)
def test_layers_without_timms_matcher(name: str) -> None:
    """From the blocks alone: the same layers as timm's own list of patterns gives up to there."""
    backbone = timm.create_model(name, num_classes=0, **SMALL[name])
    theirs = group_parameters(backbone, backbone.group_matcher(coarse=False), reverse=True)
    type(backbone).group_matcher, matcher = None, type(backbone).group_matcher
    try:
        ours = parameter_depths(backbone, find_blocks(backbone))
        assert ours == {n: theirs[n] for n in theirs if not n.startswith(("head", "norm."))}
    finally:
        type(backbone).group_matcher = matcher


@pytest.mark.parametrize(
    ("name", "num_blocks", "first", "last"),
    [
        ("resnet18", 8, "conv1.weight", "layer4.1.bn2.bias"),
        ("vit_b_16", 12, "class_token", "encoder.layers.encoder_layer_11.mlp.3.bias"),
        ("swin_t", 12, "features.0.0.weight", "features.7.1.mlp.3.bias"),
        ("convnext_tiny", 18, "features.0.0.weight", "features.7.2.block.5.bias"),
    ],
)
def test_torchvisions_backbones(name: str, num_blocks: int, first: str, last: str) -> None:
    """What follows `last`, a final norm or a classifier, learns at the full rate."""
    import torch

    with torch.device("meta"):
        backbone = torchvision.models.get_model(name)
    depths = parameter_depths(backbone, find_blocks(backbone))
    assert (depths[first], depths[last]) == (0, num_blocks)
    assert set(depths.values()) == set(range(num_blocks + 1))
    names = [n for n, _ in backbone.named_parameters()]
    assert list(reversed(depths)) == names[: names.index(last) + 1]


def test_a_backbone_without_blocks() -> None:
    backbone = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(UserError, match=r"layer_decay: the layers of Sequential are unknown"):
        parameter_depths(backbone, find_blocks(backbone))


def test_layers_of_a_run_have_their_rates(tmp_path: Path) -> None:
    """decay ** (number of blocks + 1 - layer); the last norm as the head, as in MAE."""
    words = ["optimizer={name: sgd, lr: 0.1, schedule: constant, warmup: 0, layer_decay: 0.5}"]
    task = tiny.task("mae", tmp_path, "run", *words, "train.max_steps=1")
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    rates = {id(p): group["lr"] for group in task.optimizer.param_groups for p in group["params"]}
    named = dict(task.base_model.named_parameters())
    last = len(task.base_model.backbone.blocks)
    expected = {
        "backbone.patch_embed.proj.weight": 0.1 * 0.5 ** (last + 1),
        "backbone.blocks.0.attn.qkv.weight": 0.1 * 0.5**last,
        f"backbone.blocks.{last - 1}.mlp.fc2.bias": 0.05,
        "backbone.norm.weight": 0.1,
        next(name for name in named if not name.startswith("backbone.")): 0.1,
    }
    assert last > 1 and {n: rates[id(named[n])] for n in expected} == pytest.approx(expected)
    task.close()
