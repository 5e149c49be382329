"""What start-up must not load: it costs seconds before a message, or before the first step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tiny
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


ANSWERED = [
    ["--help"],
    ["list"],
    ["config", "simclr"],
    ["train", "simclrr"],  # a typo
    ["train", "simclr", "train.epoch=3"],  # another
    ["train", "simclr/digits", "backbone=timm:resnet81"],
    ["train", "simclr/digits", "init.backbone=torchvision:resnet81"],
    ["finetune", "timm:resnet18"],  # without data
    ["eval", "knn", "timm:resnet81", "data=digits", "weights=none"],
    ["features", "timm:resnet18", "data=digits", "out=features", "weights=missing.pt"],
    ["features", "missing", "data=digits", "out=features"],
    ["export", "torchvision:resnet81", "--out", "exported"],
    ["train", "simclr", "train.batch_size=100000"],  # more than the data set holds, read by sklearn
]


def test_answers_without_torch(tmp_path: Path) -> None:
    """Each after those before it: a module that is imported stays."""
    code = (
        "import sys; from selftask.cli.main import main\n"
        f"for number, argv in enumerate({ANSWERED!r}):\n"
        "    code = main(argv)\n"
        f"    print('ANSWER', number, code, *{{*{(*TORCH, 'rich')!r}}} & {{*sys.modules}})\n"
    )
    done = tiny.run([sys.executable, "-c", code], tmp_path)
    answers = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert [int(number) for number, *_ in answers] == [*range(len(ANSWERED))], done.stderr
    assert [int(code) for _, code, *_ in answers] == [0] * 3 + [2] * (len(ANSWERED) - 3)
    assert "Traceback" not in done.stderr
    for argv, (_, _, *modules) in zip(ANSWERED, answers, strict=True):
        allowed = {"sklearn"} if argv[-1] == "train.batch_size=100000" else set()
        assert {*modules} <= allowed, argv


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
