"""``selftask checkpoints``: list the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from selftask.errors import UserError, aligned, printable_line

if TYPE_CHECKING:
    from selftask.checkpoint.kept import Kept

USAGE = """\
usage: selftask checkpoints RUN

Lists the checkpoints of a run, newest first: step, epoch, size, date, metric, why it is kept, and
whether it can be read whole. The metric is that of train.keep_best, else of the evaluations.
`selftask train ... resume=PATH` continues from one, init.backbone=RUN@STEP or RUN@best starts with
its backbone, `selftask export RUN@best` writes that."""

HEADS = ("step", "epoch", "size", "date", "metric", "kept as", "state")


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a checkpoint is damaged."""
    if len(argv) != 1:
        raise UserError(f"checkpoints needs one RUN\n{USAGE}")
    from selftask.checkpoint.mirror import local_run
    from selftask.files.paths import is_folder

    run = Path(local_run(argv[0], num_checkpoints=None)).expanduser()
    if not is_folder(run):
        raise UserError(f"{argv[0]}: there is no such run")
    rows = list(_rows(run))
    if not rows:
        raise UserError(f"{run}: has no checkpoint yet")
    for line in aligned([HEADS, *rows]):
        print(printable_line(line))
    return int(any(row[-1] != "good" for row in rows))


def _rows(run: Path) -> Iterator[tuple[str, ...]]:
    from selftask.checkpoint.kept import Kept
    from selftask.config.values.budget import show_bytes
    from selftask.report.record import list_checkpoints

    metrics = _metrics(run, Kept.read(run / "checkpoints"))
    for checkpoint in list_checkpoints(run / "checkpoints"):
        step, path = checkpoint.step, checkpoint.path
        date = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
        epoch, state = _read(path)
        size, shown = show_bytes(checkpoint.size), f"{date:%Y-%m-%d %H:%M:%S}"
        yield (str(step), epoch, size, shown, metrics.get(step, "-"), checkpoint.why, state)


def _metrics(run: Path, kept: Kept) -> dict[int, str]:
    """Return texts by step: the metric of ``train.keep_best``, or else all ``top1`` metrics.

    Steps without one are missing.
    """
    from selftask.logs.drawn_rows import read_drawn_rows
    from selftask.report.record_forms import numeric_rows

    path = run / "metrics.jsonl"
    notes: dict[int, str] = {}
    for row in numeric_rows(read_drawn_rows(path).rows)[0] if path.exists() else ():
        names = [kept.metric] if kept.metric else [name for name in row if "top1" in name]
        text = " ".join(f"{name} {row[name]:.4g}" for name in names if row.get(name) is not None)
        if text:
            notes[row["step"]] = text
    return notes


def _read(path: Path) -> tuple[str, str]:
    """Return the epoch of a checkpoint, and ``good`` or the reason why it is damaged."""
    from selftask.checkpoint import store
    from selftask.checkpoint.manifest import DamagedCheckpoint
    from selftask.config.run_length import RunLength

    try:
        state = store.load_with({"clock": dict, "length": dict}, path)
        length = RunLength(**state["length"])
        return f"{state['clock']['batch'] / length.batches_per_epoch:.2f}", "good"
    except (DamagedCheckpoint, OSError) as error:
        return "-", f"damaged: {error}"
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return "-", f"damaged: its length is not one that selftask writes ({error!r})"
