"""Weights of ``init.backbone`` that cannot be used are an error before the run has a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from selftask.cli.main import main
from selftask.data.loading.open_data import open_data
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.run.run import run


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


def test_bad_weights_on_one_of_several_ranks_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank looks before any creates the folder, which no rank could remove for the others."""
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    _other(tmp_path / "w.pt")
    config = tiny.config("simclr", tmp_path, "run", f"init.backbone={tmp_path / 'w.pt'}")
    with pytest.raises(UserError, match=r"init\.backbone: 0/"):
        run(config, open_data(config.data))
    assert not (tmp_path / "run").exists()


def test_log_has_the_lines_of_weights_read_before_it(tmp_path: Path) -> None:
    config = tiny.config("simclr", tmp_path, "first")
    backbone = build_backbone(config.backbone)
    odd = {f"x/{key}": value for key, value in backbone.state_dict().items()}
    torch.save(odd, tmp_path / "w.pt")
    words = [f"init.backbone={tmp_path / 'w.pt'}", "init.rename=[['^x/', '']]", "train.max_steps=1"]
    assert main(["train", "simclr/digits", *tiny.overrides("simclr", tmp_path, "run", *words)]) == 0
    assert f"init.rename: '^x/' -> '': {len(odd)} tensors" in (tmp_path / "run/log.txt").read_text()
