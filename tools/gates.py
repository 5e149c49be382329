"""The accuracy gate: every method must gain on handwritten digits by the margin of its recipe.

Runs ``configs/<method>/digits.yaml`` of every method (or of the given ones), two at a time on two
cores, and prints one table. The header of a recipe defines the required gain of its evaluations,
such as ``# Gate: knn_top1 >= untrained + 0.30``. If its features are meant for fine-tuning, this is
``# Gate: finetune_top1 >= untrained + 0.20``: the top-1 of ``selftask finetune`` with ten labels
per class, compared with random initial weights. ``# Teacher of the gate: dino/digits`` is the
recipe of a run that is trained first and used as ``method.teacher``. A recipe with ``# Gate: none``
is listed and skipped. The exit code is 1 if a gain is too small.

    python tools/gates.py [METHOD ...] [--out DIR] [--parallel N]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMISE = re.compile(r"#\s*Gate:\s*(\w+)\s*>=\s*untrained\s*\+\s*([\d.]+)")
TEACHER = re.compile(r"#\s*Teacher of the gate:\s*(\S+)")
LIMIT_S = 900  # per command, two at a time, on a busy machine
FINETUNED = "finetune_top1"
FEW_LABELS = ["data.subset={count: 10, per_class: true}", "train.epochs=60"]  # 180 steps


class Failed(Exception):
    """Raised if a run ends early, or a recipe defines no gate."""


@dataclass(frozen=True)
class Gate:
    """Required and measured accuracy of one method."""

    method: str
    metric: str
    margin: float
    untrained: float
    trained: float
    seconds: float

    @property
    def passed(self) -> bool:
        return self.trained >= self.untrained + self.margin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    parser.add_argument("--seed", type=int, default=0, help="of training; promises hold for 0")
    parser.add_argument("--parallel", type=int, default=max(1, os.cpu_count() or 1))
    options = parser.parse_args()
    folders = sorted(path.parent.name for path in (ROOT / "configs").glob("*/digits.yaml"))
    names = [name for name in folders if name != "base"]
    silent = [name for name in names if "# Gate: none" in recipe(name).read_text(encoding="utf-8")]
    chosen = options.methods or [name for name in names if name not in silent]
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        with ThreadPoolExecutor(options.parallel) as pool:
            try:
                gates = list(pool.map(lambda method: run(method, out, options.seed), chosen))
            except Failed as error:
                raise SystemExit(str(error)) from error
    print(table(gates))
    if silent and not options.methods:
        print(f"no gate yet, see their recipes: {', '.join(silent)}")
    return 0 if all(gate.passed for gate in gates) else 1


def recipe(method: str) -> Path:
    """Return the recipe that defines the gate."""
    return ROOT / "configs" / method / "digits.yaml"


def has_gate(method: str) -> bool:
    """Return whether the recipe requires a gain."""
    return PROMISE.search(recipe(method).read_text(encoding="utf-8")) is not None


def run_in_scratch(method: str) -> Gate:
    """Run a gate in a temporary folder; return its figures."""
    with tempfile.TemporaryDirectory() as scratch:
        return run(method, Path(scratch))


def run(method: str, out: Path, seed: int = 0) -> Gate:
    """Train one recipe on one thread; return the first and last value of the gate's metric.

    Raises Failed if the run fails or the recipe defines no gate.
    """
    text = recipe(method).read_text(encoding="utf-8")
    promise, taught_by = PROMISE.search(text), TEACHER.search(text)
    if promise is None:
        missing = "promises nothing; add `# Gate: knn_top1 >= untrained + 0.30`"
        raise Failed(f"{recipe(method)}: {missing}")
    metric, margin = promise[1], float(promise[2])
    folder, start = out / method, time.monotonic()
    drawn = f"train.seed={seed}"
    teacher = []
    if taught_by is not None:
        trained = out / f"{method}_teacher"
        selftask(trained, metric, "train", taught_by[1], drawn)
        teacher = [f"method.teacher={trained}"]
    values = selftask(folder, metric, "train", f"{method}/digits", drawn, *teacher)
    if metric == FINETUNED:
        words = ("finetune", str(folder), *FEW_LABELS, drawn)
        starts = {"untrained": ["init.backbone=null"], "trained": []}
        values = [
            selftask(folder / name, "test_accuracy_top_1", *words, *more)[-1]
            for name, more in starts.items()
        ]
    seconds = time.monotonic() - start
    print(f"{method}: {metric} {values[0]:.3f} -> {values[-1]:.3f} in {seconds:.0f} s", flush=True)
    return Gate(method, metric, margin, values[0], values[-1], seconds)


def selftask(out: Path, metric: str, *words: str) -> list[float]:
    """Run a command on one thread and return its rows of ``metric``; raise Failed if it fails."""
    command = [sys.executable, "-m", "selftask", *words, f"out={out}"]
    command += ["train.threads=1", "data.num_workers=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        output = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise Failed(f"{' '.join(words)}: exit {done.returncode}\n{output}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row[metric] for row in rows if metric in row]


def table(gates: list[Gate]) -> str:
    """Return a table with one line per method."""
    head = (
        f"{'method':<13}{'metric':<14}{'untrained':>10}{'trained':>9}{'promised':>10}{'s':>6}  gate"
    )
    lines = [
        f"{g.method:<13}{g.metric:<14}{g.untrained:>10.3f}{g.trained:>9.3f}"
        f"{g.untrained + g.margin:>10.3f}{g.seconds:>6.0f}  {'passed' if g.passed else 'FAILED'}"
        for g in gates
    ]
    passed = sum(gate.passed for gate in gates)
    return "\n".join([head, *lines, f"{passed} passed, {len(gates) - passed} failed"])


if __name__ == "__main__":
    sys.exit(main())
