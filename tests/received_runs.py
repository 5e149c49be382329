"""Runs that somebody sent, with code that creates a file, for tests of what is run and fetched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from selftask.checkpoint import store
from selftask.config.load import to_yaml
from selftask.hooks.export import facts
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone


class Payload:
    """Unpickled, creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def pwned(forget_names: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What every payload creates; the test runs in its own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (tmp_path / "photos").mkdir()
    tiny.digits_file(tmp_path)
    return tmp_path / "pwned"


@pytest.fixture
def received(pwned: Path) -> Callable[[dict[str, Any]], Path]:
    """Makes a run that somebody sent, with changes to its config."""

    def make(changes: dict[str, Any]) -> Path:
        folder = pwned.parent
        run = folder / "received"
        config = tiny.config("simclr", folder)
        backbone = build_backbone(config.backbone)
        weights = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
        state = {"backbone": "model.backbone", "model": weights, "clock": {"steps_done": 1}}
        store.save(state, run / "checkpoints", 1, keep=1)
        save_backbone(backbone, run / "export", facts(config, 1, 3))
        values = yaml.safe_load(to_yaml(config)) | changes
        if "defaults" in changes:
            del values["import"]  # which would replace that of the other file
        (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        (run / "evil.py").write_text(f"import os\nos.mkdir({str(pwned)!r})\n")
        return run

    return make


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that are opened; ``manager`` is the one door to them."""
    opened: list[str] = []

    def manager(address: str) -> Any:
        opened.append(address)
        raise OSError("nobody answers")

    monkeypatch.setattr("selftask.files.addresses.manager", manager)
    monkeypatch.setenv("SECRET", "hunter2")
    return opened


IN_CONFIG = {
    "import": {"import": ["evil"]},
    "import by another file": {"defaults": ["more"]},
    "backbone": {"backbone": {"name": "custom", "model": "os:mkdir", "args": {"path": "pwned"}}},
    "eval.transforms": {
        "eval": {
            "transforms": [
                {"name": "custom", "transform": "os:mkdir", "args": {"path": "pwned"}},
                {"name": "normalize", "stats": "half"},
            ]
        }
    },
    "data": {"data": {"name": "custom", "dataset": "os:mkdir", "args": {"path": "pwned"}}},
    "data.val": {
        "data": {
            "name": "array",
            "path": "digits.npz",
            "val": {"name": "custom", "dataset": "os:mkdir", "args": {"path": "pwned"}},
        }
    },
}


def words_of(command: str, run: Path) -> list[str]:
    """A command line that reads the run."""
    if command == "finetune":
        return ["finetune", str(run), "train.max_steps=1", "out=tuned"]
    if command == "export":
        return ["export", str(run), "--out", "exported"]
    if command == "features":
        return ["features", str(run), "out=features"]
    return ["eval", "knn", str(run)]
