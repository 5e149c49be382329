"""A real SLURM, two nodes on this machine: whatever happens to a job, its run ends as undisturbed.

Each test trains the same 15 steps on two ranks of two nodes. A hook slows them down while
something is done to the job, and the final tensors are compared bit for bit with those of a run
that was left in peace.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from slurm_run import PACE, SETTINGS, STEPS, Run, command, ends_like, wait_for
from submitit.core.utils import FailedJobError

import tiny
from selftask.cli.main import main
from selftask.logs.checkpoint_results import FOLDER, CheckpointResults
from selftask.slurm.plan import plan

# Tried once more, visibly: when signals come, jobs start and nodes fail is SLURM's affair, which
# on a loaded machine may be later than a run lasts. What these tests compare does not vary.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.flaky(reruns=1),
    pytest.mark.slurm,
]

PHOTOS = tiny.ROOT.parent / "shared" / "data" / "photos" / "train"


def _load_cluster() -> ModuleType:
    """tools/slurm/cluster.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("cluster", tiny.ROOT / "tools/slurm/cluster.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster() -> Iterator[ModuleType]:
    """Two nodes; the tests are skipped, loudly, where they cannot be had."""
    module = _load_cluster()
    was_up = module.is_up(module.FOLDER / "slurmctld.pid")
    try:
        config = module.up()
    except module.ClusterError as error:
        warnings.warn(f"NO TEST HAS SEEN A SLURM CLUSTER: {error}", stacklevel=1)
        pytest.skip(f"no SLURM cluster can be started here: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", tiny.environment()["PYTHONPATH"])
        yield module
    if not was_up:
        module.down()
        assert "up" not in [line.split()[-1] for line in module.status().splitlines()]


@pytest.fixture(scope="module")
def folder(cluster: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all runs of this file lie, and from where they are submitted."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "pace.py").write_text(PACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(autouse=True)
def _empty_queue(cluster: ModuleType) -> Iterator[None]:
    """A failed test leaves no job to the next one."""
    yield
    subprocess.run(["scancel", "--quiet", "--user=root"], check=False)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    """The last checkpoint of a run that nothing happens to."""
    run = Run(folder, "undisturbed")
    run.wait_for_end()
    assert run.job.results() == [str(run.out)] * 2
    assert "RUN finished" in run.last_line
    return tiny.last_state(run.out)


@pytest.mark.skipif(not PHOTOS.is_dir(), reason=f"there are no photographs in {PHOTOS}")
def test_two_nodes_train_on_photographs(folder: Path) -> None:
    small = ("views.main.transforms.0.size=32", "backbone={name: small_resnet, width: 8}")
    length = ("train.epochs=null", "train.max_steps=4")
    run = Run(folder, "photos", f"data={PHOTOS}", *small, *length, recipe="simclr/images")
    run.wait_for_end()
    assert run.step == 4
    assert run.job.results() == [str(run.out)] * 2


def test_requeued_by_hand(folder: Path, undisturbed: dict[str, Any]) -> None:
    run = Run(folder, "requeued", pace=0.5)
    run.wait_for_step(4)
    command("scontrol", "requeue", run.job.job_id)
    line = f"SLURM has put job {run.job.job_id} back into the queue"
    wait_for(lambda: line in run.log, 30, f"{line!r} in the log")  # after status and report
    run.at_full_speed()
    run.wait_for_end()
    assert re.search(r"resumed from \S+: step (\d+)", run.log)
    ends_like(run, undisturbed)


def test_preempted_by_a_job_of_another_partition(folder: Path, undisturbed: dict[str, Any]) -> None:
    run = Run(folder, "preempted", "launch.slurm.partition=main", pace=0.5)
    run.wait_for_step(4)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
    job = command(*urgent, "--output=/dev/null", "--wrap=sleep 2").strip()
    wait_for(lambda: run.state == "requeued", 15, f"requeued, not {run.state}")
    run.at_full_speed()
    run.wait_for_end()
    assert int(run.slurm("Restarts")) == 1
    assert "JobState=COMPLETED" in command("scontrol", "show", "job", job)
    ends_like(run, undisturbed)


def test_time_limit_reached_twice(folder: Path, undisturbed: dict[str, Any]) -> None:
    """One minute is the shortest limit; SLURM warns up to some tens of seconds too early.

    At 7 seconds a step, no attempt does more than 7 of the 15 steps: there are two restarts.

    It warns every process of the step, those of the loader among them.
    """
    limit = ("launch.slurm.time=1", "launch.slurm.signal_delay_s=10", "launch.max_requeues=7")
    run = Run(folder, "timed_out", *limit, "data.num_workers=1", pace=7.0)
    run.wait_for_attempt(1)
    run.wait_for_attempt(2)
    run.at_full_speed()
    run.wait_for_end()
    stops = re.findall(r"RUN interrupted by SIGUSR2 at step (\d+); checkpoint saved", run.log)
    assert len(stops) == 2
    assert 0 < int(stops[0]) < int(stops[1]) < STEPS
    left = re.findall(r"back in the queue; (\d) of 7 requeues left", run.log)
    assert left == ["6", "5"]
    ends_like(run, undisturbed)


def test_killed_rank(folder: Path, undisturbed: dict[str, Any]) -> None:
    """Rank 0: with it goes whoever could speak for the others."""
    run = Run(folder, "killed_once", "launch.max_requeues=3", pace=0.5)
    run.wait_for_step(4)
    run.kill(0)
    run.wait_for_attempt(1)
    dead = r"rank 0 (on n1 was killed|\(pid \d+ on \S+\) is dead: killed from outside)"
    assert re.search(dead, run.log)
    assert "2 of 3 requeues left" in run.log
    run.at_full_speed()
    run.wait_for_end()
    ends_like(run, undisturbed)


def test_stopped_rank_0(folder: Path, undisturbed: dict[str, Any]) -> None:
    """It keeps the board of the watch; that it does not answer ends the run, which comes back."""
    limit = ("launch.hang_timeout_s=15", "launch.max_restarts=1")
    run = Run(folder, "stopped", *limit, pace=0.5)
    run.wait_for_step(4)
    run.kill(0, signal.SIGSTOP)
    run.wait_for_attempt(1)
    assert re.search(r"rank 0 \(pid \d+ on \S+\) has not answered for 15 s", run.log)
    assert "0 of 1 restarts left" in run.log
    run.at_full_speed()
    run.wait_for_end()
    ends_like(run, undisturbed)


def test_killed_rank_without_requeues(folder: Path) -> None:
    run = Run(folder, "killed", "launch.max_requeues=0", pace=0.5)
    run.wait_for_step(2)
    run.kill(1)
    run.wait_for_end("failed")
    assert "RUN FAILED" in run.last_line
    assert "rank 1" in run.last_line
    assert run.slurm("JobState") == "FAILED"
    with pytest.raises(FailedJobError, match="rank 1"):
        run.job.result()


def test_node_failure(cluster: ModuleType, folder: Path, undisturbed: dict[str, Any]) -> None:
    run = Run(folder, "node_failed", pace=0.5)
    run.wait_for_step(4)
    (run.out / "pace").write_text("300")  # SLURM takes its time to miss a node
    os.kill(int((cluster.FOLDER / "slurmd-n2.pid").read_text()), signal.SIGKILL)
    try:
        wait_for(lambda: int(run.slurm("Restarts")) == 1, 120, "SLURM to miss the node")
    finally:
        cluster.start_node("n2")
    run.at_full_speed()
    run.wait_for_attempt(1)
    run.wait_for_end()
    ends_like(run, undisturbed)


@pytest.mark.parametrize("rank", [0, 1])
def test_node_that_dies_with_its_rank(
    cluster: ModuleType, folder: Path, undisturbed: dict[str, Any], rank: int
) -> None:
    """The rank is missed long before the node is."""
    run = Run(folder, f"node_died_{rank}", pace=0.5)
    run.wait_for_step(4)
    node = f"n{rank + 1}"
    os.kill(int((cluster.FOLDER / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
    run.kill(rank)
    try:
        wait_for(lambda: int(run.slurm("Restarts")) == 1, 120, "a requeue")
    finally:
        cluster.start_node(node)
    run.at_full_speed()
    run.wait_for_attempt(1)
    run.wait_for_end()
    ends_like(run, undisturbed)


def test_cancelled(folder: Path) -> None:
    run = Run(folder, "cancelled", pace=0.5)
    run.wait_for_step(3)
    done = tiny.run([sys.executable, "-m", "selftask", "cancel", str(run.out)], folder)
    assert done.returncode == 0, done.stderr
    run.wait_for_end("interrupted")
    assert run.slurm("JobState") == "CANCELLED"
    assert f"job {run.job.job_id} was cancelled" in run.last_line
    assert tiny.status(run.out)["by"] == "scancel"
    listed = tiny.run([sys.executable, "-m", "selftask", "jobs", str(run.out)], folder).stdout
    assert "interrupted" in listed
    assert run.last_line in listed


def test_failing_run_fails_its_job(folder: Path) -> None:
    run = Run(folder, "raised", "hooks.fault_injection={at: 3, rank: 1, kind: raise}")
    run.wait_for_end("failed")
    assert run.slurm("JobState") == "FAILED"
    assert run.slurm("ExitCode") != "0:0"
    assert "RUN FAILED at step 3 on rank 1: InjectedFault" in run.last_line
    assert "InjectedFault" in (run.out / "errors" / "rank1.txt").read_text()
    with pytest.raises(FailedJobError, match="InjectedFault"):
        run.job.result()
    for path in (run.out / "slurm").glob("*_log.*"):
        assert "completed successfully" not in path.read_text()


LATE = '''
"""Images that one node does not have."""
import os
import numpy as np

class Images:
    def __init__(self):
        if os.environ.get("SLURM_PROCID") == "1" and "SLURM_STEP_ID" in os.environ:
            raise OSError("there is no /scratch/images")

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return np.full((32, 32, 3), index, np.uint8), 0
'''


def test_rank_that_fails_before_the_ranks_meet(folder: Path) -> None:
    """Rank 0, which waits for it, is not to blame."""
    (folder / "late.py").write_text(LATE)
    run = Run(folder, "early", "data=late:Images", "launch.max_requeues=0")
    run.wait_for_end("failed")
    assert "on rank 1: " in run.last_line
    assert "there is no /scratch/images" in run.last_line
    assert tiny.status(run.out)["rank"] == 1


def test_killed_worker_starts_again(folder: Path, undisturbed: dict[str, Any]) -> None:
    """Killed for want of memory, most likely: a failure, and not a mistake of the user."""
    run = Run(folder, "worker", "launch.max_restarts=1", "data.num_workers=1", pace=0.5)
    run.wait_for_step(4)
    ranks = [pid for pid, rank in run.processes().items() if rank == 1]
    workers = [pid for pid in ranks if _parent(pid) in ranks and not _children(pid)]
    os.kill(workers[0], signal.SIGKILL)
    run.wait_for_attempt(1)
    assert "data: worker process" in run.log
    assert "0 of 1 restarts left" in run.log
    run.at_full_speed()
    run.wait_for_end()
    ends_like(run, undisturbed)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_sweep_is_a_job_array(folder: Path) -> None:
    words = tiny.overrides("simclr", folder, "sweep", "launch.nodes=2", "train.seed=1,2")
    jobs = plan("simclr/digits", [*words, "train.max_steps=2"]).submit()
    outs = [folder / "sweep" / name for name in ("seed_1", "seed_2")]
    assert [job.job_id.partition("_")[2] for job in jobs] == ["0", "1"]
    finished = [out / "status.json" for out in outs]
    wait_for(lambda: all(path.exists() for path in finished), 90, "both to start")
    wait_for(lambda: all(tiny.status(out)["state"] == "finished" for out in outs), 90, "both")
    assert [job.results() for job in jobs] == [[str(out)] * 2 for out in outs]
    listed = tiny.run([sys.executable, "-m", "selftask", "jobs", "sweep"], folder).stdout
    assert listed.count("RUN finished: 2 steps") == 2
    assert tiny.differences(*(tiny.last_state(out)["model"] for out in outs)) != []


def test_srun_and_submit_train_alike(folder: Path, undisturbed: dict[str, Any]) -> None:
    """Plain srun of two tasks: the same run without submitit."""
    settings = [word for word in SETTINGS if not word.startswith("launch.")]
    words = tiny.command("simclr", folder, "srun", *settings)
    command("srun", "--nodes=2", "--ntasks=2", "--time=5", *words)
    assert tiny.differences(tiny.last_state(folder / "srun"), undisturbed) == []


def test_a_suite_of_evaluations(folder: Path) -> None:
    """A job for each checkpoint gives what the command gives here."""
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    more = (val, "train.max_steps=6", "train.checkpoint_every='2 steps'", "eval.evaluations={}")
    words = tiny.command("simclr", folder, "suite", *more, "train.keep_checkpoints=5")
    assert tiny.run(words, folder).returncode == 0
    run = folder / "suite"
    assert main(["eval", "suite", str(run), "knn", "knn.k=[3]", "--slurm-each"]) == 0
    results = CheckpointResults(run, ["knn.k=[3]"])
    wait_for(lambda: not any(results.missing(s, ["knn"]) for s in (2, 4, 6)), 400, "three jobs")
    assert [set(row) for row in results.table().values()] == [{"knn_top1"}] * 3
    on_nodes = results.table()
    for path in (run / FOLDER).glob("step_*.jsonl"):
        path.unlink()
    assert main(["eval", "suite", str(run), "knn", "knn.k=[3]"]) == 0
    assert results.table() == on_nodes
