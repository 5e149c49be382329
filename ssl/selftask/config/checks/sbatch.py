"""Checks of ``launch.slurm``: sbatch's long options, and a few of submitit's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from selftask.config.keys import Problem
from selftask.config.schema import Config
from selftask.errors import nearest
from selftask.files.received import TEXTS

_LISTS = ("setup", "teardown", "srun_args")  # shell lines before and after srun, srun's options
SUBMITIT = (*_LISTS, "signal_delay_s", "array_parallelism", "stderr_to_stdout")
OURS = {
    "nodes": "launch.nodes",
    "ntasks": "launch.nodes and launch.processes",
    "ntasks_per_node": "launch.processes",
    "tasks_per_node": "launch.processes",
    "array": "a comma list of any value (train.seed=1,2,3), which makes one",
    "output": "out, where logs lie in slurm/",
    "error": "out, where logs lie in slurm/",
    "signal": "launch.slurm.signal_delay_s",
    "chdir": "the folder in which you submit",
    "wrap": "nothing: the command is selftask's",
    "timeout_min": "launch.slurm.time",
    "max_requeues": "launch.max_requeues",
    "max_restarts": "launch.max_restarts",
    "name": "launch.slurm.job_name",
}  # options that other keys of the config set: option -> what to set instead
_OPTIONS = """
    account acctg_freq batch bb bbf begin cluster_constraint clusters comment constraint container
    container_id contiguous core_spec cores_per_socket cpu_freq cpus_per_gpu cpus_per_task deadline
    delay_boot dependency distribution exclude exclusive export export_file extra extra_node_info
    get_user_env gid gpu_bind gpu_freq gpus gpus_per_node gpus_per_socket gpus_per_task gres
    gres_flags hint hold ignore_pbs input job_name kill_on_invalid_dep licenses mail_type mail_user
    mcs_label mem mem_bind mem_per_cpu mem_per_gpu mincpus network nice no_kill no_requeue nodefile
    nodelist ntasks_per_core ntasks_per_gpu ntasks_per_socket open_mode overcommit oversubscribe
    partition power prefer priority profile propagate qos quiet reboot requeue reservation segment
    sockets_per_node spread_job switches thread_spec threads_per_core time time_min tmp
    tres_bind tres_per_task uid use_min_nodes verbose wait wait_all_nodes wckey
"""
OPTIONS = frozenset(_OPTIONS.split())
DEFAULT_MINUTES = 60
_COUNTS = (
    *("cpus_per_task", "cpus_per_gpu", "mincpus", "cores_per_socket", "sockets_per_node"),
    *("threads_per_core", "ntasks_per_core", "ntasks_per_gpu", "ntasks_per_socket"),
)
_WHOLE = (*_COUNTS, "signal_delay_s", "array_parallelism")
GPUS = ("gpus", "gpus_per_node", "gpus_per_socket", "gpus_per_task")
_SIZE = re.compile(r"\d+([KMGT]B?)?", re.I), "megabytes, or as in 64G"
_KINDS = re.compile(r"([^:,]+:)?[1-9]\d*(,([^:,]+:)?[1-9]\d*)*"), "a number, or as in a100:4"
_SHAPES = {
    **dict.fromkeys(("mem", "mem_per_cpu", "mem_per_gpu", "tmp"), _SIZE),
    **dict.fromkeys(GPUS, _KINDS),
}  # formats that sbatch accepts
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def sbatch_problems(config: Config) -> Iterator[Problem]:
    """Yield key and text of each mistake in ``launch.slurm``."""
    slurm = config.launch.slurm
    for name, text in (*_option_problems(slurm), *_time_problems(slurm)):
        yield ("launch", "slurm", name), text


def _option_problems(slurm: dict[str, Any]) -> Iterator[tuple[str, str]]:
    names: dict[str, str] = {}
    for key, value in slurm.items():
        name = option(key)
        shown = f"launch.slurm.{key}"
        if name in names:
            yield key, f"{shown} and launch.slurm.{names[name]} are the same option of sbatch"
        names[name] = key
        if name in OURS:
            yield key, f"{shown} is set by selftask; use {OURS[name]}"
        elif name not in OPTIONS and name not in SUBMITIT:
            hint = nearest(name, OPTIONS.union(SUBMITIT))
            yield key, f"{shown}: sbatch has no option --{name.replace('_', '-')}; {hint}"
        elif name in _LISTS and not TEXTS.accepts(value):
            yield key, f"{shown}={value!r}: expected a list of texts"
        elif name in _WHOLE and not _is_count(value):
            yield key, f"{shown}={value!r}: expected a whole number, 1 or more"
        elif name in _SHAPES and not _SHAPES[name][0].fullmatch(str(value)):
            yield key, f"{shown}={value!r}: expected {_SHAPES[name][1]}"
        elif isinstance(value, dict | list) and name not in _LISTS:
            yield key, f"{shown}={value!r}: expected one value"


def _time_problems(slurm: dict[str, Any]) -> Iterator[tuple[str, str]]:
    time = slurm.get("time")
    if time is None:
        return
    limit = minutes(time)
    if limit is None:
        right = "expected minutes, h:mm:ss or days-hours, as in 90, 36:00:00 or 2-12"
        yield "time", f"launch.slurm.time={time!r}: {right}"
        return
    delay = slurm.get("signal_delay_s", 120)
    if "signal_delay_s" in slurm and _is_count(delay) and delay >= 60 * limit:
        yield (
            "signal_delay_s",
            f"launch.slurm.signal_delay_s={delay}: not before the start of a job of {limit} min",
        )


def options_of(slurm: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``launch.slurm`` by the names of their options."""
    return {option(key): value for key, value in slurm.items()}


def option(key: str) -> str:
    """Return the name of an option with underscores: ``cpus_per_task`` for ``--cpus-per-task``."""
    return key.lstrip("-").replace("-", "_")


def minutes(time: Any) -> int | None:
    """Return a time limit of sbatch in minutes, rounded up, or None if it is invalid or 0.

    Accepted are minutes, ``minutes:seconds``, ``hours:minutes:seconds`` and
    ``days-hours[:minutes[:seconds]]``.
    """
    match = _TIME.fullmatch(str(time))
    if match is None or isinstance(time, bool):
        return None
    days, *fields = match.groups()
    first, second, third = (None if field is None else int(field) for field in fields)
    if days is not None:
        seconds = 86400 * int(days) + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    elif third is not None:
        seconds = 3600 * (first or 0) + 60 * (second or 0) + third
    else:
        seconds = 60 * (first or 0) + (second or 0)
    return -(-seconds // 60) or None


def show_minutes(limit: int) -> str:
    """Format minutes as ``2 d 12 h``, so that hours given as minutes are easily noticed."""
    days, rest = divmod(limit, 1440)
    parts = [(days, "d"), (rest // 60, "h"), (rest % 60, "min")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
