"""Every script of tools/bench runs in its smallest form, so that its figures can be repeated."""

from __future__ import annotations

import importlib
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image

import tiny

BENCH = Path(__file__).resolve().parents[2] / "tools/bench"
SMALLEST = {
    "augment": "cifar --rounds 1 --images 2",
    "bfloat16": "--rounds 1",
    "checkpoint": "--megabytes 2 --rounds 1",
    "device_augment": "--batch 8 --rounds 1",
    "file_list": "--count 20000 --tree 100 --rounds 1",
    "freed_memory": "--batch 2 --steps 1 --rounds 1",
    "kernel": "--size 32 --rounds 1",
    "knn": "--train 200 --test 50 --rounds 1",
    "large_bank": "--rows 20000 --width 32 --queries 10",
    "launches": "--methods simclr --networks resnet50",
    "linear": "--images 100 --width 16 --rounds 1",
    "loader": "--workers 1 --batch 4 --batches 1 --rounds 1",
    "long_run": "--steps 100 --evaluations 1 --maps",
    "method_step": "simclr --rounds 1 --batch 4",
    "products": "--steps 1 --batch 2 --recipes capi/digits",
    "reduction": "--model resnet18 --rounds 4",
    "sampler": "--sizes 1e4 --rounds 1",
    "startup": "--only help --rounds 1",
    "step_memory": "--batch-size 16 --chunks 2",
    "step_overhead": "--models mlp --rounds 1",
    "threads": "--recipes simclr/digits --steps 1",
}
NEEDS_PEER = {"knn": "faiss", "method_step": "lightly"}
NEEDS_DATA = {"end_to_end", "end_to_end_peers", "processes", "same_accuracy", "same_learning"}


def test_all_scripts_are_here() -> None:
    scripts = {path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == {*SMALLEST} | NEEDS_DATA


def test_options_of_compared_methods_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``method_step``, also if the other library is not installed."""
    monkeypatch.syspath_prepend(BENCH)
    method_step = importlib.import_module("method_step")
    for contests in method_step.CONTESTS.values():
        for name, contest in contests.items():
            method_step.load_contest(name, contest, 32, "auto", tmp_path)


@pytest.mark.slow
def test_a_training_from_files_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """selftask's side of ``end_to_end``, without other libraries."""
    for name in ("a", "b"):
        (tmp_path / "small" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), "red").save(tmp_path / "small" / name / "0.jpg")
    monkeypatch.syspath_prepend(BENCH)
    end_to_end = importlib.import_module("end_to_end")
    contest = "simclr, small network"
    images = end_to_end.link_often(tmp_path / "small", tmp_path / "images", 512)
    with ExitStack() as ends:
        contestant = end_to_end.Contestant("selftask", contest, "float32", images, tmp_path / "out")
        ends.callback(contestant.end)
        assert contestant.wait(1), contestant.log.read_text()
        contestant.stop()
        for _ in range(2):
            contestant.run(1)
        assert end_to_end.table(contest, [contestant]).startswith("| simclr, small network | self")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_script_runs(name: str, tmp_path: Path) -> None:
    """As a user calls it: without this checkout's tests on the path."""
    if name in NEEDS_PEER:
        pytest.importorskip(NEEDS_PEER[name])
    command = [sys.executable, str(BENCH / f"{name}.py"), *SMALLEST[name].split()]
    environment = {**tiny.environment(), "PYTHONPATH": ""}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.stdout.strip() and "Traceback" not in process.stderr, process.stderr
