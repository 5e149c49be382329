"""The commands of docs/first-ten-minutes.md, as typed in an empty folder."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
from page_blocks import blocks, write_files

PAGE = "first-ten-minutes"


def _lines() -> list[str]:
    """Every line of the ``sh`` blocks."""
    return [
        line for block in blocks(PAGE) if block.language == "sh" for line in block.text.splitlines()
    ]


def _words(line: str) -> list[str]:
    """``selftask ...`` and ``python ...`` by this interpreter."""
    first, *rest = shlex.split(line, comments=True)
    assert first in ("selftask", "python"), line
    return [sys.executable, *(["-m", "selftask"] if first == "selftask" else []), *rest]


def _interrupt(words: list[str], home: Path) -> str:
    """Press Ctrl-C after the first logged step; return what was printed."""
    run = subprocess.Popen(
        words, cwd=home, env=tiny.environment(), stdout=subprocess.PIPE, text=True
    )
    metrics, end = home / "runs/first/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and '"loss"' in metrics.read_text()):
        assert run.poll() is None and time.monotonic() < end, "no step was logged"
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    printed, _ = run.communicate(timeout=60)
    return printed


@pytest.mark.slow
def test_commands_run_and_print_what_the_page_says(tmp_path: Path) -> None:
    assert write_files(PAGE, tmp_path) == ["digits.py", "neighbors.py"]
    lines, said = _lines(), {}
    train = next(line for line in lines if line.startswith("selftask train"))
    assert lines.count(train) == 2, "once to be interrupted, once to resume"
    for number, line in enumerate(lines):
        words = _words(line)
        if line == train and number == lines.index(train):
            assert "RUN interrupted by SIGINT" in _interrupt(words, tmp_path)
            continue
        done = tiny.run(words, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        said[line] = done.stdout
    assert "CHECK ok: all 1,437 images" in said["selftask data check images/train"]
    assert "resumes at step" in said[train] and "RUN finished: 220 steps" in said[train]
    rows = tiny.rows(tmp_path / "runs/first")
    first, last = (row["knn_top1"] for row in rows if "knn_top1" in row)
    assert first == pytest.approx(0.81, abs=0.03) and last > 0.92
    for kind, least in {"knn": 0.92, "linear": 0.95}.items():
        line = next(line for line in lines if f"eval {kind}" in line)
        result = json.loads(said[line].splitlines()[-1])
        assert result[f"{kind}_top1"] >= least
    assert "60 tensors\n(360, 128) 9" in said["python neighbors.py"]
    assert "\nraw pixels: 95% of the nearest" in said["python neighbors.py"]
    assert "first: learning: the loss fell" in said["selftask report runs/first"]
    assert "finished  220/220" in said["selftask runs"]
    assert (tmp_path / "features/images.csv").exists() and (tmp_path / "views.png").exists()
