"""A path below a folder that one may not enter: one line and exit code 2, from every command."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from selftask.cli.main import COMMANDS, main
from selftask.run.run_folder import LOCK, is_held

_VERSION_3 = 0x20080522  # of capset(2), with two words a set
_DAC = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder without permissions; root gives up the right to enter it for the test."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", _VERSION_3, 0)
    before = ctypes.create_string_buffer(24)
    if os.getuid() == 0:
        assert libc.capget(header, before) == 0
        effective, *others = struct.unpack("6I", before.raw)
        assert libc.capset(header, struct.pack("6I", effective & ~_DAC, *others)) == 0
    yield folder
    if os.getuid() == 0:
        libc.capset(header, before.raw)
    folder.chmod(0o700)


SMALL = ["train.max_steps=1", "data.num_workers=0", "train.batch_size=8"]
COMMANDS_ON_PATHS = {
    "train recipe": ["train", "CLOSED/x.yaml"],
    "train data": ["train", "simclr", "data=CLOSED/x", *SMALL],
    "train data.val": ["train", "simclr", "data.val=CLOSED/x", *SMALL],
    "train out": ["train", "simclr", "out=CLOSED/x", *SMALL],
    "train init": ["train", "simclr", "init.backbone=CLOSED/x.pt", *SMALL],
    "train resume": ["train", "simclr", "resume=CLOSED/x.pt", *SMALL],
    "train stage_to": ["train", "simclr", "data=images", "data.stage_to=CLOSED/x", *SMALL],
    "train array": ["train", "simclr", "data=CLOSED/x.npz", *SMALL],
    "train list": ["train", "simclr", "data=CLOSED/x.txt", *SMALL],
    "train table": ["train", "simclr", "data=CLOSED/x.csv", *SMALL],
    "train tar": ["train", "simclr", "data=CLOSED/x.tar", *SMALL],
    "train pattern": ["train", "simclr", "data=CLOSED/x/*.jpg", *SMALL],
    "train hdf5": ["train", "simclr", "data=CLOSED/x.h5", *SMALL],
    "train lmdb": ["train", "simclr", "data=CLOSED/x.mdb", *SMALL],
    "train torchvision": ["train", "simclr", "data=torchvision:CIFAR10", "data.root=CLOSED/x"],
    "submit": ["submit", "simclr", "out=CLOSED/x", "--dry-run"],
    "jobs": ["jobs", "CLOSED/x"],
    "cancel": ["cancel", "CLOSED/x"],
    "eval": ["eval", "knn", "CLOSED/x", "data=digits"],
    "eval weights": ["eval", "knn", "torchvision:resnet18", "weights=CLOSED/x.pt", "data=digits"],
    "eval retrieval": ["eval", "retrieval", "CLOSED/x", "data=digits"],
    "eval retrieval truth": [
        *("eval", "retrieval", "torchvision:resnet18", "weights=none", "data=digits"),
        "truth=CLOSED/x.csv",
    ],
    "eval segmentation": [
        *("eval", "segmentation", "torchvision:resnet18", "weights=none", "data=CLOSED/x"),
        "data.val=CLOSED/x",
    ],
    "eval correspondence": ["eval", "correspondence", "CLOSED/x", "data=digits"],
    "eval robustness": ["eval", "robustness", "CLOSED/x", "data=digits"],
    "eval depth": ["eval", "depth", "torchvision:resnet18", "weights=none", "data=CLOSED/x"],
    "eval suite": ["eval", "suite", "CLOSED/x", "knn"],
    "eval predictions": ["eval", "predictions", "CLOSED/x.csv"],
    "features": ["features", "CLOSED/x", "data=digits", "out=somewhere"],
    "features out": ["features", "torchvision:resnet18", "out=CLOSED/x", "weights=none"],
    "export": ["export", "CLOSED/x"],
    "adapt": ["adapt", "CLOSED/x", "data=images"],
    "finetune": ["finetune", "CLOSED/x", "data=images"],
    "finetune data": ["finetune", "torchvision:resnet18", "weights=none", "data=CLOSED/x"],
    "check": ["check", "simclr", "data=CLOSED/x"],
    "data check": ["data", "check", "CLOSED/x"],
    "data check out": ["data", "check", "images", "--out", "CLOSED/x.txt"],
    "data stats": ["data", "stats", "CLOSED/x"],
    "data show": ["data", "show", "simclr", "data=CLOSED/x"],
    "data show out": ["data", "show", "simclr", "--out", "CLOSED/x.png"],
    "bench data": ["bench", "data", "simclr", "data=CLOSED/x"],
    "config": ["config", "CLOSED/x.yaml"],
    "config data": ["config", "simclr", "data=CLOSED/x"],
    "test": ["test", "CLOSED/x"],
    "checkpoints": ["checkpoints", "CLOSED/x"],
    "replay": ["replay", "CLOSED/x/failures/step_1"],
    "repro": ["repro", "CLOSED/x"],
    "model-summary": ["model-summary", "CLOSED/x.yaml"],
    "plan": ["plan", "CLOSED/x.yaml"],
    "report": ["report", "CLOSED/x"],
    "runs": ["runs", "CLOSED/x"],
    "watch": ["watch", "CLOSED/x"],
}
NO_PATHS = {"list", "env", "explain", "completion", "new"}


def test_every_command_with_a_path_is_here() -> None:
    assert {words[0] for words in COMMANDS_ON_PATHS.values()} | NO_PATHS == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS_ON_PATHS)
def test_one_line_and_exit_code_2(
    name: str,
    closed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    for number in range(8):
        Image.new("RGB", (8, 8)).save(f"images/{number}.png")
    words = [word.replace("CLOSED", str(closed)) for word in COMMANDS_ON_PATHS[name]]
    assert main(words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(closed) in line
    assert "permission denied" in line.lower(), line


def test_the_lock_of_another_user_is_not_taken_for_a_run(closed: Path, tmp_path: Path) -> None:
    (tmp_path / LOCK).touch(mode=0)
    assert not is_held(tmp_path)
