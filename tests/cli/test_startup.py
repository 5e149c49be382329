"""What start-up must not load: it costs seconds before a message, or before the first step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from selftask.config.schema import DEFAULT_HOOKS

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("torch", "torchvision", "timm", "sklearn")


def modules_after(code: str, tmp_path: Path) -> set[str]:
    """The modules that a fresh process holds once ``code`` has run."""
    ending = "import sys; print('modules:', *sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ending}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "ssl")},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(process.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["list"],
        ["config", "simclr"],
        ["train", "simclr", "train.epoch=3"],  # a typo
        ["train", "simclr", "train.batch_size=100000"],  # more than the data set holds
        ["train", "simclr/digits", "backbone=timm:resnet81"],
        ["train", "simclr/digits", "init.backbone=torchvision:resnet81"],
        ["finetune", "timm:resnet18"],  # without data
        ["eval", "knn", "timm:resnet81", "data=digits", "weights=none"],
        ["features", "timm:resnet18", "data=digits", "out=features", "weights=missing.pt"],
        ["features", "missing", "data=digits", "out=features"],
        ["export", "torchvision:resnet81", "--out", "exported"],
    ],
    ids=" ".join,
)
def test_answers_without_torch(argv: list[str], tmp_path: Path) -> None:
    code = f"from selftask.cli.main import main; assert main({argv!r}) in (0, 2)"
    modules = modules_after(code, tmp_path)
    forbidden = TORCH if argv != ["train", "simclr", "train.batch_size=100000"] else TORCH[:3]
    assert not modules & set(forbidden)


def test_help_loads_no_config_library(tmp_path: Path) -> None:
    modules = modules_after("from selftask.cli.main import main; main(['--help'])", tmp_path)
    assert not modules & {"hydra", "omegaconf", "yaml", "numpy"}


def test_training_loads_only_what_it_uses(tmp_path: Path) -> None:
    """Neither all of Classy Vision nor the libraries of what the recipe does not ask for."""
    unused = {
        "classy_vision.models",
        "classy_vision.dataset",
        "classy_vision.tasks.classification_task",
        "rich",
        "safetensors",
        "sklearn",
        "timm",
        "torch.distributed.checkpoint",
        "torchvision",
    }
    code = "import selftask.run.run, selftask.methods.simclr, selftask.train_steps.standard\n"
    code += f"from selftask.registry import HOOKS; [HOOKS[name] for name in {DEFAULT_HOOKS!r}]"
    assert not modules_after(code, tmp_path) & unused
