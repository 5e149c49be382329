"""Run folders as a run leaves them, written without training."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import yaml

from selftask.logs.columns import Column, describing
from selftask.logs.drawn_rows import read_ends


def write_run(
    folder: Path,
    state: str | None = "finished",
    *,
    steps: int = 20,
    total: int = 20,
    loss: float = 2.0,
    knn: float | None = 0.5,
    config: dict[str, Any] | None = None,
    age_s: float = 0.0,
    pid: int | None = None,
    log: str = "RUN finished: 20 steps in 7 s, out",
    **more: Any,
) -> Path:
    """Write config.yaml, status.json, metrics.jsonl and log.txt; four steps an epoch.

    Args:
        folder: The run folder.
        state: Of ``status.json``; None writes no such file.
        steps: Number of rows, one a step.
        total: Steps of the whole run.
        loss: Of the last row; it falls from twice this.
        knn: ``knn_top1`` of the last row; None for no evaluation.
        config: Changes of the config, section by section.
        age_s: Age of the files.
        pid: Process that runs it; None for this one.
        log: The last line of the log, without its time.
        **more: Further entries of ``status.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settled: dict[str, Any] = {
        "recipe": "simclr",
        "method": {"name": "simclr", "temperature": 0.1},
        "train": {"epochs": total / 4, "seed": 0, "log_every": 1},
        "optimizer": {"name": "adamw", "lr": 0.003},
    }
    for section, values in (config or {}).items():
        settled[section] = (
            {**settled.get(section, {}), **values} if isinstance(values, dict) else values
        )
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**settled, "out": str(folder)}, sort_keys=False)
    )
    rows = [row(step, loss * (2 - step / max(steps, 1))) for step in range(1, steps + 1)]
    if knn is not None and steps:
        rows.append({"step": steps, "epoch": steps / 4, "knn_top1": knn, "eval_s": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "log.txt").write_text(f"2026-11-22 23:31:34 first\n2026-11-22 23:31:35 {log}\n")
    now = time.time()
    if state is not None:
        status = {
            "state": state,
            "length": [total / 4, None],
            "host": socket.gethostname(),
            "pid": os.getpid() if pid is None else pid,
            "started": now - age_s - 60,
            "updated": now - age_s,
            **more,
        }
        (folder / "status.json").write_text(json.dumps(status))
    for path in folder.iterdir():
        os.utime(path, (now - age_s, now - age_s))
    return folder


def row(step: int, loss: float, **more: float) -> dict[str, float]:
    """A row of training, two seconds a step."""
    return {
        "step": step,
        "epoch": step / 4,
        "loss": loss,
        "lr": 0.003,
        "images_per_s": 1409.4,
        "step_s": 2.0,
        "memory_mb": 965.5,
        "eta_s": 40.0,
        **more,
    }


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run folder, oldest first."""
    return read_ends(folder / "events.jsonl").rows


def describe_column(name: str) -> Column | None:
    """The description of a column; capitals are a variable part (``lr/GROUP``)."""
    return next(iter(describing(name)), None)
