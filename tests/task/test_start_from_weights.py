"""A run that starts from weights: what it trains, and from when on."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from selftask.errors import UserError
from selftask.models.build import build_backbone


def test_a_loaded_backbone_is_frozen_at_first(tmp_path: Path) -> None:
    """``freeze`` of a rule of ``optimizer.groups``, across a stop and resume."""
    torch.manual_seed(7)
    loaded = build_backbone(tiny.config("simclr", tmp_path).backbone)
    torch.save(loaded.state_dict(), tmp_path / "w.pt")
    words = [f"init.backbone={tmp_path / 'w.pt'}"]
    words += ["optimizer.groups=[{match: backbone, freeze: 1 epoch}]"]

    stopped = tiny.train("simclr", tmp_path, "run", *words, "train.stop_at=5")
    trained = dict(stopped.base_model.backbone.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in loaded.named_parameters())

    resumed = tiny.train("simclr", tmp_path, "run", *words)  # whose weights, once there are some
    assert resumed.resumed and [row["step"] for row in tiny.rows(resumed.out)] == [*range(1, 16)]
    trained = dict(resumed.base_model.backbone.named_parameters())
    assert not any(torch.equal(trained[name], value) for name, value in loaded.named_parameters())

    whole = tiny.train("simclr", tmp_path, "whole", *words)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(resumed.out)) == []


def test_rules_give_initial_values_and_a_report(tmp_path: Path) -> None:
    torch.manual_seed(7)
    loaded = build_backbone(tiny.config("simclr", tmp_path).backbone)
    torch.save(loaded.state_dict(), tmp_path / "w.pt")
    rules = (
        "{type: Conv2d, by: kaiming_normal, args: {mode: fan_out, nonlinearity: relu}}, "
        "{match: backbone.stages, parameter: bias, by: constant, args: {val: 0.25}}, "
        "{match: '*.bn2', by: zeros}, {match: backbone.stages.1.bn2, by: ones}"
    )
    words = (f"init.backbone={tmp_path / 'w.pt'}", f"init.rules=[{rules}]")
    task = tiny.task("simclr", tmp_path, "run", *words)
    task.prepare()
    backbone = task.base_model.backbone
    task.close()
    for name, part in backbone.named_modules():
        if isinstance(part, nn.Conv2d):  # normal with variance 2 / fan_out, Kaiming
            fan_out = part.out_channels * part.weight[0, 0].numel()
            expected = math.sqrt(2 / fan_out)
            few = 5 / math.sqrt(2 * part.weight.numel())
            assert part.weight.std().item() == pytest.approx(expected, rel=few), name
        elif isinstance(part, nn.BatchNorm2d) and name.startswith("stages"):
            assert (part.bias == 0.25).all()
            if name.endswith("bn2"):
                assert (part.weight == float(name == "stages.1.bn2")).all()  # the last rule counts
    assert torch.equal(backbone.stem[1].bias, loaded.stem[1].bias)
    lines = (tmp_path / "run/initial.txt").read_text().splitlines()
    shown = {line.split()[0]: line for line in lines}
    assert shown.keys() == {f"network.{name}" for name, _ in task.base_model.named_parameters()}
    assert shown["network.backbone.stages.1.bn2.weight"].endswith("init.rules.3: ones")
    assert " mean      0.25  std        0 " in shown["network.backbone.stages.0.bn1.bias"]
    assert shown["network.backbone.stem.1.bias"].endswith("built or loaded")

    plain = tiny.task("simclr", tmp_path, "plain")
    plain.prepare()
    plain.close()
    assert not (tmp_path / "plain/initial.txt").exists()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{match: backbone.steam, by: zeros}", "init.rules.0.match='backbone.steam': matches no "),
        (
            "{type: Conv3d, by: zeros}",
            "init.rules.0.type='Conv3d': matches no trained parameter; did you",
        ),
        (
            "{type: BatchNorm2d, by: kaiming_normal}",
            "init.rules.0.by=kaiming_normal: of network.backbone.stem.1.weight (8): Fan in and",
        ),
        ("{by: normal, args: {sd: 1}}", "unexpected keyword argument 'sd'"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error(rule: str, message: str, tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run", f"init.rules=[{rule}]")
    with pytest.raises(UserError, match=re.escape(message)):
        task.prepare()
