"""What a run prints: numbers, the bar, warnings; nothing twice, nothing wrong."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main
from selftask.data.loading import workers
from selftask.logs import json_row, stages, verbosity


def test_floats_have_nine_digits() -> None:
    assert json_row({"a": 0.1 + 0.2 + 0.128, "b": float("nan"), "c": 3}) == (
        '{"a": 0.428, "b": null, "c": 3}'
    )
    assert json_row({'"': 2.0, "e": 1e-5, "g": -1.23456789012e10}) == (
        '{"\\"": 2.0, "e": 1e-05, "g": -1.23456789e+10}'
    ), "a float stays a float"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout is a terminal, as far as anyone asks."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("terminal")
def test_the_bar_goes_on_where_the_run_does(tmp_path: Path) -> None:
    tiny.train("simclr", tmp_path, "run", "train.stop_at=7")
    task = tiny.task("simclr", tmp_path, "run")
    task.prepare()
    hook = task.named_hooks["progress"]
    hook.on_start(task)
    assert (hook.stage.done, hook.stage.total, hook.stage.text) == (7, 15, "epoch 1.4")
    hook.on_exception(task)
    task.close()


@pytest.mark.usefixtures("terminal")
def test_the_bar_moves_when_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each step: an update of the bar takes as long as all else of the trainer."""
    task = tiny.task("simclr", tmp_path, "run", "train.epochs=20")
    task.prepare()
    hook = task.named_hooks["progress"]
    hook.on_start(task)
    start, seen = hook.stage.due, []
    monkeypatch.setattr(stages.time, "monotonic", lambda: start + 0.01 * task.steps_done)
    for _ in range(100):
        task.advance()
        hook.on_step(task)
        seen.append(hook.stage.done)
    hook.on_end(task)
    task.close()
    assert sorted(set(seen)) == [1, 26, 51, 76]
    assert hook.stage is None


@pytest.mark.parametrize(
    ("name", "value"), [("TERM", "dumb"), (verbosity.VARIABLE, "quiet"), ("RANK", "1")]
)
@pytest.mark.usefixtures("terminal")
def test_no_live_lines(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages.can_draw()
    monkeypatch.setenv(name, value)
    if name == "RANK":
        others = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        for other, text in others.items():
            monkeypatch.setenv(other, text)
    assert not stages.can_draw()


def test_one_image_has_no_spread(tmp_path: Path) -> None:
    tiny.train("mae", tmp_path, "run", "train.batch_size=1", "train.max_steps=2")
    rows = tiny.rows(tmp_path / "run")
    assert len(rows) == 2
    assert all(value is not None for row in rows for value in row.values())
    assert "emb_std" not in rows[0]


def test_too_many_workers_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    workers._warn_of_many.cache_clear()
    words = (f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 430)}", "train.max_steps=1")
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        tiny.train("supervised", tmp_path, "run", *words, "data.num_workers=2")
    logged = [line for line in caplog.messages if "num_workers=2: more than the 1 cores" in line]
    assert len(logged) == 1


def test_data_show_writes_where_out_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "show", "simclr", "--images", "1", "out=mine.png"]) == 0
    assert "SHOW wrote mine.png" in capsys.readouterr().out
    assert (tmp_path / "mine.png").exists()
    assert main(["data", "show", "simclr", "out=folder"]) == 2
    assert "must end with .png" in capsys.readouterr().err
