"""Plan and check a submission before it is sent to SLURM."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selftask.config.checks.grid import title
from selftask.config.checks.locations import check_not_moved
from selftask.config.checks.sbatch import DEFAULT_MINUTES, GPUS, minutes, options_of, show_minutes
from selftask.config.compose import recipes
from selftask.config.compose.recipes import is_recipe_file
from selftask.config.compose.sweep import Point, expand_sweep, load_points
from selftask.config.load import load_config
from selftask.config.run_length import RunLength
from selftask.config.schema import Config
from selftask.data.loading.open_data import check_data, open_data
from selftask.data.source import Source
from selftask.errors import UserError, reason_of, with_noun
from selftask.files.addresses import is_remote
from selftask.run.status import Status
from selftask.slurm import queue
from selftask.slurm.code_snapshot import CodeSnapshot
from selftask.slurm.job import Executor, Submission, executor, signal_delay_s, submit
from selftask.slurm.partitions import Partition, chosen

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmJob

_MAX_DERIVED_CPUS = 8  # per rank; nodes may have fewer cores than this machine


@dataclass(frozen=True)
class Plan:
    """A checked submission of one run, or of all runs of a sweep."""

    configs: list[Config]
    out: Path  # the run folder, or the parent folder of a sweep's runs
    submissions: list[Submission]
    executor: Executor
    num_samples: int
    megabytes: float  # estimated size of a checkpoint
    notes: list[str]
    snapshot: CodeSnapshot | None  # copied when the runs are submitted

    def script(self) -> str:
        """Return the sbatch script that submitit would submit."""
        return self.executor.script(len(self.submissions))

    def submit(self) -> list[SlurmJob[Any]]:
        """Copy the snapshot, submit the runs and record their jobs in ``out``; return the jobs.

        Raises:
            UserError: If the files of the snapshot are too large, SLURM's programs are missing, or
                sbatch refuses a job.
        """
        if self.snapshot is not None:
            self.snapshot.copy()
        jobs = submit(self.submissions, self.executor)
        outs = [Path(submission.out) for submission in self.submissions]
        queue.note(self.out, {out: job.job_id for out, job in zip(outs, jobs, strict=True)})
        return jobs

    def describe(self) -> str:
        """Return a readable summary: ranks, batch, steps, time, disk."""
        config, launch = self.configs[0], self.configs[0].launch
        length = RunLength.of(config.train, self.num_samples)
        epochs = length.num_epochs
        slurm = options_of(launch.slurm)
        limit = minutes(slurm.get("time")) or DEFAULT_MINUTES
        default = "" if "time" in slurm else " (launch.slurm.time is not set)"
        ranks = [with_noun(n, "rank") for n in (launch.processes, launch.world_size)]
        per_rank = config.train.batch_size // launch.world_size
        partition = os.environ.get("SBATCH_PARTITION") or slurm.get("partition", "(the default)")
        lines = {
            "run": f"{config.method.name} with {title(config.backbone)}, {config.recipe}",
            "data": f"{self.num_samples} images",
            "nodes": f"{launch.nodes} x {ranks[0]} = {ranks[1]}",
            "batch": f"{config.train.batch_size} images = {per_rank} a rank",
            "steps": f"{length.total_steps} in {with_noun(epochs, 'epoch')}",
            "time": f"{show_minutes(limit)} a job{default}",
            "queue": f"partition {partition}",
            "requeue": (
                f"on preemption; on time-out, {launch.max_requeues} times; after a failure, "
                f"{launch.max_restarts} times; warned "
                f"{slurm.get('signal_delay_s', signal_delay_s(limit))} s before the limit"
            ),
            "disk": f"about {self.megabytes:.0f} MB a checkpoint, "
            f"{config.train.keep_checkpoints} kept",
            "out": f"{self.out}" + (f", {len(self.configs)} runs" if self.configs[1:] else ""),
        }
        text = [f"{name:<8} {value}" for name, value in lines.items()]
        if self.configs[1:]:
            text += [f"         {submission.out}" for submission in self.submissions]
        return "\n".join([*text, *(f"note: {note}" for note in self.notes)])


def plan(recipe: str, overrides: list[str]) -> Plan:
    """Check a submission as far as possible on this machine, and return its plan.

    Args:
        recipe: Name or path of the recipe.
        overrides: ``key=value`` arguments, which may span a sweep.

    Raises:
        UserError: If anything is wrong; config problems of all runs are listed together.
    """
    base, configs, samples, unbuilt = _read(recipe, expand_sweep(overrides))
    first = configs[0]
    queue.check_idle(base)
    megabytes = _check_space(first, base, len(configs))
    partitions = chosen(first.launch)
    derived, workers, notes = derived_options(first, partitions)
    notes += [*first.notes, *sorted(unbuilt)]
    complete = [config.out for config in configs if Status(config).is_finished()]
    notes += [f"{out} is complete: its job will only say so" for out in complete]
    if str(base.resolve()).startswith("/tmp/"):
        notes.append(f"{base} is in /tmp, which the nodes of a cluster usually do not share")
    snapshot = CodeSnapshot.of(base / "slurm" / "code") if first.launch.snapshot else None
    submissions = [_submission(recipe, config, workers, snapshot) for config in configs]
    slurm = executor(first.launch, base / "slurm", base.name, **derived)
    return Plan(configs, base, submissions, slurm, samples, megabytes, notes, snapshot)


def _read(recipe: str, points: list[Point]) -> tuple[Path, list[Config], int, set[str]]:
    """Return the common folder, the config of each run, samples per epoch of the first, and notes.

    Raises:
        ConfigError: If a config is invalid, with the problems of all runs.
    """
    unbuilt: set[str] = set()

    def read(point: Point) -> tuple[Path, Config, int]:
        config = load_config(recipe, point.overrides)
        check_not_moved(recipe, config)
        from selftask.run.compatibility import check_same_run  # slow: imports torch

        if is_remote(config.out):
            raise UserError(
                f"out={config.out}: a job's scripts and logs need a folder that the nodes share"
            )
        base = Path(config.out)
        config = replace(config, out=str(base / point.name))
        source = open_data(config.data).train
        samples = check_data(config, source).num_samples
        check_same_run(config)
        unbuilt.update(_build(config, source, samples))
        return base, config, samples

    bases, configs, samples = zip(*load_points(points, read), strict=True)
    return bases[0], [*configs], samples[0], unbuilt


def read_local(recipe: str, overrides: list[str]) -> tuple[list[Config], list[Submission]]:
    """Check runs to be trained on this machine, and return their configs and submissions.

    Args:
        recipe: Name or path of the recipe.
        overrides: ``key=value`` arguments, which may span a sweep.

    Raises:
        UserError: If a config is invalid, a job is queued, or there is too little disk space.
    """
    base, configs, _, _ = _read(recipe, expand_sweep(overrides))
    queue.check_idle(base)
    _check_space(configs[0], base, len(configs))
    return configs, [_submission(recipe, config, config.data.num_workers) for config in configs]


def _submission(
    recipe: str, config: Config, workers: int, snapshot: CodeSnapshot | None = None
) -> Submission:
    settled = config.to_dict()
    settled["data"]["num_workers"] = workers
    folders = [str(Path.cwd())]
    if is_recipe_file(recipe):
        folders.append(str(recipes.locate(recipe, None).parent))
    if snapshot is not None:
        folders = [str(snapshot.path_of_copy(Path(folder))) for folder in folders]
    return Submission(settled, str(Path.cwd()), folders)


def derived_options(
    config: Config, partitions: list[Partition]
) -> tuple[dict[str, Any], int, list[str]]:
    """Return derived sbatch options, the number of workers per rank, and notes for the user.

    Options for CPUs and GPUs are derived unless ``launch.slurm`` has them.
    """
    chosen_options = options_of(config.launch.slurm)
    derived: dict[str, Any] = {}
    workers, notes = config.data.num_workers, []
    is_auto = config.place("data.num_workers").startswith("auto")  # counted on this machine
    # a rank has one GPU, and sbatch accepts only one of the two options
    cpus_of_rank = chosen_options.get("cpus_per_task", chosen_options.get("cpus_per_gpu"))
    if cpus_of_rank is None:
        workers = min(workers, _MAX_DERIVED_CPUS) if is_auto else workers
        derived["cpus_per_task"] = max(1, workers)
        cpus = derived["cpus_per_task"]
        notes.append(f"{with_noun(cpus, 'CPU')} a rank; else launch.slurm.cpus_per_task=N")
    elif is_auto:
        workers = int(cpus_of_rank)
        notes.append(f"data.num_workers={workers}, one for each CPU of a rank")
    has_gpus = any(key in chosen_options for key in GPUS)
    has_gpus = has_gpus or "gpu" in str(chosen_options.get("gres"))  # may also name local disks
    wanted = config.train.device == "cuda" or (
        config.train.device == "auto" and any(partition.gpus for partition in partitions)
    )
    if wanted and not has_gpus:
        derived["gpus_per_node"] = config.launch.processes
        notes.append(f"{config.launch.processes} GPUs a node; else launch.slurm.gpus_per_node=N")
    elif config.train.device == "auto" and not has_gpus:
        notes.append("no GPUs are asked for; launch.slurm.gpus_per_node=N or train.device=cuda")
    return derived, workers, notes


def _check_space(config: Config, out: Path, runs: int) -> float:
    """Return the size of a checkpoint in MB; raise UserError if ``out`` has too little space."""
    existing = out.resolve()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"out={out}: {existing} cannot be written to")
    megabytes = _checkpoint_megabytes(config)
    best = config.train.keep_best
    kept = config.train.keep_checkpoints + (best.count if best.metric else 0)
    needed = megabytes * (kept + 1) * runs
    free = shutil.disk_usage(existing).free / 1e6
    if free < needed:
        raise UserError(
            f"out={out}: {free:.0f} MB are free at {existing}, and checkpoints will take about "
            f"{needed:.0f} MB; use another out=, or fewer of them (train.keep_checkpoints)"
        )
    return megabytes


def _build(config: Config, source: Source, num_samples: int) -> Iterator[str]:
    """Build the task on fake tensors, which have no memory; yield a note if that is impossible.

    Raises:
        UserError: If the config does not fit its network or the length of its run, such as a rule
            for parameters that matches none.
    """
    from selftask.plan.data import data_like
    from selftask.plan.simulation import fake_task  # slow: imports torch

    try:
        with fake_task(config, data_like(config, source, num_samples)):
            pass
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's network may need values or a device
        yield f"the network is first built in the job; without memory: {reason_of(error)}"


def _checkpoint_megabytes(config: Config) -> float:
    """Estimate a checkpoint's size in MB: backbone, teacher and two optimizer moments, float32."""
    from selftask.models.build import build_backbone, build_on_meta  # slow: imports torch

    backbone = build_on_meta(config.backbone, 3) or build_backbone(config.backbone)
    return sum(p.numel() for p in backbone.parameters()) * 4 * 4 / 1e6
