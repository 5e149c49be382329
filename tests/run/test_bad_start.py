"""Weights of ``init.backbone`` that cannot be used are an error before the run has a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from selftask.cli.main import main


def _other(path: Path) -> None:
    torch.save({"layer.weight": torch.zeros(3)}, path)


@pytest.mark.parametrize(
    ("write", "words", "message"),
    [
        (lambda path: path.write_text("hello"), [], "damaged or no file of weights (5 bytes)\n"),
        (lambda path: path.write_text("<!DOCTYPE html>"), [], "a web page instead of the weights"),
        (lambda path: path.write_text("version https://git-lfs.github.com/"), [], "`git lfs pull`"),
        (_other, [], "error: init.backbone: 0/"),
        (_other, ["init.prefix=encoder."], "init.prefix: no tensor has the prefix 'encoder.'"),
    ],
)
def test_bad_weights_end_with_2_and_without_a_folder(
    write: Callable[[Path], object],
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "w.pt")
    words = tiny.overrides("simclr", tmp_path, "run", "init.backbone=w.pt", *words)
    assert main(["train", "simclr/digits", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
