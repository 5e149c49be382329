"""Supervised training, the linear probe, and what its labels may be."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from minitask import TinyBackbone, loss_of
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.methods.supervised import Supervised
from selftask.models.classifier.classifier import Classifier
from selftask.optim.param_groups import freeze_for_good


def _labeled(*labels: int) -> SimpleNamespace:
    return SimpleNamespace(labels=np.array(labels), num_classes=max(labels) + 1)


def _build(
    train: Any, val: Any = None, backbone: nn.Module | None = None, **config: Any
) -> tuple[Supervised, nn.Module]:
    data_module = SimpleNamespace(
        train_source=train,
        val_sources={} if val is None else {"": val},
        num_classes=getattr(train, "num_classes", 0),
    )
    method = Supervised(Supervised.Config(**config))
    task: Any = SimpleNamespace(data_module=data_module)
    return method, method.build_network(backbone or TinyBackbone(), task)


def test_loss_is_cross_entropy_and_chance_its_value_for_equal_scores() -> None:
    method, _ = _build(_labeled(0, 1, 2))
    scores, target = torch.randn(4, 3, dtype=torch.float64), torch.tensor([2, 0, 1, 1])
    terms = [
        math.log(sum(math.exp(s) for s in row.tolist())) - row[t].item()
        for row, t in zip(scores, target, strict=True)
    ]
    assert loss_of(method, scores, labels=target).item() == pytest.approx(sum(terms) / 4, rel=1e-12)
    even = loss_of(method, torch.zeros(4, 3), labels=target)
    assert method.chance_loss == pytest.approx(even.item())
    soft = torch.rand(4, 3, dtype=torch.float64).softmax(dim=1)  # as hooks.mixup makes them
    expected = -(soft * scores.log_softmax(dim=1)).sum(dim=1).mean()
    assert loss_of(method, scores, labels=soft).item() == pytest.approx(expected.item(), rel=1e-6)


def test_any_loss_of_torch_or_classy_by_name() -> None:
    scores, target = torch.randn(4, 3), torch.tensor([2, 0, 1, 1])
    method, _ = _build(_labeled(0, 1, 2), loss="MultiMarginLoss", loss_args={"margin": 0.5})
    expected = nn.MultiMarginLoss(margin=0.5)(scores, target)
    assert torch.equal(loss_of(method, scores, labels=target), expected)
    assert method.chance_loss is None
    method, _ = _build(_labeled(0, 1, 2), loss="classy:soft_target_cross_entropy")
    expected = nn.functional.cross_entropy(scores, target)
    ours = loss_of(method, scores, labels=target)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_frozen_backbone_changes_nothing_but_the_classifier() -> None:
    backbone = nn.Sequential(TinyBackbone(), nn.BatchNorm1d(6), nn.Dropout(0.5))
    backbone.embed_dim = 6
    method, probe = _build(_labeled(0, 1, 2), backbone=backbone, freeze_backbone=True)
    freeze_for_good([("network", probe), ("loss", method)], [], method.group_rules())
    probe.train()
    before = {name: tensor.clone() for name, tensor in probe.backbone.state_dict().items()}
    images = torch.randn(8, 3, 8, 8)
    assert torch.equal(probe(images), probe(images))  # no dropout, no batch statistics
    probe(images).sum().backward()
    assert all(p.grad is None for p in probe.backbone.parameters())
    assert probe.head.weight.grad is not None
    for name, tensor in probe.backbone.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert [p.shape for p in probe.parameters() if p.requires_grad] == [(3, 6), (3,)]


def test_a_frozen_backbone_has_no_adapters() -> None:
    frozen, adapters = "method.freeze_backbone=true", "backbone.lora={rank: 2}"
    with pytest.raises(ConfigError, match=r"freeze_backbone: true freezes the adapters of"):
        load_config("supervised", [frozen, adapters])
    for alone in (frozen, adapters):
        load_config("supervised", [alone])


def test_the_probes_classifier_starts_as_in_mocos_code() -> None:
    """main_lincls.py: normal weights of deviation 0.01, no bias; training from scratch: torch's."""
    backbone = TinyBackbone()
    backbone.embed_dim = 6
    probe = Classifier(backbone, 1000, frozen=True).head
    assert probe.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not probe.bias.any()
    assert Classifier(backbone, 1000, frozen=False).head.bias.any()


@pytest.mark.parametrize(
    ("train", "val", "config", "message"),
    [
        (SimpleNamespace(labels=None), None, {}, r"method\.num_classes is missing"),
        (_labeled(0, 1), _labeled(0, 4), {}, r"data.val: .* up to 4.*at least 5"),
        (_labeled(0, 1, 2), None, {"num_classes": 2}, "set method.num_classes to at least 3"),
        (_labeled(0, 1), None, {"loss": "CrosEntropyLoss"}, "did you mean 'CrossEntropyLoss'?"),
        (_labeled(0, 1), None, {"loss_args": {"smooth": 1}}, "method.loss_args=.*'smooth'"),
    ],
)
def test_what_cannot_be_trained_is_told(
    train: Any, val: Any, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _build(train, val, **config)


def test_labels_nobody_knows_yet_are_believed() -> None:
    method, network = _build(SimpleNamespace(labels=None), num_classes=7)
    assert method.num_classes == 7
    assert network(torch.randn(2, 3, 8, 8)).shape == (2, 7)
