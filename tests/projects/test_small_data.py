"""projects/small_data: the comparison runs from images to its table, and continues."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import tiny

SCRIPT = tiny.ROOT / "projects/small_data/compare.py"


def load(path: Path) -> ModuleType:
    """A script of a project as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_interval_is_students() -> None:
    """Reference: a printed table, t(0.975; 2) = 4.303 and t(0.975; 4) = 2.776."""
    interval = load(SCRIPT).interval
    mean, half = interval([0.30, 0.32, 0.34])
    assert (mean, half) == (pytest.approx(0.32), pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3))
    _, half = interval([0.0, 1.0, 2.0, 3.0, 4.0])
    assert half == pytest.approx(2.776 * 2.5**0.5 / 5**0.5, rel=1e-3)
    assert math.isnan(interval([0.3])[1])


def digit_images(folder: Path, count: int) -> Path:
    """Handwritten digits as image files, one folder a class: train and test."""
    digits = load_digits()
    for place in range(count):
        part = "test" if place % 4 == 0 else "train"
        path = folder / part / str(digits.target[place]) / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.kron(digits.images[place], np.ones((4, 4))) * 15.9
        Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(path)
    return folder


@pytest.mark.slow
def test_from_images_to_the_table(tmp_path: Path) -> None:
    data = digit_images(tmp_path / "data", 200)
    words = [sys.executable, str(SCRIPT), str(data), "--images", "100", "--test-images", "40"]
    words += ["--seeds", "2", "--methods", "simclr", "train.epochs=1", "train.batch_size=20"]
    words += ["backbone.width=8", "method.hidden_dim=16", "method.out_dim=8"]
    done = tiny.run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table] == [
        "features",
        "---",
        "raw pixels",
        "untrained network",
        "simclr",
    ]
    assert [line.split("|")[2].strip() for line in table[2:]] == ["1", "2", "2"]
    assert table[4].count("±") == 2
    again = tiny.run(words, tmp_path)
    assert again.stdout.count("finished") >= 2
    assert [line for line in again.stdout.splitlines() if line.startswith("|")] == table

    wrong = tiny.run([*words[:3], "--methods", "simclar"], tmp_path)
    assert (wrong.returncode, "no recipe for simclar; known: byol" in wrong.stderr) == (2, True)
    nowhere = tiny.run([*words[:2], str(tmp_path / "none")], tmp_path)
    assert "no folder of images for each class" in nowhere.stderr
