"""projects/slurm_sweep: the comparison of checkpoints, and the whole script on virtual nodes."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tiny

SCRIPT = tiny.ROOT / "projects/slurm_sweep/run.py"


def load(path: Path) -> ModuleType:
    """A script, which is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"sweep_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_single_bit_is_a_difference() -> None:
    differences = load(SCRIPT).differences
    weights = torch.tensor([1.0, float("nan"), 0.0])
    state = {"a": [weights, 3], "b": float("nan")}
    assert differences(state, {"a": [weights.clone(), 3], "b": float("nan")}) == []
    bit = torch.tensor([1.0, float("nan"), -0.0])
    assert differences(state, {**state, "a": [bit, 3]}) == ["checkpoint.a[0]: tensors differ"]
    assert differences(state, {**state, "a": [weights, 4]}) == ["checkpoint.a[1]: 3 and 4"]
    assert differences(state, {"a": state["a"]}) == ["checkpoint.b: on one side only"]
    assert differences([1], [1, 2]) == ["checkpoint: 1 and 2 entries"]


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.flaky(reruns=1)  # when SLURM starts a job is its own affair
def test_one_of_two_runs_is_preempted(tmp_path: Path) -> None:
    cluster = load(tiny.ROOT / "tools/slurm/cluster.py")
    was_up = cluster.is_up(cluster.FOLDER / "slurmctld.pid")
    try:
        config = cluster.up()
    except cluster.ClusterError as error:
        warnings.warn(f"NO TEST HAS SEEN A SLURM CLUSTER: {error}", stacklevel=1)
        pytest.skip(f"no SLURM cluster can be started here: {error}")
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)  # there if the test is tried once more
    words = [sys.executable, str(SCRIPT), "--seeds", "2", "--patience", "240"]
    words += ["backbone.width=8", "train.epochs=40", "eval.evaluations={knn: null}"]
    done = tiny.run(words, tmp_path, SLURM_CONF=str(config), timeout=280)
    if not was_up:
        cluster.down()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same checkpoint, bit for bit" in done.stdout.splitlines()[-1]
    assert "resumed from" in done.stdout
