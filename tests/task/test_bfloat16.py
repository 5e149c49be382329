"""``train.precision=auto`` on CPUs, and attention in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.precision.bfloat16 import (
    LEAST_WIDTH,
    MOST_TOKENS,
    attention,
    gains_from_bfloat16,
)
from selftask.run.run import run_task
from selftask.task import Task
from selftask.task.numerics import settle_precision

CPU = torch.device("cpu")


def test_auto_resumes_in_the_precision_of_the_run_and_another_is_refused(tmp_path: Path) -> None:
    """As a run of a GPU on a machine without."""

    def task(precision: str, steps: int) -> Task:
        words = (f"train.precision={precision}", f"train.max_steps={steps}")
        return tiny.task("simclr", tmp_path, "run", *words)

    run_task(task("bfloat16", 1))
    with pytest.raises(UserError, match=r"train\.precision: bfloat16 there, float32 now"):
        run_task(task("float32", 2))
    resumed = task("auto", 2)
    run_task(resumed)
    assert resumed.config.train.precision == "bfloat16" and resumed.steps_done == 2
    assert resumed.config.place("train.precision") == "auto: as the run begun in this folder"


@pytest.mark.parametrize(
    ("instructions", "backbone", "expected"),
    [
        (True, "{name: vit_tiny, img_size: 32, patch_size: 4}", "bfloat16"),
        (True, "resnet18", "bfloat16"),
        (True, "small_resnet", "float32"),  # too narrow
        (True, "{name: vit_micro}", "float32"),
        (True, "timm:convnext_atto", "float32"),  # grouped convolutions
        (False, "resnet18", "float32"),
    ],
)
def test_auto_on_a_cpu_depends_on_instructions_and_widths(
    instructions: bool, backbone: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selftask.task.numerics.computes_in_bfloat16", lambda: instructions)
    config = load_config("simclr/digits", [f"backbone={backbone}"])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    settled = settle_precision(config, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert settled.train.precision == expected
    assert settled.place("train.precision").startswith("auto: ")


def test_widths_are_weights_over_inputs_and_outputs() -> None:
    """A square layer of N inputs has N * N / (N + N) multiply-adds for each number."""
    for inputs, gains in ((2 * LEAST_WIDTH, True), (2 * LEAST_WIDTH - 2, False)):
        assert gains_from_bfloat16(nn.Linear(inputs, inputs))[0] == gains
    wide = nn.Conv2d(1024, 1024, 3)
    assert gains_from_bfloat16(wide)[0]
    assert not gains_from_bfloat16(nn.Sequential(wide, nn.Conv2d(1024, 1024, 3, groups=2)))[0]
    assert not gains_from_bfloat16(nn.ReLU())[0]


@pytest.mark.parametrize("tokens", [5, MOST_TOKENS + 1])
def test_attention_by_products_is_that_of_torch(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to bfloat16's 8 bits; outside autocast and for long sequences it is torch's kernel."""
    monkeypatch.setattr("selftask.models.precision.bfloat16.computes_in_bfloat16", lambda: True)
    draws = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, tokens, 8, generator=draws) for _ in range(3))
    expected = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(attention(query, key, value), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(attention(query, key, value).float(), expected, atol=0.03)
        fused = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(attention(query, key, value), fused) == (tokens > MOST_TOKENS)


def test_only_the_trained_networks_attend_by_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selftask.models.precision.bfloat16.computes_in_bfloat16", lambda: True)
    other = build_backbone(Component(name="vit_micro"))
    fused = {}
    for precision in ("float32", "bfloat16"):
        task = tiny.task("ibot", tmp_path, precision, f"train.precision={precision}")
        task.prepare()
        modules = [*task.base_model.modules(), *task.loss.modules()]
        fused[precision] = {m.fused_attn for m in modules if hasattr(m, "fused_attn")}
        task.close()
    assert fused == {"float32": {True}, "bfloat16": {False}}
    assert all(m.fused_attn for m in other.modules() if hasattr(m, "fused_attn"))
