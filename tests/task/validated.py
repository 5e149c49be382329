"""Runs with validation images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from selftask.evaluate.online import evaluate_task
from selftask.task import Task

LABELED = "meters.accuracy={topk: [1]}"


def train(method: str, folder: Path, out: str, *more: str, evaluate: Any = evaluate_task) -> Task:
    """A tiny run with 40 images in ``data.val``."""
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    task = tiny.task(method, folder, out, val, *tiny.extras("data.val", method), *more)
    return tiny.loop_evaluated(task, evaluate)
