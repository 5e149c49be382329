"""The blocks of ``docs/python.md``: run in order, and in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny

PAGE = (tiny.ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LIBRARIES = ("lightning", "accelerate")


def library_of(block: str) -> str | None:
    return next((name for name in LIBRARIES if name in block), None)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_names: None) -> dict[str, Any]:
    """The names that the blocks of selftask alone leave behind."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(BLOCKS):
        if library_of(block) is None:
            exec(compile(block, f"python.md:{number}", "exec"), names)
    return names


def test_blocks_run(page: dict[str, Any], tmp_path: Path) -> None:
    assert tiny.status(tmp_path / "runs/first")["state"] == "finished"
    assert len(tiny.rows(tmp_path / "runs/task")) > 0
    assert page["step"] == 4  # of the plain loop: an epoch of four batches
    assert page["network"][0].weight.grad is not None, "trained in place"
    assert page["run"].load().features(torch.zeros(2, 3, 32, 32)).shape == (2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_blocks_of_other_libraries_run(library: str, page: dict[str, Any]) -> None:
    pytest.importorskip(library)
    blocks = [block for block in BLOCKS if library_of(block) == library]
    assert len(blocks) == 1
    exec(compile(blocks[0], "python.md", "exec"), page)


@pytest.mark.slow
def test_blocks_run_in_a_notebook(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(block) for block in BLOCKS if library_of(block) is None]
    cells.append(nbformat.v4.new_code_cell("print('steps', step)"))
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert "steps 4" in "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
