"""Recipes and weights of an installed package by address: ``package://NAME/path``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import tiny
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.files import addresses
from selftask.models.build import build_backbone
from selftask.models.weights.export import metadata, save_backbone
from selftask.models.weights.model_source import open_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that fails if it is imported."""
    folder = tmp_path / "site" / "feathers"
    (folder / "weights").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.chdir(tmp_path)
    return folder


def test_weights_and_recipe_of_a_package(package: Path, tmp_path: Path) -> None:
    component = tiny.config("simclr", tmp_path).backbone
    backbone = build_backbone(component)
    save_backbone(backbone, package / "weights", metadata(component, [], channels=3))
    again, _ = open_model("package://feathers/weights/backbone.pt")
    assert not tiny.differences(again.state_dict(), backbone.state_dict())
    assert addresses.list_names("package://feathers") == ["__init__.py", "weights"]

    (package / "base.yaml").write_text("defaults: [/simclr/digits]\ntrain: {epochs: 7}\n")
    Path("mine.yaml").write_text("defaults: ['package://feathers/base.yaml']\n")
    assert load_config("mine.yaml", []).train.epochs == 7

    words = ["init.backbone=package://feathers/weights/backbone.pt"]
    task = tiny.task("simclr", tmp_path, "run", *words)
    task.prepare()
    task.close()
    for name, value in backbone.state_dict().items():
        assert torch.equal(task.base_model.backbone.state_dict()[name], value)
    assert "feathers" not in sys.modules


def test_what_no_package_has(package: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"package://fethers/w\.pt: no package 'fethers' is inst"):
        tiny.config("simclr", tmp_path, "run", "init.backbone=package://fethers/w.pt")
    with pytest.raises(UserError, match="no package 'a-b' is installed"):
        addresses.exists("package://a-b/x")
    assert not addresses.exists("package://feathers/none.pt")
    Path("w.pt").write_bytes(b"x")
    with pytest.raises(OSError, match="packages are read-only"):
        addresses.upload(Path("w.pt"), "package://feathers/w.pt")
