"""``selftask export --to torch_export``: the file computes the features of the backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selftask.cli.main import main
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.weights.formats.program_file import save_program


@pytest.mark.parametrize(
    ("name", "args", "channels"),
    [
        ("small_resnet", {}, 1),
        pytest.param("vit_micro", {"positions": "rope"}, 3, marks=pytest.mark.slow),
    ],
    ids=["resnet", "vit"],
)
def test_the_loaded_program_computes_the_same_features(
    name: str, args: dict[str, Any], channels: int, tmp_path: Path
) -> None:
    model = build_backbone(Component(name=name, args=args), channels)
    facts = {"channels": channels, "input_size": 32, "normalization": {"mean": [0.5]}}
    path = save_program(model, tmp_path, facts)
    assert model.training  # as it was
    extra = {"selftask": ""}
    program = torch.export.load(path, extra_files=extra)
    assert json.loads(extra["selftask"]) == facts
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert {str(call).partition(".")[0] for call in calls} <= {
        "aten",
        "<built-in function getitem>",
    }
    model.eval()
    for batch in (1, 5):
        images = torch.randn(batch, channels, 32, 32)
        torch.testing.assert_close(program.module()(images), model(images), rtol=1e-4, atol=1e-4)
    assert [file.name for file in tmp_path.iterdir()] == ["backbone.pt2"]


def test_a_transformer_is_traced_with_images_of_its_size(tmp_path: Path) -> None:
    """The digits reach a network in their own size, so that ``backbone.json`` has none."""
    model = build_backbone(Component(name="vit_micro", args={"img_size": 16}), 3)
    program = torch.export.load(save_program(model, tmp_path, {"input_size": None}))
    images = torch.randn(5, 3, 16, 16)
    torch.testing.assert_close(program.module()(images), model.eval()(images), rtol=1e-4, atol=1e-4)


class Branches(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) if images.sum() > 0 else -images.flatten(1)


class Draws(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) + torch.rand_like(images.flatten(1))


@pytest.mark.parametrize(
    ("backbone", "message"),
    [(Branches(), "cannot export this backbone: "), (Draws(), "computes other features")],
)
def test_what_cannot_be_exported_is_one_line(
    backbone: nn.Module, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"^export: --to torch_export: .*{message}[^\n]*$"):
        save_program(backbone, tmp_path, {"input_size": 8})
    assert not [*tmp_path.iterdir()]


def test_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "timm:test_vit", "weights=none", "--to", "torch_export"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/backbone.pt2\n"
    assert {file.suffix for file in tmp_path.iterdir()} == {".pt", ".pt2", ".safetensors", ".json"}
