"""Transforms that data.cache=device cannot apply to batches are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main

MODULE = '''
from dataclasses import dataclass, field
from typing import Any
from selftask.registry import register_transform

@register_transform("gaussian_blurr")
class Own:
    """A user's, image by image."""

    def __call__(self, image, rng):
        return image

@register_transform("batched_too")
class Batched:
    """A user's, for batches as well."""

    def draw(self, rng, height, width):
        return None

    def apply(self, image, drawn):
        return image

    def on_batch(self, images, drawn):
        return images
'''
NESTED = "views.main.transforms.1={name: random_apply, transforms: [grayscale]}"
DEVICE = ("data.augment_on=device", "data.cache=device")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module and a recipe of it."""
    (tmp_path / "own_views.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(
        "defaults: [simclr/digits]\nimport: [own_views]\nviews:\n  main:\n    transforms:\n"
        "      - {name: random_resized_crop, size: 8}\n      - grayscale\n      - normalize\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_views", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "more"), [("config", []), ("submit", ["--dry-run"]), ("train", [])]
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_has_no_batched_form_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, more: list[str], nested: bool
) -> None:
    change = NESTED if nested else "views.main.transforms.1={name: gaussian_blurr}"
    assert main([command, "mine.yaml", *DEVICE, change, *more]) == 2
    said = capsys.readouterr().err
    name = "random_apply" if nested else "gaussian_blurr"
    assert f"views.main.transforms.1: {name!r} has no form for whole batches" in said
    assert "set data.cache=ram" in said
    assert nested or "did you mean 'gaussian_blur'?" in said
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "args",
    [
        [NESTED],
        [NESTED, DEVICE[0]],
        [*DEVICE],
        [*DEVICE, "views.main.transforms.1=batched_too"],
    ],
    ids=["engine cpu", "in workers", "built-in", "own"],
)
def test_what_is_possible_is_let_through(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main(["config", "mine.yaml", *args]) == 0, capsys.readouterr().err


def test_the_check_needs_no_torch(here: Path) -> None:
    """Nor the import of any batched form."""
    code = (
        "import sys\nfrom selftask.cli.main import main\n"
        f"code = main(['config', 'mine.yaml', *{DEVICE}, '{NESTED}'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\nsys.exit(code)"
    )
    done = tiny.run([sys.executable, "-c", code], here)
    assert done.returncode == 2, done.stderr
    assert "has no form" in done.stderr
