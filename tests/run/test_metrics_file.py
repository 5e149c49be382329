"""metrics.jsonl: rows are cut back on resume, and a row that cannot be written is told."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from selftask.errors import RunError
from selftask.logs import read_metrics
from selftask.logs.rows import MetricsFile


def test_a_row_that_cannot_be_written_ends_the_run_in_one_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    file.close()
    with pytest.raises(RunError, match=r"^/dev/full: a row could not be written: No space"):
        MetricsFile(Path("/dev/full")).write({"step": 2})
    with pytest.raises(RunError, match=f"^{re.escape(str(tmp_path))}: [Ii]s a directory$"):
        MetricsFile(tmp_path)


def test_metrics_are_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = MetricsFile(path)
    rows.write({"step": 1, "loss": 0.5})
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}], "there at once"
    kept = rows.length
    rows.write({"step": 2, "loss": float("nan")})
    rows.close()
    assert read_metrics(path)[1] == {"step": 2, "loss": None}
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # killed while it wrote
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    again = MetricsFile(path)
    complete = len(path.read_bytes().rpartition(b"\n")[0]) + 1
    assert again.cut(10**6) == 10**6 - complete  # a checkpoint copied later than this file
    assert path.read_bytes().endswith(b"null}\n")
    assert again.cut(kept) == 0
    again.write({"step": 2, "loss": 0.25})
    again.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25},
    ]


@pytest.mark.parametrize("change", ["removed", "moved", "begun anew"])
def test_a_run_ends_if_its_folder_is_removed_moved_or_begun_anew(
    tmp_path: Path, change: str
) -> None:
    """Its checkpoints would be written among those of the run that began anew there."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = MetricsFile(folder / "metrics.jsonl")
    rows.write({"step": 1})
    rows.write({"step": 2})
    shutil.rmtree(folder) if change != "moved" else folder.rename(tmp_path / "moved")
    if change == "begun anew":
        folder.mkdir()
        other = MetricsFile(folder / "metrics.jsonl")
        other.write({"step": 1})
        other.close()
    with pytest.raises(RunError, match=r"run/metrics\.jsonl: was moved, removed or replaced"):
        rows.write({"step": 3})
    rows.close()


@pytest.mark.parametrize("content", [b"garbage\n" * 99, b""], ids=["longer", "empty"])
def test_a_run_ends_if_its_file_is_overwritten(tmp_path: Path, content: bytes) -> None:
    """The size in its checkpoints would be that of other rows."""
    path = tmp_path / "metrics.jsonl"
    rows = MetricsFile(path)
    rows.write({"step": 1})
    path.write_bytes(content)
    with pytest.raises(RunError, match=rf"metrics\.jsonl: has {len(content)} bytes, and this run"):
        rows.write({"step": 2})
    assert path.read_bytes() == content
    rows.close()
