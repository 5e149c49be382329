"""A mistake in a user's own hook, step, transform or backbone is named in the last line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from in_process import train

START = """
from dataclasses import dataclass
import torch
from torch import nn
from selftask.hooks.base import Hook
from selftask.methods.simclr import SimCLR
from selftask.registry import register_backbone, register_hook, register_method
from selftask.registry import register_train_step, register_transform

"""
NAMES_IMAGE = "; The image is .*digits.*" if sys.version_info >= (3, 11) else ""  # add_note
HOOK = '@register_hook("own")\nclass Own(Hook):\n    def on_update(self, task): '
METHOD = '@register_method("own")\nclass Own(SimCLR):\n    loss_reduction = "gathered"\n    '
BACKBONE = """
@register_backbone("own")
@dataclass(frozen=True, kw_only=True)
class Own:
    width: int = 8

    def build(self, channels=3):
        module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        module.embed_dim = 7
        return
"""


@pytest.mark.parametrize(
    ("code", "chosen", "message"),
    [
        (
            HOOK + "task.log('x', torch.ones(3))",
            "hooks.own={}",
            r"own\.py:\d+: ValueError: log\('x'\): a number is expected, not a tensor \(3,\)",
        ),
        (
            HOOK + "task.log('x', '?')",
            "hooks.own={}",
            r"own\.py:\d+: ValueError: log\('x'\): a number is expected, not '\?'",
        ),
        (
            HOOK + "task.log('loss', 1.0)",
            "hooks.own={}",
            r"own\.py:\d+: ValueError: log\('loss'\): this is a column of training; .*",
        ),
        (
            '@register_hook("own")\nclass Own: ...',
            "hooks.own={}",
            r"own\.py:\d+: hooks\.own: Own must extend selftask\.hooks\.base\.Hook",
        ),
        (
            HOOK.replace("Own(Hook):", "Own(Hook):\n    priority = 'first'") + "...",
            "hooks.own={}",
            r"own\.py:\d+: priority of Own is 'first'; a number is expected, such as 50, and .*",
        ),
        (
            '@register_train_step("own")\nclass Own: ...',
            "train.step=own",
            "train.step: the class 'own' has no method __call__",
        ),
        (
            '@register_train_step("own")\nclass Own:\n    def __init__(self, factor, power=2): ...',
            "train.step=own",
            r"own\.py:\d+: train\.step=own, which is no dataclass, .* takes \(factor, power=2\)",
        ),
        (
            HOOK.replace("on_update(self, task)", "__init__(self, every)") + "...",
            "hooks.own={}",
            r"own\.py:\d+: hooks\.own=own, which is no dataclass, .* takes \(every\)",
        ),
        (
            '@register_transform("own")\nclass Own:\n    def __call__(self, image, rng): 1 / 0',
            "views.main.transforms=[own, {name: normalize, stats: half}]",
            r"own\.py:\d+: ZeroDivisionError: division by zero" + NAMES_IMAGE,
        ),
        (BACKBONE + "\n", "backbone=own", "backbone 'own': build returned None, not an nn.Module"),
        (
            BACKBONE.rstrip() + " module",
            "backbone=own",
            "the backbone returns 3 features, but its embed_dim is 7",
        ),
        (
            METHOD + "def build_head(self, embed_dim): return nn.Sequential(nn.Linear(100, 8))",
            "method.name=own",
            r"own\.py:\d+: Own\.build_head returned a head whose first layer takes 100 .*",
        ),
        (
            METHOD + "views = 'two'",
            "method.name=own",
            r".*own\.py:\d+: the method 'own' has views = 'two'; a number, .* is expected",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(
    code: str, chosen: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.py").write_text(START + code)
    assert train(folder, "import=[own]", chosen, "data.num_workers=1")
    line = re.sub(r"^(RUN FAILED at step [01] on rank 0|error): ", "", read_last(capsys))
    assert re.fullmatch(message, line)


def test_a_loss_without_a_gradient_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the last line; torch's message is in the traceback only."""
    forward = "def forward(self, output, batch): return output.detach().mean()"
    (folder / "own.py").write_text(START + METHOD + forward)
    assert train(folder, "import=[own]", "method.name=own", "data.num_workers=0")
    text = "".join(capsys.readouterr())
    assert "the loss has no gradient; " in text.splitlines()[-1]
    assert text.count("RuntimeError: element 0 of tensors does not require grad") == 1


def read_last(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return (out + err).splitlines()[-1]
