"""Every two features at once: stopped twice and resumed is never stopped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from ranks import run_ranks

FEATURES = {
    "bfloat16": ["train.precision=bfloat16"],
    "ema": ["hooks.ema={decay: 0.8, every: 2}"],
    "plateau": [
        "hooks.plateau={metric: loss, mode: min, patience: 0, factor: 0.5, threshold: 0.5}"
    ],
    "compile": ["train.compile=model"],
    "fsdp": ["parallel.reduce=fsdp"],
    "accumulate": ["train.step=accumulate", "train.accumulate=2"],
    "sam": ["train.step=sam"],
    "grad_cache": ["train.step={name: grad_cache, chunks: 2}"],
}
STEPS = {"accumulate", "sam", "grad_cache"}  # two at once are no pair: train.step has one name
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if not STEPS.issuperset(pair)]
COMMON = ["train.max_steps=4", "method.norm=false", "optimizer.schedule=constant"]


def whole_and_parts(rank: int, pair: tuple[str, str], folder: Path) -> list[str]:
    """Train through, and stopped after one and three steps; return what differs at the end."""
    more = [*COMMON, *FEATURES[pair[0]], *FEATURES[pair[1]]]
    tiny.train("simclr", folder, "whole", *more)
    for stop in (1, "null") if "compile" in pair else (1, 3, "null"):  # compiling is slow
        torch.compiler.reset()  # as in a new process
        parts = tiny.train("simclr", folder, "parts", *more, f"train.stop_at={stop}")
    assert parts.resumed and parts.clock.done
    if rank:
        return []
    rows, states = (
        [look(folder / name) for name in ("whole", "parts")]
        for look in (tiny.rows, tiny.last_state)
    )
    assert len(rows[0]) >= 4
    if "plateau" in pair:
        assert rows[0][-1]["lr"] < rows[0][0]["lr"], "the plateau's state must matter"
    if "compile" in pair:
        return _beyond(*rows, 1e-6, "rows") + _beyond(*states, 1e-6, "state")
    return tiny.differences(*rows, "rows") + tiny.differences(*states, "state")


def _beyond(a: Any, b: Any, bound: float, place: str) -> list[str]:
    """Where numbers of two nested states differ by more than a bound, relative to the largest."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), place
        return [d for key in a for d in _beyond(a[key], b[key], bound, f"{place}.{key}")]
    if isinstance(a, list | tuple):
        assert len(a) == len(b), place
        return [d for i in range(len(a)) for d in _beyond(a[i], b[i], bound, f"{place}[{i}]")]
    if not isinstance(a, float | torch.Tensor):
        return [] if a == b else [f"{place}: {a!r} and {b!r}"]
    one, other = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    if not one.numel():
        return []
    difference = float((one - other).abs().max())
    limit = bound * (1 + float(one.abs().max()))
    return [f"{place}: {difference:.1e}"] if difference > limit else []


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_resumes_bit_for_bit(pair: tuple[str, str], tmp_path: Path) -> None:
    """Two ranks with fsdp. With torch.compile within 1e-6: sums may be fused differently."""
    if "fsdp" in pair:
        differences = run_ranks(whole_and_parts, 2, pair, tmp_path)[0]
    else:
        differences = whole_and_parts(0, pair, tmp_path)
    assert differences == []
