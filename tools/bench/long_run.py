"""Memory and open files of a run of 100,000 steps.

    python tools/bench/long_run.py [--steps 100000] [--evaluations 10] [--maps] [--out FOLDER]

Trains a small linear network on the digits with four images per batch, the real loader and all
default hooks. Every hundredth of the run there is a checkpoint and a log row, and a k-NN evaluation
as often as asked. With --maps the network is a small ResNet, and each evaluation is of k-NN,
clusters, the spectrum and correspondence. At each row, resident memory, what malloc has given out
and not got back (glibc), open files and the number of Python objects are recorded. Shown are their
slopes over the second half of the run, with a 95 % interval, and the extremes. A leak has a slope
whose interval excludes 0. Resident memory may grow without one: the allocator touches pages that it
holds for the first time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))
import selftask
from selftask.hooks.base import Hook
from selftask.registry import register_backbone, register_hook

PAGE = os.sysconf("SC_PAGE_SIZE")
TAKEN: list[dict[str, float]] = []
MAPS = {
    "backbone": {"name": "small_resnet", "width": 8},
    "evaluations": {
        **{name: {} for name in ("knn", "clusters", "spectrum")},
        "correspondence": {"images": 50, "size": 32},
    },
}


@register_backbone("bench_linear")
@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """3072 -> 16 features."""

    def build(self) -> Any:
        from torch import nn

        network = nn.Sequential(nn.Flatten(), nn.Linear(3072, 16))
        network.embed_dim = 16
        return network


@register_hook("bench_resources")
@dataclass(eq=False, kw_only=True)
class Resources(Hook):
    """Recorder of the process's resources at each row."""

    def on_row(self, task: Any) -> None:
        if "loss" in task.last_row:
            TAKEN.append({"step": task.steps_done, **resources()})


def resources() -> dict[str, float]:
    """Return resident memory in bytes, open files and the number of objects of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    gc.collect()
    return {
        "memory": pages * PAGE,
        "malloc": allocated(),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated() -> int:
    """Return the bytes that glibc's malloc has given out and that are not freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def measure(
    steps: int, out: Path, *, evaluations: int = 10, maps: bool = False
) -> list[dict[str, float]]:
    """Train; return the recorded values, one dict per row."""
    TAKEN.clear()
    part = max(steps // 100, 1)
    selftask.train(
        "simclr/digits",
        out=out,
        data={"num_workers": 0},
        backbone=MAPS["backbone"] if maps else "bench_linear",
        method={"out_dim": 8, "hidden_dim": 16},
        eval={
            "every": f"{max(steps // evaluations, 1)} steps",
            **({"evaluations": MAPS["evaluations"]} if maps else {}),
        },
        train={
            "max_steps": steps,
            "epochs": None,
            "batch_size": 4,
            "threads": 1,
            "log_every": part,
            "checkpoint_every": f"{part} steps",
        },
        hooks={"bench_resources": {}},
    )
    return list(TAKEN)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--evaluations", type=int, default=10)
    parser.add_argument("--maps", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run"
        taken = measure(options.steps, out, evaluations=options.evaluations, maps=options.maps)
    late = taken[len(taken) // 2 :]
    steps = [row["step"] for row in late]
    print(f"{options.steps} steps, {len(taken)} rows; slopes over the second half")
    for name in ("memory", "malloc", "files", "objects"):
        values = [row[name] for row in late]
        if min(values) == max(values):
            print(f"{name:<8} constant: {values[0]:,.0f}")
            continue
        fit = stats.linregress(steps, values)
        spread = stats.t.ppf(0.975, len(late) - 2) * fit.stderr
        low, high = fit.slope - spread, fit.slope + spread
        print(
            f"{name:<8} {fit.slope:+.4f} a step [{low:+.4f}, {high:+.4f}]; "
            f"least {min(values):,.0f}, most {max(values):,.0f}"
        )
    return int(np.ptp([row["files"] for row in late]) != 0)


if __name__ == "__main__":
    sys.exit(main())
