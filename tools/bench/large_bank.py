"""Memory and time of k-NN in a file of 1.3 million rows of 2048 features.

    OMP_NUM_THREADS=1 python tools/bench/large_bank.py [--rows 1300000] [--queries 1000] [--out DIR]

Writes random features to a ``.npy`` file (10.6 GB) in DIR, and searches the nearest rows of noisy
copies of some of them. Shown are the size of the file, the largest resident memory of the process,
which includes pages of mapped files, CPU and wall seconds of the search, and the share of queries
of which the nearest row is the one that was copied.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.evaluate.features import FileRows
from selftask.evaluate.nearest import Bank

BLOCK = 8192  # rows


def write(path: Path, num_rows: int, width: int, copied: Tensor) -> Tensor:
    """Write random rows block by block; return those of the sorted indices ``copied``."""
    draw = torch.Generator().manual_seed(0)
    kept = []
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, width)}
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, num_rows, BLOCK):
            rows = torch.randn(min(BLOCK, num_rows - first), width, generator=draw)
            file.write(rows.numpy().data)
            here = (copied >= first) & (copied < first + len(rows))
            kept.append(rows[copied[here] - first])
    return torch.cat(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_300_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw = torch.Generator().manual_seed(1)
    copied = torch.randperm(args.rows, generator=draw)[: args.queries].sort().values
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        path = Path(folder) / "features.npy"
        rows = write(path, args.rows, args.width, copied)
        size = path.stat().st_size
        queries = F.normalize(rows + torch.randn(rows.shape, generator=draw), dim=1)
        wall, cpu = time.perf_counter(), time.process_time()
        none = torch.full((len(queries),), -1)
        _, nearest = Bank(FileRows.of(path)).nearest(queries, args.k, none)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = (nearest[:, 0] == copied).double().mean()
    print(f"{args.rows} x {args.width}: {size / 1e9:.2f} GB; {len(queries)} queries, k={args.k}")
    print(f"most memory {peak / 1e9:.2f} GB; {cpu:.0f} CPU s, {wall:.0f} s; found {found:.2%}")


if __name__ == "__main__":
    main()
