"""Which rank a process is: every launcher's variables, and what contradicts itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tiny
from selftask.distributed.device import pick_device
from selftask.distributed.world import World, expand_counts, first_host, launch_name, read_world
from selftask.errors import UserError
from selftask.run.local_ranks import starts_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def world(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> World:
    for name in {
        **TORCHRUN,
        **SRUN,
        "SELFTASK_LAUNCHER": "",
        "SLURM_RESTART_COUNT": "",
        "TORCHELASTIC_RESTART_COUNT": "",
    }:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return read_world()


def test_without_a_launcher_the_world_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world(monkeypatch, {}) == World(0, 1, 0, 1, "python")
    assert world(monkeypatch, {"NODE_RANK": "0"}) == World(0, 1, 0, 1, "python")


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    current = world(monkeypatch, TORCHRUN)
    assert current == World(3, 4, 1, 2, "torchrun", attempt=current.attempt)
    again = world(monkeypatch, TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.attempt != current.attempt


def test_torchrun_inside_srun_counts_as_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world(monkeypatch, SRUN | TORCHRUN).launcher == "torchrun"


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    current = world(monkeypatch, SRUN)
    assert (current.rank, current.size, current.local_rank, current.local_size) == (3, 4, 1, 2)
    assert current.launcher == "slurm"
    assert current.master is not None
    assert current.master[0] == "gpu07"
    assert 1024 < current.master[1] < 32768


def test_each_attempt_meets_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    first = world(monkeypatch, SRUN).master
    again = world(monkeypatch, SRUN | {"SLURM_RESTART_COUNT": "1"}).master
    step = world(monkeypatch, SRUN | {"SLURM_STEP_ID": "1"}).master
    assert len({first, again, step}) == 3
    assert all(place is not None and place[0] == "gpu07" for place in (first, again, step))
    of_rank_0 = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert world(monkeypatch, SRUN | of_rank_0).master == first, "all ranks of an attempt meet"
    given = SRUN | {"MASTER_ADDR": "n9", "MASTER_PORT": "4321"}
    assert world(monkeypatch, given).master == ("n9", 4321)


def test_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    open_mpi = dict(zip((f"OMPI_COMM_WORLD_{n}" for n in names), "3422", strict=True))
    mpich = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "2"}
    for variables in (open_mpi, mpich):
        with monkeypatch.context() as context:
            for name, value in variables.items():
                context.setenv(name, value)
            with pytest.raises(UserError, match="set MASTER_ADDR to the host of rank 0"):
                read_world()
            context.setenv("MASTER_ADDR", "node1")
            context.setenv("MASTER_PORT", "29500")
            world = read_world()
            assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 2, 2)
            assert (world.launcher, world.master) == ("mpi", ("node1", 29500))


def test_which_launcher_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the innermost one, if several have left variables."""
    mpi = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()}
    mpi |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    for variables, launcher in (
        ({}, "python"),
        (TORCHRUN, "torchrun"),
        (SRUN, "slurm"),
        (SRUN | TORCHRUN, "torchrun"),
        (mpi, "mpi"),
    ):
        current = world(monkeypatch, variables)
        assert current.launcher == launcher
        place = (current.rank, current.size, current.local_rank, current.local_size)
        assert place == ((0, 1, 0, 1) if launcher == "python" else (3, 4, 1, 2)), launcher


def test_mpirun_on_one_machine_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")  # of mpirun's daemons
    world = read_world()
    assert (world.rank, world.size, world.launcher) == (1, 2, "mpi")
    assert world.master is not None and world.master[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("launcher", "variable"), [("mpi", "PMIX_NAMESPACE"), ("slurm", "SLURM_STEP_ID")]
)
def test_ranks_in_a_script_each_share_the_name_of_their_launch(
    launcher: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "7.1")
    names = []
    for script in (11, 12):  # `mpirun wrapper.sh`: each rank is the child of its own shell
        monkeypatch.setattr(os, "getppid", lambda script=script: script)
        names.append(launch_name(launcher))
    assert names[0] == names[1]
    monkeypatch.setenv(variable, "7.2")
    assert launch_name(launcher) != names[0]
    assert launch_name("torchrun") == "child of 12"


def test_a_batch_script_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert world(monkeypatch, batch).size == 1


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"NODE_RANK": "1"}, r"NODE_RANK=1 but not RANK, .*--node_rank=\$NODE_RANK"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4"),
        ({**TORCHRUN, "RANK": "two"}, "RANK='two'"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "SLURM_PROCID=3"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE='many'"),
    ],
)
def test_contradictions_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        world(monkeypatch, variables)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[07,09-12],cpu1", "gpu07"),
        ("a-b1,c", "a-b1"),
        ("rack[3-4]-n", "rack3-n"),
        ("rack[1-2]node[01-16],x", "rack1node01"),
        ("r[1,3]n[04,06]-ib", "r1n04-ib"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_expand_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]


def test_who_starts_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, two = (tiny.config("mae", tmp_path, "run", f"launch.processes={n}") for n in (1, 2))
    nodes = tiny.config("mae", tmp_path, "run", "launch.nodes=2")
    world(monkeypatch, {})
    assert not starts_ranks(one)
    assert starts_ranks(two)
    with pytest.raises(UserError, match=r"launch\.nodes=2"):
        starts_ranks(nodes)
    world(monkeypatch, TORCHRUN)  # four ranks, of which this is one
    assert not starts_ranks(one)
    with pytest.raises(UserError, match="torchrun has started 4 processes"):
        starts_ranks(two)


@pytest.mark.parametrize(
    ("launcher", "gpus", "local_size", "refused"),
    [
        ("selftask", 1, 2, "launch.processes=2: torch sees 1 GPU on this machine"),
        ("torchrun", 1, 2, "torchrun --nproc_per_node=2: torch sees 1 GPU"),
        (
            "slurm",
            2,
            4,
            "4 ranks: torch sees 2 GPUs on this machine, and each rank needs one; use at",
        ),
        ("slurm", 1, 4, None),  # each task may see a GPU of its own
        ("selftask", 2, 2, None),
        ("python", 1, 1, None),
    ],
)
def test_ranks_that_would_share_a_gpu(
    launcher: str,
    gpus: int,
    local_size: int,
    refused: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sentence instead of NCCL's error, before any rank waits for another."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    chosen: list[int] = []
    for name, answer in {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: gpus,
        "set_device_index": chosen.append,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    of_rank = World(local_size - 1, local_size, local_size - 1, local_size, launcher)
    if refused is None:
        assert pick_device("auto", of_rank) == torch.device("cuda", chosen[0])
        return
    with pytest.raises(UserError) as error:
        pick_device("auto", of_rank)
    assert str(error.value).startswith(refused) and "train.device=cpu" in str(error.value)
    assert pick_device("cpu", of_rank) == torch.device("cpu")
