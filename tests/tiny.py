"""Any method on 80 handwritten digits as a tiny recipe, in this process or as a command.

Batches of 16, five steps an epoch, network and method as `selftask check` makes them tiny. For
tests of what happens around the steps, not of what is learned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selftask.checkpoint import rotation, store
from selftask.config.checks.requirements import required
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.data.sources.digits import NUMBERS
from selftask.equivalence.tiny_recipe import make_tiny
from selftask.logs import read_metrics
from selftask.logs.rows import MEASURED
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

ROOT = Path(__file__).resolve().parents[1]
BATCH_SIZE = 16
STEPS_PER_EPOCH = 5
STEPS = 3 * STEPS_PER_EPOCH
TIMES = MEASURED  # of a row: differ from run to run


def digits_file(folder: Path, name: str = "digits.npz", start: int = 0, stop: int = 80) -> Path:
    """Some of scikit-learn's digits, enlarged to 32 x 32, as ``folder/name``."""
    path = folder / name
    if not path.exists():
        all_images, all_labels = _digits()
        images = np.kron(all_images[start:stop], np.ones((1, 4, 4))) * 15.9
        labels = all_labels[start:stop]
        captions = [f"{label} in writing {row}" for row, label in enumerate(labels)]
        arrays = {n: np.isin(labels, kinds).astype(np.float32) for n, kinds in NUMBERS.items()}
        images = images.astype(np.uint8)
        frames = np.stack(3 * [images], axis=3)
        arrays |= {f"frame_{n}": np.roll(frames, n, axis=2) for n in range(1, 6)}
        np.savez(path, images=images, labels=labels, caption=captions, **arrays)
    return path


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's images and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target


@cache
def extras(key: str, method: str) -> tuple[str, ...]:
    """Return the override that adds to ``key`` the arrays of ``digits_file`` that it requires."""
    names = {"captions": ["caption"], "numbers": list(NUMBERS)}
    wanted = [name for word in names if word in required(method) for name in names[word]]
    groups = load_config(f"{method}/digits", []).views.values()
    wanted += [name for group in groups for name in group.images if name]
    return (f"{key}.extras=[{', '.join(wanted)}]",) if wanted else ()


def overrides(method: str, folder: Path, out: str | Path = "run", *more: str) -> list[str]:
    """Return the overrides that make the digits recipe of ``method`` tiny, then ``more``."""
    return [
        f"data={digits_file(folder)}",
        *extras("data", method),
        "data.val=null",
        "data.num_workers=0",
        *_tiny_parts(method),
        f"train={{batch_size: {BATCH_SIZE}, epochs: 3, log_every: 1, threads: 1, device: cpu}}",
        "eval.evaluations={knn: null, linear: null}",
        f"out={folder / out}",
        *more,
    ]


@cache
def _tiny_parts(method: str) -> tuple[str, ...]:
    """Return the overrides of backbone and method."""
    recipe = load_config(f"{method}/digits", [])
    small = make_tiny(recipe, batch_size=BATCH_SIZE, steps=STEPS)
    parts = {"backbone": small.backbone, "method": small.method}
    return tuple(f"{key}={_flow(part.to_dict())}" for key, part in parts.items())


def _flow(value: Any) -> str:
    """A value as it stands on the command line: JSON with bare keys."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return json.dumps(value)


def config(method: str, folder: Path, out: str | Path = "run", *more: str) -> Config:
    """The small config of ``method``."""
    return load_config(f"{method}/digits", overrides(method, folder, out, *more))


def task(method: str, folder: Path, out: str | Path = "run", *more: str) -> Task:
    """The small task of ``method``, not yet prepared."""
    torch.set_num_threads(1)
    chosen = config(method, folder, out, *more)
    return Task(chosen, sources=open_data(chosen.data))


def train(method: str, folder: Path, out: str | Path = "run", *more: str) -> Task:
    """Train the small task of ``method``."""
    return loop(task(method, folder, out, *more))


def loop(trained: Task) -> Task:
    """Train a task in this process; a stop by ``train.stop_at`` is fine."""
    try:
        train_loop(trained)
    except Interrupted:
        assert trained.config.train.stop_at is not None
    return trained


def loop_evaluated(trained: Task, evaluate: Callable[[Task], dict[str, float]]) -> Task:
    """Train a task with an evaluation, in a folder with the config of the run."""
    trained.evaluate = evaluate
    trained.out.mkdir(exist_ok=True)
    (trained.out / "config.yaml").write_text(to_yaml(trained.config))
    return loop(trained)


def command(
    method: str, folder: Path, out: str | Path = "run", *more: str, recipe: str | None = None
) -> list[str]:
    """The command line that trains the small ``method`` in a process of its own."""
    arguments = overrides(method, folder, out, *more)
    return [sys.executable, "-m", "selftask", "train", recipe or f"{method}/digits", *arguments]


def environment(**more: str) -> dict[str, str]:
    """Of a process: one thread, and this checkout's selftask."""
    path = os.pathsep.join([str(ROOT / "ssl"), str(ROOT / "tests")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def run(
    words: list[str], cwd: Path, timeout: float = 300.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; stdout and stderr as text."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def rows(out: Path) -> list[dict[str, Any]]:
    """The rows of a run, without what a clock measured."""
    kept = read_metrics(out / "metrics.jsonl")
    return [{key: item for key, item in row.items() if key not in TIMES} for row in kept]


def status(out: Path) -> dict[str, Any]:
    """``status.json`` of a run."""
    content: dict[str, Any] = json.loads((out / "status.json").read_text())
    return content


def last_state(out: Path, without: Iterable[str] = ("config", "metrics_bytes")) -> dict[str, Any]:
    """The newest checkpoint of a run, without what may differ between equal runs."""
    state = store.load(rotation.checkpoints(out / "checkpoints")[0])
    return {key: item for key, item in state.items() if key not in without}


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two nested states differ, bit for bit (NaN equals NaN)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return [f"{place}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"]
        same = a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        return [] if same else [f"{place}: tensors differ"]
    if isinstance(a, dict) and isinstance(b, dict):
        odd = [f"{place}.{key}: on one side only" for key in a.keys() ^ b.keys()]
        both = [key for key in a if key in b]
        return odd + [d for key in both for d in differences(a[key], b[key], f"{place}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{place}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{place}: {a!r} and {b!r}"]
