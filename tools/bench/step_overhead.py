"""Overhead of trainers per step: selftask, Classy's LocalTrainer and Lightning over a bare loop.

    python tools/bench/step_overhead.py [--models mlp,conv] [--rounds 20] [--log-every 50]

All compute the same on the same batches, which are in memory. Each loop gets an iterable that
records the time of every request for a batch. The time between two requests is one whole step; work
before and after the loop does not count. Each round runs every trainer once, on one thread.
selftask runs with its default hooks, writes its log and draws its progress bar (into memory, as on
a terminal); the others draw none. CPU time is that of the process, including the thread that draws.

The first steps of each turn do not count. Shown are

* ``least``: the 20th percentile of wall time in the best turn. Other load on the machine, or on the
  other half of the core, can add 50 %; this figure depends on it least;
* the median of wall time per step, and the mean of CPU time, which includes work that is done only
  every few steps, such as log lines: medians over rounds.

``a row of its log`` is the mean CPU time of steps that write a row minus the median of the others.
``above`` compares with the bare loop. For the median and CPU columns it is the median over rounds
of the difference within a round, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import logging
import statistics
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from contestants import ENTRIES, Entry, load_lightning, run_selftask
from rounds import in_turns, median_and_interval
from small_models import MODELS, Model, Stamped
from torch.overrides import TorchFunctionMode


def measure(model: Model, entries: dict[str, Entry], rounds: int, log_every: int) -> list[str]:
    """Run interleaved rounds; return the lines of the table."""
    turns: dict[str, list[Turn]] = {name: [] for name in entries}
    for number in range(rounds):
        for name in in_turns([*entries], number):
            batches = Stamped(model, model.steps)
            gc.collect()
            with _silence():
                entries[name](model, batches, log_every)
            turns[name].append(Turn(batches, log_every))
    return list(_table(turns, next(iter(entries))))


class Turn:
    """Microseconds per step of one entry in one round."""

    def __init__(self, batches: Stamped, log_every: int) -> None:
        wall, cpu = (1e6 * times for times in batches.step_times())
        self.p20, self.median = (float(np.quantile(wall, q)) for q in (0.2, 0.5))
        self.cpu = float(cpu.mean())
        ends = np.arange(batches.steps - len(cpu), batches.steps) % log_every == 0
        self.row = float(cpu[ends].mean() - np.median(cpu[~ends])) if len({*ends}) == 2 else 0.0


def _table(turns: dict[str, list[Turn]], base: str) -> Iterator[str]:
    yield f"{'microseconds a step':<24}{'least':>9}{'above':>9}" + "".join(
        f"{kind:>14}{'above':>26}" for kind in ("median", "CPU")
    )
    least = {name: min(turn.p20 for turn in turns[name]) for name in turns}
    for name in turns:
        line = f"{name:<24}{least[name]:>9.1f}{least[name] - least[base]:>+9.1f}"
        for kind in ("median", "cpu"):
            mine, bare = ([getattr(turn, kind) for turn in turns[who]] for who in (name, base))
            differences = [a - b for a, b in zip(mine, bare, strict=True)]
            above, low, high = median_and_interval(differences)
            interval = f"{above:+.1f} [{low:+.1f}, {high:+.1f}]"
            line += f"{statistics.median(mine):>14.1f}{interval:>26}"
        yield line
        row = statistics.median(turn.row for turn in turns[name])
        if name.startswith("selftask") and row:
            yield f"{'  a row of its log, CPU':<24}{row:>9.1f}"


class CountSyncs(TorchFunctionMode):
    """Counter of operations that make the host wait for a device, by step."""

    NAMES = frozenset(
        {
            "item",
            "tolist",
            "cpu",
            "numpy",
            "nonzero",
            "unique",
            "masked_select",
            "equal",
            "is_nonzero",
            "allclose",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "__contains__",
        }
    )

    def __init__(self, batches: Stamped) -> None:
        super().__init__()
        self.batches = batches
        self.found: list[tuple[int, str]] = []  # (step from 1, name)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.found.append((len(self.batches.wall), name))
        return func(*args, **(kwargs or {}))


def count_syncs(model: Model, entry: Entry, log_every: int) -> str:
    """Return a text on host synchronizations between the logged steps of a run, and in them."""
    batches = Stamped(model, min(model.steps, 2 * log_every + log_every // 2))
    with _silence(), CountSyncs(batches) as counter:
        entry(model, batches, log_every)
    during = [(step, name) for step, name in counter.found if 0 < step < batches.steps]
    between = [name for step, name in during if step % log_every]
    which = f" ({', '.join(sorted(set(between)))})" if between else ""
    return f"{len(between)} between log points{which}, {len(during) - len(between)} at them"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Context without output; selftask uses its own terminal."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def installed(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return the entries whose library is installed; print which ones are skipped."""
    needs = {
        "lightning": load_lightning,
        "classy": lambda: importlib.import_module("classy_vision"),
    }
    left = dict(entries)
    for name in entries:
        for library, load in needs.items():
            if name.startswith(library):
                try:
                    load()
                except ImportError as error:
                    print(f"{name}: left out: {error}")
                    del left[name]
    return left


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="of: " + ", ".join(MODELS))
    parser.add_argument("--entries", default=",".join(ENTRIES), help="of: " + ", ".join(ENTRIES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--log-every", type=int, default=50, help="steps between two log lines")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    entries = installed({name: ENTRIES[name] for name in options.entries.split(",")})
    for name in options.models.split(","):
        model = MODELS[name]
        print(f"\n{name}: {model.about}; {options.rounds} rounds of {model.steps} steps")
        for line in measure(model, entries, options.rounds, options.log_every):
            print(line)
        if "selftask" in entries and model.steps > options.log_every:
            print("host syncs of selftask:", count_syncs(model, run_selftask, options.log_every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
