"""Text summary of a run's numbers: batch, steps, samples, warm-up and learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from selftask.classy import UpdateInterval
from selftask.config.run_length import RunLength
from selftask.config.schema import Config, OptimizerConfig
from selftask.config.schema.optimizer import ScaledLR
from selftask.config.values.duration import steps_in
from selftask.errors import plural
from selftask.optim.build import lr_schedule

_POINTS = 200  # number of points at which the schedule is evaluated to find its maximum


def arithmetic(config: Config, length: RunLength, world_size: int) -> list[str]:
    """Return lines of text: a header, then batch, epoch, run, warm-up and learning rate.

    Args:
        config: The config of the run.
        length: Length of the run.
        world_size: Number of ranks.
    """
    rows = arithmetic_rows(config, length, world_size)
    return ["arithmetic:", *(f"  {topic:<9}{text}" for topic, text in rows.items())]


def arithmetic_rows(config: Config, length: RunLength, world_size: int) -> dict[str, str]:
    """Return one line of text for each topic: batch, epoch, run, warm-up and lr.

    Args:
        config: The config of the run.
        length: Length of the run.
        world_size: Number of ranks.
    """
    return {
        "batch": _batch(length, world_size),
        "epoch": _epoch(length),
        "run": _run(length),
        "warm-up": _warmup(config.optimizer, length),
        "lr": "; ".join(_lr(config.optimizer, length)),
    }


def _batch(length: RunLength, world_size: int) -> str:
    accumulated = f" x {length.accumulate} accumulated" if length.accumulate > 1 else ""
    return (
        f"{length.batch_size // world_size:,} a rank x {world_size} "
        f"{plural('rank', world_size)}{accumulated} = {length.samples_per_step:,} samples a step"
    )


def _epoch(length: RunLength) -> str:
    steps, rest = length.steps_per_epoch, length.batches_per_epoch % length.accumulate
    last = f", the last of {rest * length.batch_size:,}" if rest else ""
    phases = f", in {length.phases_per_epoch} phases" if length.phases_per_epoch > 1 else ""
    read = length.batches_per_epoch * length.batch_size
    return (
        f"{_steps(steps)} of {length.samples_per_step:,}{last} = {read:,} of "
        f"{length.num_samples:,} samples{phases}"
    )


def _run(length: RunLength) -> str:
    epochs = length.total_steps / length.steps_per_epoch
    samples = length.total_batches * length.batch_size
    shown = f"{epochs:.4g} {plural('epoch', epochs)}"
    return f"{_steps(length.total_steps)} = {shown} = {samples:,} samples"


def _warmup(config: OptimizerConfig, length: RunLength) -> str:
    warmup = config.lr_section(length.samples_per_step).get("warmup", 0)
    steps = steps_in(warmup, length)
    cut = ", shortened to the length of the run" if steps > length.total_steps else ""
    return (f"{warmup} = {_steps(steps)}" if isinstance(warmup, str) else _steps(steps)) + cut


def _lr(config: OptimizerConfig, length: RunLength) -> Iterator[str]:
    """Yield the formula of the rate if it is scaled, then the actual values of the schedule."""
    batch = length.samples_per_step
    section = config.lr_section(batch)
    if isinstance(config.lr, ScaledLR):
        ratio = f"{batch:,} / {config.lr.per:,}"
        ratio = f"sqrt({ratio})" if config.lr.rule == "sqrt" else ratio
        yield f"{config.lr.base:g} x {ratio} = {config.lr.base * config.lr.factor(batch):.4g}"
    schedule = lr_schedule(config, length, batch=batch)
    last = length.total_steps
    warm = steps_in(section.get("warmup", 0), length)
    steps = {1, warm + 1, *range(1, last + 1, max(1, last // _POINTS)), last}
    rates = {step: _rate(schedule, step, length) for step in sorted(steps) if step <= last}
    highest = max(rates, key=lambda step: rates[step])
    shown = {step: rates[step] for step in sorted({1, highest, last})}
    values = ", ".join(f"{rate:.4g} at step {step:,}" for step, rate in shown.items())
    yield f"{section['name']}: {values}"


def _rate(schedule: Any, step: int, length: RunLength) -> float:
    """Return the learning rate of a step; the first step is 1."""
    epochs, rest = divmod(step - 1, length.steps_per_epoch)
    if schedule.update_interval == UpdateInterval.EPOCH:
        rest = 0
    batches = epochs * length.batches_per_epoch + rest * length.accumulate
    return schedule(batches / length.total_batches)


def _steps(number: int) -> str:
    return f"{number:,} {plural('step', number)}"
