"""Files of millions of rows are read in bounded time and memory: what is drawn of them."""

from __future__ import annotations

import json
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from run_folders import row, write_run
from selftask.logs import drawn_rows
from selftask.logs.drawn_rows import read_drawn_rows, read_ends
from selftask.report.record import RunRecord
from selftask.report.run_report import write_run_report

ROWS = 80_000


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A run with 80,000 rows, two spikes of the loss and an evaluation every 1,000 steps."""
    run, draw = write_run(tmp_path / "run"), random.Random(0)
    lines = []
    for step in range(1, ROWS + 1):
        loss = {12_345: 99.0, 23_456: 1e-4}.get(step, 1 + draw.random())
        lines.append(json.dumps(row(step, loss)))
        if step % 1000 == 0:
            lines.append(json.dumps({"step": step, "epoch": step / 4, "knn_top1": step / ROWS}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_what_is_drawn_of_a_large_file(large: Path) -> None:
    """A report of a million rows took minutes and 1.5 GB."""
    tracemalloc.start()
    actual = read_drawn_rows(large / "metrics.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (large / "metrics.jsonl").stat().st_size
    assert size > drawn_rows.WHOLE and peak < size, "all rows took six times the file's size"
    steps = [row["step"] for row in actual.rows]
    assert actual.lines == ROWS + ROWS // 1000 and len(steps) < 4500
    assert steps == sorted(steps)
    assert {12_345, 23_456} <= set(steps), "spikes of the loss are kept"
    assert sum("knn_top1" in row for row in actual.rows) == ROWS // 1000
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) <= 2 * ROWS / drawn_rows.PARTS, "from all parts of the run"
    page = write_run_report(RunRecord.read(large)).read_text()
    assert f"metrics.jsonl: {len(steps):,} of {actual.lines:,} rows are read" in page
    assert "99.0" in page


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=300)
    actual = read_drawn_rows(run / "metrics.jsonl")
    assert (len(actual.rows), actual.lines) == (301, 0)


def test_lines_without_end_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    assert read_drawn_rows(path).rows == [] and read_ends(path).rows == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 48 << 20


def test_long_rows_of_a_large_file_are_drawn(tmp_path: Path) -> None:
    """As of hooks.activations with many layers."""
    wide = {f"activations/layer4.{n}.downsample/mean": 0.123456789 for n in range(600)}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(n, 1.0, **wide)) + "\n" for n in range(400)))
    assert path.stat().st_size > drawn_rows.WHOLE
    assert [r["step"] for r in read_drawn_rows(path).rows] == [*range(400)]


def test_the_first_and_last_events_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        json.dumps({"event": "warning", "step": step, "text": "x" * 200}) for step in range(60_000)
    ]
    path.write_text("\n".join(lines) + "\n")
    actual = read_ends(path)
    steps = [row["step"] for row in actual.rows]
    assert (steps[0], steps[-1], actual.damaged) == (0, 59_999, 0)
    assert 30_000 < len(steps) < 45_000 and actual.lines == 60_000
