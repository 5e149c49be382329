"""Draw docs/images/expected-curves.svg from runs: ``tools/expected_curves.py RUN [RUN ...]``.

The runs of the page are the digits recipes, ``selftask train moco/digits out=moco eval.every='10
epochs' train.log_every=2``, and two that fail: one collapses, the other stays at chance.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from selftask.logs import read_metrics

OUT = Path(__file__).resolve().parents[1] / "docs/images/expected-curves.svg"
COLUMNS = {
    "chance_ratio": "loss / loss at chance",
    "emb_std": "emb_std",
    "knn_top1": "k-NN top-1",
}
SMOOTHED = ("chance_ratio", "emb_std")


def smooth(values: list[float], over: int) -> list[float]:
    """Return the means of each value and those before it, at most ``over`` values."""
    return [
        sum(values[max(0, at - over + 1) : at + 1]) / min(at + 1, over) for at in range(len(values))
    ]


def draw(axis: Any, name: str, color: str, rows: list[dict[str, Any]], column: str) -> None:
    """Draw one run's column over its progress from 0 to 1; nothing if the run has none."""
    length = max(row["step"] for row in rows)
    points = [(row["step"] / length, row[column]) for row in rows if row.get(column) is not None]
    if points:
        where, values = zip(*points, strict=True)
        values = smooth(list(values), max(1, len(values) // 40)) if column in SMOOTHED else values
        dashed = "--" if name in ("collapsed", "atchance") else "-"
        axis.plot(where, values, dashed, color=color, label=name, linewidth=1.3)


def main(runs: list[str]) -> None:
    """Write the figure."""
    plt.rcParams.update({"svg.hashsalt": "selftask", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(1, len(COLUMNS), figsize=(10.5, 3.2), facecolor="white")
    for number, run in enumerate(map(Path, runs)):
        rows = read_metrics(run / "metrics.jsonl")
        for axis, column in zip(axes, COLUMNS, strict=True):
            draw(axis, run.name, f"C{number}", rows, column)
    for axis, title in zip(axes, COLUMNS.values(), strict=True):
        axis.set_title(title)
        axis.set_xlabel("progress of the run")
        axis.grid(alpha=0.25)
    axes[0].axhline(1, color="gray", linewidth=0.8, linestyle=":")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
