"""``auto``: the cores of a container and the ranks of a node decide about workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from selftask.config.load import load_config
from selftask.config.values import auto_values


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node of 16 cores; what its control groups say can be written into the folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(auto_values, "_CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def test_cores_are_those_this_process_may_use(machine: Path) -> None:
    assert auto_values.cores() == 16
    (machine / "cpu.max").write_text("max 100000\n")
    assert auto_values.cores() == 16
    (machine / "cpu.max").write_text("350000 100000\n")
    assert auto_values.cores() == 4
    (machine / "cpu.max").write_text("10000 100000\n")
    assert auto_values.cores() == 1
    (machine / "cpu.max").write_text("6400000 100000\n")
    assert auto_values.cores() == 16


def test_cores_of_older_control_groups(machine: Path) -> None:
    (machine / "cpu").mkdir()
    (machine / "cpu/cpu.cfs_period_us").write_text("100000\n")
    for quota, expected in (("-1", 16), ("250000", 3)):
        (machine / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert auto_values.cores() == expected


@pytest.mark.parametrize(
    ("processes", "local_world_size", "expected"),
    [
        (1, None, 16),
        (2, None, 8),
        (4, None, 4),
        (1, "8", 2),
        (4, "4", 4),
        (1, "x", 16),
        (32, None, 0),
    ],
)
def test_workers_share_the_cores_of_a_node(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
    local_world_size: str | None,
    expected: int,
) -> None:
    if local_world_size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    assert auto_values.num_workers(processes)[0] == expected


def test_a_config_gets_its_workers_under_torchrun(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_config("simclr/digits", ["launch.processes=4"]).data.num_workers == 4
    alone = load_config("simclr/digits", [])
    assert alone.place("data.num_workers") == "auto: 16 cores, 1 rank"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = load_config("simclr/digits", [])
    assert config.data.num_workers == 2
    assert config.place("data.num_workers") == "auto: 16 cores, 8 ranks"
    assert load_config("simclr/digits", ["data.num_workers=5"]).data.num_workers == 5
