"""Format a plan as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from selftask.config.values.budget import show_bytes, show_count
from selftask.config.values.duration import steps_in
from selftask.errors import aligned, plural
from selftask.optim.arithmetic import arithmetic
from selftask.plan.checkpoints import lost_share
from selftask.plan.memory import USABLE
from selftask.plan.plan import Plan
from selftask.plan.remedies import Remedy

Rows = Iterator[tuple[str, str]]
_NAMES = {
    "weights": "weights, float32",
    "buffers": "buffers (BatchNorm, queues, memory banks)",
    "inputs": "views of the batch",
    "low-precision weights": "weights in {precision}",
    "gathered": "parameters gathered by FSDP",
}


def lines(plan: Plan) -> list[str]:
    """Return the lines of the whole table: a header, and titled groups of rows."""
    config, launch = plan.config, plan.config.launch
    ranks = launch.world_size
    shape = f" ({launch.nodes:,} x {launch.processes:,})" if launch.nodes > 1 else ""
    groups = [
        ("parameters", _parameters(plan)),
        ("compute (counted on the shapes of one step)", _compute(plan)),
        (
            f"memory of a rank at the peak of a step (estimate): {_memory_title(plan)}",
            _memory(plan),
        ),
        ("communication of a rank in a step (estimate, ring algorithms)", _traffic(plan)),
        ("checkpoints", _checkpoints(plan)),
        ("time and price", _time(plan)),
    ]
    out = [
        f"plan of {config.recipe} on {ranks:,} {plural('rank', ranks)}{shape}",
        f"data: {plan.length.num_samples:,} samples an epoch ({plan.data.origin})",
        *arithmetic(config, plan.length, ranks),
    ]
    for title, rows in groups:
        if group := aligned(list(rows)):
            out += [f"{title}:", *(f"  {line}" for line in group)]
    return out


def duration(seconds: float) -> str:
    """Format a time: ``35 s``, ``12.5 min``, ``7.3 h``, ``4.1 days``."""
    for least, size, unit in ((172_800, 86_400, "days"), (3600, 3600, "h"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def _parameters(plan: Plan) -> Rows:
    for part in plan.parts:
        kinds = [(part.trained, "trained"), (part.frozen, "not trained")]
        yield part.name, ", ".join(f"{show_count(n)} {kind}" for n, kind in kinds if n)
    trained = sum(part.trained for part in plan.parts)
    total = trained + sum(part.frozen for part in plan.parts)
    yield "all", f"{show_count(total)}, {show_count(trained)} of them trained"


def _compute(plan: Plan) -> Rows:
    flops = plan.step.flops
    names = {
        "forward": "forward, an image with all views",
        "teacher": "without gradient (teacher), an image",
        "backward": "backward, an image",
    }
    for phase, name in names.items():
        if flops.get(phase):
            yield (
                name,
                f"{show_count(flops[phase])}FLOP ({show_count(flops[phase] / 2)} multiply-adds)",
            )
    total = sum(flops.values())
    yield "all, an image", f"{show_count(total)}FLOP"
    yield "a step, all ranks", f"{total * plan.length.samples_per_step:.3g} FLOP"
    yield "the run", f"{plan.flops:.3g} FLOP"


def _memory_title(plan: Plan) -> str:
    parallel, train = plan.config.parallel, plan.config.train
    reduce = parallel.reduce if plan.config.launch.world_size > 1 else "one rank"
    checkpointing = parallel.activation_checkpointing
    recomputes = "" if checkpointing == "none" else f", activation checkpointing {checkpointing}"
    if checkpointing not in ("none", "blocks"):
        recomputes += ", counted as if every block were computed again"
    return f"{reduce}, {train.precision}{recomputes}"


def _memory(plan: Plan) -> Rows:
    for kind, size in plan.memory.of.items():
        name = _NAMES.get(kind, kind).format(precision=plan.config.train.precision)
        yield name, show_bytes(size)
    yield "together", f"{show_bytes(plan.memory.total)}{_verdict(plan)}"
    if plan.memory.largest_gather:
        yield "largest all-gather", show_bytes(plan.memory.largest_gather)
    if plan.memory.on_host:
        yield "in the memory of the host", show_bytes(plan.memory.on_host)


def _verdict(plan: Plan) -> str:
    memory = plan.assumptions.memory
    if memory is None:
        return ""
    share = f"{plan.memory.total / memory:.0%} of {show_bytes(memory)}"
    if plan.memory.fits(memory):
        return f": fits, {share}"
    return f": DOES NOT FIT, {share}, of which {USABLE:.0%} can be used"


def _traffic(plan: Plan) -> Rows:
    for name, size in plan.traffic.items():
        yield name, show_bytes(size)
    if len(plan.traffic) > 1:
        yield "together", f"{show_bytes(sum(plan.traffic.values()))} sent, as many received"


def _checkpoints(plan: Plan) -> Rows:
    checkpoints, config = plan.checkpoints, plan.config
    kept = config.train.keep_checkpoints
    yield (
        "size",
        f"{show_bytes(checkpoints.size)}, {kept} kept: {show_bytes(checkpoints.size * kept)}",
    )
    speed = show_bytes(plan.assumptions.write_speed)
    yield "time to write", f"{duration(checkpoints.write_s)} at {speed} a second (write_speed=)"
    nodes = config.launch.nodes
    mtbf = duration(plan.assumptions.mtbf)
    rate = f"{nodes:,} {plural('node', nodes)}, each fails once in {mtbf}"
    yield "failures", f"one in {duration(checkpoints.mtbf_s)} ({rate}: mtbf=)"
    steps = ""
    if plan.seconds:
        steps = f" = {max(1, round(checkpoints.interval_s / _step_seconds(plan))):,} steps"
    yield (
        "best interval",
        f"{duration(checkpoints.interval_s)}{steps} (Daly), {checkpoints.lost:.2%} is lost",
    )
    yield "of the recipe", f"{config.train.checkpoint_every}{_now(plan)}"


def _now(plan: Plan) -> str:
    """Format the recipe's time between checkpoints and the share of time that it loses."""
    if plan.seconds is None:
        return " (give images_per_s= to compare)"
    steps = max(1, steps_in(plan.config.train.checkpoint_every, plan.length))
    interval, checkpoints = steps * _step_seconds(plan), plan.checkpoints
    lost = lost_share(interval, checkpoints.write_s, checkpoints.mtbf_s)
    return f" = {duration(interval)}, {lost:.2%} is lost"


