"""``selftask check``: compare a method on 1, 2 and 4 ranks."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from selftask.cli.options import take_options
from selftask.errors import ConfigError, RunError, UserError, aligned
from selftask.registry import METHODS, REDUCTIONS

if TYPE_CHECKING:
    from selftask.config.schema import Config
    from selftask.equivalence.check import Report
    from selftask.equivalence.compare import Row

USAGE = """\
usage: selftask check METHOD [key=value ...] [--ranks 1,2,4] [--steps 3]
       selftask check --all [key=value ...]

Trains a small version of METHOD, which may be a recipe as in `selftask train`, in double precision:
once on one rank, then with the same global batch on several, then with their number changing
between checkpoints. Samples, inputs, loss and its terms, gradients and all state must be the same
to 1e-9. Durations of method, optimizer and hooks (warm-ups, frozen layers, terms that
start later) become one step, unless set here; what these steps do not reach is
named. Your own method needs import=[mine], or a recipe that has it. Exit code 1: different.

BatchNorm is replaced by a norm of one sample; parallel.sync_batch_norm=all checks synchronized
BatchNorm instead.
Try also parallel.reduce=ddp or fsdp, train.accumulate=2 train.step=accumulate, optimizer=lars."""

MIN_BATCH = 8
RESUMED = "2 > 1 > 2"  # as in equivalence.compare, which imports torch
OPTIONS = {"--ranks": str, "--steps": int, "--all": bool}


def main(argv: list[str]) -> int:
    """Check one method or all; return 1 if a check fails."""
    words, options = take_options(argv, OPTIONS)
    ranks, steps = _ranks(options.get("--ranks", "1,2,4")), options.get("--steps", 3)
    if steps == 0:
        raise UserError("--steps 0: nothing can be compared without a step")
    if max(ranks) == 1:
        raise UserError("--ranks 1: nothing to compare one rank with; give several, such as 1,2")
    names = [word for word in words if "=" not in word and not word.startswith("~")]
    settings = [word for word in words if word not in names]
    if options.get("--all") and not names:
        return _check_all(settings, ranks, steps)
    if options.get("--all") or len(names) != 1:
        raise UserError(f"check needs one METHOD or recipe, or --all\n{USAGE}")
    return _check(names[0], settings, ranks, steps)


def _check_all(settings: list[str], ranks: list[int], steps: int) -> int:
    """Check every registered method, also those of the user's modules; return the exit code."""
    from selftask.config.extensions.imports import import_entry_points

    import_entry_points()
    if settings:
        load(METHODS.names()[0], settings)  # imports the modules of import=[...]
    failed = []
    for name in METHODS.names():
        try:
            code = _check(name, settings, ranks, steps)
        except UserError as error:
            print(f"{name}: FAILED: {error}\n")
            code = error.exit_code
        if code:
            failed.append(name)
    print(f"{len(METHODS.names())} methods checked; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _check(name: str, settings: list[str], ranks: list[int], steps: int) -> int:
    config = load(name, settings)
    from selftask.equivalence.durations import shorten_durations
    from selftask.equivalence.tiny_recipe import make_tiny

    least = math.lcm(*ranks)
    small = make_tiny(config, batch_size=-(-MIN_BATCH // least) * least, steps=steps)
    small = shorten_durations(small)
    batch = small.train.batch_size
    for size in ranks:
        if batch % size:
            raise ConfigError([f"train.batch_size={batch} cannot be divided among {size} ranks"])
    print(_heading(small, steps), flush=True)

    from selftask.equivalence.check import check

    started = time.perf_counter()
    try:
        report = check(small, ranks=ranks, steps=steps)
    except RunError as error:
        print(f"FAILED: {error}\n")
        return 1
    print(_table(report))
    print(_verdict(small, report, ranks))
    print(f"({time.perf_counter() - started:.0f} s)\n")
    return 0 if report.ok else 1


def load(name: str, settings: list[str]) -> Config:
    """Return the config of a recipe, or of a method without a recipe.

    The data set is the digits unless ``settings`` name another; no image is read.

    Args:
        name: Name of the method or recipe, or path of a recipe.
        settings: ``key=value`` words.
    """
    from selftask.config.compose import recipes
    from selftask.config.compose.recipes import is_recipe_file
    from selftask.config.load import load_config

    settings = ["data={name: digits}", *settings]
    names = set(recipes.available())
    recipe_names = {name.partition("/")[0] for name in names} | names
    if name in recipe_names or is_recipe_file(name):
        return load_config(name, settings)
    base = recipes.folder() / "base/digits.yaml"
    return load_config(str(base), [*settings, f"method.name={name}"])


def _heading(small: Config, steps: int) -> str:
    method = METHODS[small.method.name]
    optimizer = {"name": small.optimizer.name, **small.optimizer.args}
    return (
        f"{small.method.name}: {method.__name__} at {METHODS.address(small.method.name)}\n"
        f"  declares loss_reduction = {method.loss_reduction!r}: "
        f"{REDUCTIONS[method.loss_reduction]}\n"
        f"  in small: batch {small.train.batch_size}, {steps} steps ({small.train.step.name}), "
        "float64\n"
        f"  backbone {small.backbone.to_dict()}\n  optimizer {optimizer}"
    )


def _table(report: Report) -> str:
    """Format the rows of a report as a table."""
    cells = [("quantity", "ranks", "difference", "", "where it is largest")]
    for row in report.rows:
        verdict = "ok" if row.ok else "DIFFERENT"
        cells.append((row.quantity, row.ranks, f"{row.difference:.1e}", verdict, row.place))
    return "\n".join(f"  {line}" for line in aligned(cells))


def _verdict(small: Config, report: Report, ranks: list[int]) -> str:
    name, reduction = small.method.name, METHODS[small.method.name].loss_reduction
    lines = []
    if report.replaced_norms:
        lines.append(
            f"{report.replaced_norms} BatchNorm layers were replaced by GroupNorm(1), which looks "
            "at one sample;\nBatchNorm itself sees its own rank's batch only, unless "
            "parallel.sync_batch_norm=all, which keeps it here too"
        )
    different = [row for row in report.rows if not row.ok]
    if report.silent:
        lines.append(
            f"DIFFERENT: {name} declares loss_reduction = {reduction!r}, but its loss exchanges "
            'nothing between ranks; if it is a mean of independent samples, declare "samples"'
        )
    if different:
        first = min(different, key=lambda row: row.step)  # for equal steps, the first row
        lines.append(
            f"DIFFERENT: {name} depends on the number of ranks: {first.quantity} with "
            f"{first.ranks} ranks, {first.place or 'everywhere'}, by {first.difference:.1e}"
        )
        resumed_only = all(row.ranks == RESUMED for row in different)
        lines.append(_hint(first, reduction, report.draws, resumed_only=resumed_only))
    if report.ok:
        asked = ", ".join(str(size) for size in ranks if size > 1)
        lines.append(f"SAME: {name} on {asked} ranks does what it does on one")
    if report.not_reached:
        lines.append(f"not reached in these steps: {'; '.join(report.not_reached)}")
    return "\n".join(lines)


def _hint(first: Row, reduction: str, draws: list[str], *, resumed_only: bool) -> str:
    """Return the most likely cause of a difference, judged by the first row that differs.

    Args:
        first: The row.
        reduction: The method's ``loss_reduction``.
        draws: Names of the global random generators that a step uses.
        resumed_only: Whether only the resumed run differs.
    """
    if first.difference < 1e-5:
        return "(so small: something computes in float32; see models.precision.to_float32)"
    if resumed_only and first.quantity != "samples":
        return (
            "(only the resumed run differs: is there state that is not saved? plain attributes are "
            "not; make them buffers (register_buffer), parameters or sub-modules of the method)"
        )
    if draws and first.quantity != "samples":
        return (
            f"(random numbers differ: a step uses the global generator of {' and '.join(draws)}, "
            "which each rank seeds differently; use selftask.random.keyed.uniform for draws per "
            "sample and batch_uniform for draws per batch; selftask draws nn.Dropout per sample, "
            "but not F.dropout)"
        )
    if first.quantity in ("samples", "inputs"):
        return (
            "(the draws for a sample must depend on (seed, epoch, sample) only: use "
            "selftask.random.keyed.uniform on the device, and in a transform the generator that "
            "it is given)"
        )
    if first.quantity == "method":
        return (
            "(loss and gradients of this step are the same: is there state that is not reduced? "
            "state must be updated from all ranks, in the order of the global batch: see "
            "all_gather_cat and all_reduce_mean in selftask.distributed.collectives)"
        )
    if first.quantity in ("loss", "terms", "gradients") and reduction == "samples":
        return (
            "(a missing sum over ranks: does the loss of a sample depend on others of the batch? "
            "then use gather_cat_with_grad or sum_with_grad of selftask.distributed.collectives, "
            "and declare loss_reduction accordingly)"
        )
    return (
        "(a missing sum over ranks? sums over the batch need sum_with_grad, comparisons of its "
        "samples gather_cat_with_grad, both of selftask.distributed.collectives; the loss must be "
        "a mean over this rank's samples, or the same on all ranks)"
    )


def _ranks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--ranks {text!r}: expected numbers above 0, such as 1,2,4")
    return [int(part) for part in parts]
