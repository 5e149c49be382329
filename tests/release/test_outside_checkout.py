"""The wheel in an empty folder, far from the checkout: a newcomer's first commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from test_wheel import SOURCES

import tiny

pytestmark = pytest.mark.slow

SMALL = (
    *("train.max_steps=30", "train.batch_size=8", "train.log_every=1", "data.num_workers=0"),
    *("backbone=small_resnet", "backbone.width=8", "image_size=32", "out=runs/mine"),
)
TRAIN = ("train", "simclr", "data=photos", *SMALL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is in the repository."""
    source = tmp_path_factory.mktemp("source")
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in SOURCES:
        origin = tiny.ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=left_out)
        else:
            shutil.copy(origin, source)
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*words, "-w", "dist", "."], cwd=source, check=True)
    (built,) = (source / "dist").glob("selftask-*.whl")
    return built


@pytest.fixture(scope="module")
def selftask(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a fresh environment that has only the wheel, and our libraries."""
    home = tmp_path_factory.mktemp("home")
    venv.create(home, symlinks=True)
    python = home / "bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    ours = [folder for folder in sys.path if folder.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(ours) + "\n")
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*words, "--force-reinstall", str(wheel)], check=True)
    return home / "bin/selftask"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder but for 40 photographs in two sub-folders."""
    import numpy as np
    from PIL import Image

    made = tmp_path_factory.mktemp("empty")
    draw = np.random.default_rng(0)
    for number in range(40):
        path = made / "photos" / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 128, (48, 48, 3)) + 127 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return made


def run(command: Path, folder: Path, *words: str) -> str:
    """Run selftask, which must succeed; return what it prints."""
    done = subprocess.run(
        [command, *words], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    """Without our PYTHONPATH, so that nothing of the checkout is found."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def test_the_wheel_holds_what_is_no_python(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ends = (
        "py.typed",
        "simclr/digits.yaml",
        "base/images.yaml",
        "method.py.txt",
        "uPlot.iife.min.js",
    )
    for end in ends:
        assert [name for name in names if name.endswith(end)], end
    assert not [name for name in names if name.startswith("tests/")]


def test_it_is_that_of_the_wheel(selftask: Path, folder: Path) -> None:
    printed = run(selftask, folder, "env")
    assert f"({selftask.parents[1]}" in printed.splitlines()[0]
    assert "kernel" in printed
    assert str(tiny.ROOT) not in run(selftask, folder, "list", "recipes")


def test_train_interrupt_resume_evaluate_export_report(selftask: Path, folder: Path) -> None:
    process = subprocess.Popen(
        [selftask, *TRAIN], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3 "):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 128 + signal.SIGINT, rest
    assert "RUN interrupted by SIGINT" in rest.splitlines()[-1]

    resumed = run(selftask, folder, *TRAIN)
    assert "resumes at step " in resumed
    assert resumed.splitlines()[-1].startswith("RUN finished: 30 steps")
    assert '"knn_top1"' in run(selftask, folder, "eval", "knn", "runs/mine")
    run(selftask, folder, "export", "runs/mine", "--to", "safetensors")
    assert (folder / "runs/mine/export/backbone.safetensors").stat().st_size > 0
    run(selftask, folder, "report", "runs/mine")
    assert "uPlot" in (folder / "runs/mine/report.html").read_text(encoding="utf-8")


def test_new_files_train(selftask: Path, folder: Path) -> None:
    run(selftask, folder, "new", "method", "my_net")
    assert "RUN finished: 1 step " in run(
        selftask, folder, "train", "my_net.yaml", "train.max_steps=1"
    )
