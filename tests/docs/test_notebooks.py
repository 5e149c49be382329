"""The notebooks of the documentation run from top to bottom, and learn something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny

NOTEBOOKS = sorted((tiny.ROOT / "docs/notebooks").glob("*.ipynb"))
RUNS = {"own_method": "runs/simsiam", "pretrain_and_look": "runs/notebook"}


def test_both_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(RUNS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_hold_no_paths_of_the_machine_that_ran_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "/tmp/" not in text and "Traceback" not in text
    cells = json.loads(text)["cells"]
    assert any(cell.get("outputs") for cell in cells), "shown as they are, without being run"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel"), pytest.importorskip("matplotlib")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    assert tiny.status(tmp_path / RUNS[path.stem])["state"] == "finished"
    actual = [row["knn_top1"] for row in tiny.rows(tmp_path / RUNS[path.stem]) if "knn_top1" in row]
    assert actual[0] < 0.85 < 0.9 < actual[-1]