def _step_seconds(plan: Plan) -> float:
    assert plan.seconds is not None
    return plan.seconds / plan.length.total_steps


def _time(plan: Plan) -> Rows:
    if plan.seconds is None:
        yield "unknown", "give images_per_s= of all ranks, or --measure it on this machine"
        return
    rate = plan.assumptions.images_per_s or 0.0
    digits = ",.0f" if rate >= 10 else ".2g"
    yield "throughput", f"{rate:{digits}} images a second on all ranks{_origin(plan)}"
    yield "a step", duration(_step_seconds(plan))
    yield "the run", duration(plan.seconds)
    of_rank = sum(plan.step.flops.values()) * rate / plan.config.launch.world_size
    yield "work of a rank", f"{show_count(of_rank)}FLOP/s, to compare with what the device can do"
    if plan.price is not None:
        hours = plan.seconds / 3600 * plan.config.launch.world_size
        yield "price", f"{plan.price:,.2f} for {hours:,.1f} hours of a rank"


def _origin(plan: Plan) -> str:
    device = plan.assumptions.measured_on
    if device is None:
        return " (images_per_s=)"
    per_rank = (plan.assumptions.images_per_s or 0) / plan.config.launch.world_size
    return (
        f": {per_rank:,.1f} measured on one {device} of this machine, without loading "
        "and communication, times the ranks"
    )


def remedy_lines(fitting: list[Remedy]) -> list[str]:
    """Return a title and a line for each change that makes the run fit, with its side effects.

    Without any change, it is a line that says so.
    """
    if not fitting:
        return ["no single change makes it fit: take more ranks, or a smaller network or batch"]
    rows = [(one.words, f"{show_bytes(one.memory.total):>8}", one.effect) for one in fitting]
    return ["each of these makes it fit:", *(f"  {line}" for line in aligned(rows))]
