"""A SLURM sweep with one preempted run, which must be bit-identical to an undisturbed one.

    python run.py [--virtual] [--out runs/slurm_sweep] [--seeds 4] [key=value ...]

Submits recipe.yaml with a list of seeds and waits until the second run has done some steps. Then a
job of the partition `urgent` takes its node: SLURM requeues the run, which saves, waits and
resumes. At the end the same seed is trained again on this machine without interruption, and both
final checkpoints are compared tensor by tensor. --virtual starts a cluster of two nodes on this
machine (root, Debian; tools/slurm/cluster.py). Otherwise the cluster of the shell needs a partition
`main` whose jobs are preempted (PreemptMode=REQUEUE) by those of `urgent`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from selftask.checkpoint import rotation, store
from selftask.logs import read_json, read_metrics

HERE = Path(__file__).resolve().parent
ENDS = ("finished", "failed", "interrupted")
NOT_COMPARED = ("config", "metrics_bytes")  # they contain the folder and the times of a run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", action="store_true", help="start a cluster on this machine")
    parser.add_argument("--out", type=Path, default=Path("runs/slurm_sweep"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--patience", type=float, default=900, help="seconds for all runs")
    options, overrides = parser.parse_known_args(argv)
    if options.seeds < 2:
        parser.error("--seeds: a sweep has at least 2 runs")
    if options.virtual:
        os.environ["SLURM_CONF"] = start_cluster()

    seeds = range(1, options.seeds + 1)
    runs = [options.out / f"seed_{seed}" for seed in seeds]
    preempted = runs[1]
    deadline = time.monotonic() + options.patience
    sweep = f"train.seed={','.join(map(str, seeds))}"
    selftask("submit", *overrides, sweep, f"out={options.out}")

    wait_for(lambda: steps_of(preempted) >= 6, deadline, f"6 steps of {preempted}")
    node = node_of(preempted)
    print(f"{preempted} is at step {steps_of(preempted)}: an urgent job takes its node {node}")
    urgent = ["sbatch", "--parsable", "--partition=urgent", f"--nodelist={node}", "--exclusive"]
    subprocess.run([*urgent, "--output=/dev/null", "--wrap=sleep 2"], check=True)
    wait_for(
        lambda: was_requeued(preempted) or state_of(preempted) in ENDS,
        deadline,
        f"{preempted} to be requeued",
    )
    if not was_requeued(preempted):
        sys.exit(f"error: {preempted} ended before it was preempted; longer: train.epochs=40")
    wait_for(lambda: all(state_of(run) in ENDS for run in runs), deadline, "all runs to end")

    seed = f"train.seed={seeds[1]}"
    undisturbed = options.out.with_name(f"{options.out.name}_undisturbed")
    selftask("train", *overrides, seed, f"out={undisturbed}")
    print("\n".join(events_of(preempted)))
    print(table([*runs, undisturbed]))
    differing = differences(last_state(preempted), last_state(undisturbed))
    same = f"{preempted} and {undisturbed}: the same checkpoint, bit for bit"
    print("\n".join(["DIFFERENT:", *differing[:10]]) if differing else same)
    good = not differing and all(state_of(run) == "finished" for run in runs)
    return 0 if good else 1


def start_cluster() -> str:
    """Start the virtual cluster; return the path of its slurm.conf."""
    script = HERE.parents[1] / "tools/slurm/cluster.py"
    done = subprocess.run([sys.executable, str(script), "up"], text=True, stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit("error: no virtual cluster; see above")
    return done.stdout.strip().rpartition("=")[2]


def selftask(command: str, *words: str) -> None:
    recipe = str(HERE / "recipe.yaml")
    subprocess.run([sys.executable, "-m", "selftask", command, recipe, *words], check=True)


def wait_for(true: Callable[[], Any], deadline: float, what: str) -> None:
    while not true():
        if time.monotonic() > deadline:
            sys.exit(f"error: waited in vain for {what}; see `selftask jobs` and `squeue`")
        time.sleep(0.2)


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(path)), default=0) if path.exists() else 0


def state_of(run: Path) -> str:
    path = run / "status.json"
    return str(read_json(path).get("state", "")) if path.exists() else "waiting"


def log_of(run: Path) -> str:
    path = run / "log.txt"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def was_requeued(run: Path) -> bool:
    return "back into the queue" in log_of(run)


def node_of(run: Path) -> str:
    """Return the node of the run's job, whose id is in ``jobs.json`` of `selftask submit`."""
    job = str(read_json(run.parent / "slurm/jobs.json")[str(run.resolve())])
    listed = ["squeue", "--noheader", f"--jobs={job}", "--format=%N"]
    node = subprocess.run(listed, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    if not node:
        sys.exit(f"error: job {job} of {run} has no node")
    return node


def events_of(run: Path) -> list[str]:
    """Return the log lines in which the run stops and resumes."""
    words = ("interrupted", "requeue", "back into the queue", "resumed from", "RUN finished")
    return [line for line in log_of(run).splitlines() if any(word in line for word in words)]


def table(runs: Sequence[Path]) -> str:
    """Return a line for each run: state, steps, attempts, final loss and k-NN accuracy."""
    lines = [f"\n{'run':<34}{'state':<10}{'steps':>6}{'attempts':>10}{'loss':>9}{'k-NN':>8}"]
    for run in runs:
        rows = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
        loss = next((row["loss"] for row in reversed(rows) if "loss" in row), float("nan"))
        knn = next((row["knn_top1"] for row in reversed(rows) if "knn_top1" in row), float("nan"))
        attempts = 1 + log_of(run).count("resumed from")
        state = f"{state_of(run):<10}{steps_of(run):>6}{attempts:>10}"
        lines.append(f"{run!s:<34}{state}{loss:>9.4f}{knn:>8.3f}")
    return "\n".join(lines)


def last_state(run: Path) -> dict[str, Any]:
    """Return the newest checkpoint without the paths and times in it."""
    state = store.load(rotation.checkpoints(run / "checkpoints")[0])
    return {key: item for key, item in state.items() if key not in NOT_COMPARED}


def differences(first: Any, second: Any, place: str = "checkpoint") -> list[str]:
    """Return the places at which two nested states are not bit-identical."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        same = same and first.numpy().tobytes() == second.numpy().tobytes()
        return [] if same else [f"{place}: tensors differ"]
    if isinstance(first, dict) and isinstance(second, dict):
        one_sided = [f"{place}.{key}: on one side only" for key in first.keys() ^ second.keys()]
        both = [key for key in first if key in second]
        return one_sided + [
            line for key in both for line in differences(first[key], second[key], f"{place}.{key}")
        ]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return [f"{place}: {len(first)} and {len(second)} entries"]
        pairs = enumerate(zip(first, second, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{place}[{i}]")]
    same = first == second or (first != first and second != second)  # NaN equals NaN
    return [] if same else [f"{place}: {first!r} and {second!r}"]


if __name__ == "__main__":
    sys.exit(main())
