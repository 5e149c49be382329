"""Start-up output of a run: all details in ``log.txt``, and a short table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from selftask.config.keys import dotted
from selftask.config.values.auto_values import cores
from selftask.distributed.collectives import is_primary
from selftask.errors import aligned, plural, with_noun
from selftask.hooks.base import Task
from selftask.logs import DETAIL, get_logger
from selftask.logs.lines import log_summary
from selftask.logs.startup import lap, take_laps
from selftask.models.summary import opening_lines
from selftask.optim.arithmetic import arithmetic, arithmetic_rows
from selftask.optim.group_table import group_table
from selftask.task.numerics import describe_numerics, is_settled

log = get_logger(__name__)


def log_parts(task: Task) -> None:
    """Log model, run length, learning rate and parameter groups.

    Also sets ``task.opening["model"]``; the first rank writes ``groups.txt``, and warns about
    parameters that are frozen until the end of the run.
    """
    channels = task.data_module.channels
    lines = [*opening_lines(task.config, task.base_model, task.loss, channels)]
    task.opening["model"] = lines[-1].removeprefix("model: ")
    for line in [*lines, *arithmetic(task.config, task.length, task.world.size)]:
        log.log(DETAIL, "%s", line)
    if is_primary():
        sections = task.config.all_optimizers.items()
        listing = []
        for optimizer, (key, section) in zip(task.all_optimizers, sections, strict=True):
            batch = task.length.samples_per_step
            table = partial(group_table, optimizer.settings, section, batch=batch)
            log.log(DETAIL, "parameter groups of %s:\n  %s", dotted(key), "\n  ".join(table()))
            listing += table(most=0) if key == ("optimizer",) else [dotted(key), *table(most=0)]
        (task.out / "groups.txt").write_text("\n".join(listing) + "\n", encoding="utf-8")
        _warn_of_untrained(task)


def _warn_of_untrained(task: Task) -> None:
    settings = (one for optimizer in task.all_optimizers for one in optimizer.settings)
    total = task.length.total_steps
    names = [one.parameter.name for one in settings if one.frozen_steps >= total]
    if names:
        log.warning(
            "the run ends before %d %s %s trained, such as %s: shorten freeze in optimizer.groups, "
            "or method.freeze_last_layer",
            len(names),
            plural("parameter", len(names)),
            "is" if len(names) == 1 else "are",
            names[0],
        )


def print_opening(task: Task) -> None:
    """Print a table of the run: data, model, device and start."""
    lap("model, checkpoint")
    log.debug("start-up: %s", take_laps())
    log_summary(aligned([row for row in _rows(task) if row[1]]))


def _rows(task: Task) -> Iterator[tuple[str, str]]:
    config, length, opening = task.config, task.length, task.opening
    words = arithmetic_rows(config, length, task.world.size)
    yield "run", f"{config.recipe}, seed {config.train.seed}, {_start(task)}"
    yield from (("note", note) for note in config.notes)
    yield "data", task.data_module.train_source.describe()
    yield "evaluate", opening.get("evaluate", "")
    yield "model", opening["model"]
    yield "batch", words["batch"]
    yield "epoch", words["epoch"]
    yield "length", words["run"]
    number = sum(len(optimizer.param_groups) for optimizer in task.all_optimizers)
    groups = f"{number} parameter {plural('group', number)} (groups.txt)"
    named = [f"{name}: {section.name}" for name, section in config.optimizers.items()]
    names = ", ".join([config.optimizer.name, *named])
    yield "optimizer", f"{names}, step {config.train.step.name}, {groups}"
    yield "lr", f"{words['lr']}; warm-up {words['warm-up']}"
    yield "device", _device(task)
    if settings := describe_numerics(config.train, task.device):
        yield "float32", settings


def _start(task: Task) -> str:
    total = task.length.total_steps
    if not task.resumed:
        return f"new in {task.config.out}"
    return f"resumes at step {task.steps_done:,} of {total:,} in {task.config.out}"


def _device(task: Task) -> str:
    """Format device, ranks, precision and threads, with advice on the precision if there is any."""
    size, train = task.world.size, task.config.train
    ranks = f"{size} ranks ({task.config.parallel.reduce}), " if size > 1 else ""
    threads = torch.get_num_threads()
    threads_text = f"{with_noun(threads, 'thread')} on {with_noun(cores(), 'core')}"
    origin = task.config.place("train.precision")
    precision = f"{train.precision} ({origin})" if is_settled(task.config) else train.precision
    advice = task.opening.get("precision", precision)
    return f"{task.device}, {ranks}{threads_text}, {advice}"
