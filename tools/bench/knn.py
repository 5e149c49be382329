"""CPU time of k-NN on one thread: selftask, faiss's flat index, and a bare matrix product.

    OMP_NUM_THREADS=1 python tools/bench/knn.py [--train 50000] [--test 10000] [--rounds 7]

Each round runs every entry once. Shown are median and minimum of CPU seconds, the median over
rounds of the ratio to faiss (pip install faiss-cpu) with its 95 % bootstrap interval, and the share
of neighbors that equal those of faiss.

    faiss     IndexFlatIP, search only: features are normalized and indexed before
    product   torch.mm in blocks only
    exact     selftask's search in float32, with normalization
    bfloat16  candidates in bfloat16, compared in float32
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rounds import in_turns, median_and_interval
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.distributed.device import keep_freed_memory
from selftask.evaluate import knn

CLASSES = 100


def draw(num: int, width: int, seed: int) -> Tensor:
    """Draw features of images of some classes, (num, width), with similarities as in a network."""
    centers = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (num,), generator=generator)
    return (centers[classes] + torch.randn(num, width, generator=generator)).relu()


def of_faiss(train: Tensor, test: Tensor, k: int) -> Callable[[], Tensor]:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(train.shape[1])
    index.add(F.normalize(train).numpy())
    queries = F.normalize(test).numpy()
    return lambda: torch.from_numpy(index.search(queries, k)[1])


def of_product(train: Tensor, test: Tensor, k: int) -> Callable[[], Tensor]:
    def search() -> Tensor:
        for queries in test.split(512):
            for block in train.split(8192):
                torch.mm(queries, block.T)
        return torch.zeros(len(test), k, dtype=torch.int64)

    return search


def of_selftask(train: Tensor, test: Tensor, k: int, search: str) -> Callable[[], Tensor]:
    def run() -> Tensor:
        bank = knn.Bank(train, search=search)
        queries = F.normalize(test, dim=1)
        chunks = queries.split(knn._TEST_ROWS)
        none = [torch.full((len(chunk),), -1) for chunk in chunks]
        neighbors = [
            bank.nearest(*pair) for pair in ((c, k, n) for c, n in zip(chunks, none, strict=True))
        ]
        return torch.cat([rows for _, rows in neighbors])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    train, test = draw(args.train, args.width, 1), draw(args.test, args.width, 2)
    contestants = {
        "faiss": of_faiss(train, test, args.k),
        "product": of_product(train, test, args.k),
        "exact": of_selftask(train, test, args.k, "float32"),
        "bfloat16": of_selftask(train, test, args.k, "bfloat16"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    rows: dict[str, Tensor] = {}
    for number in range(args.rounds):
        for name in in_turns(list(contestants), number):
            started = time.process_time()
            rows[name] = contestants[name]()
            seconds[name].append(time.process_time() - started)
    print(
        f"{args.train} x {args.test} x {args.width}, k={args.k}; {args.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':<10}{'median s':>10}{'least s':>10}   x faiss [95 %]         same neighbors")
    for name, taken in seconds.items():
        ratios = [mine / other for mine, other in zip(taken, seconds["faiss"], strict=True)]
        middle, low, high = median_and_interval(ratios)
        same = sum(
            int(torch.isin(mine, other).sum())
            for mine, other in zip(rows[name], rows["faiss"], strict=True)
        )
        share = "" if name == "product" else f"{same / rows[name].numel():.5%}"
        print(
            f"{name:<10}{statistics.median(taken):>10.2f}{min(taken):>10.2f}   "
            f"{middle:.2f} [{low:.2f}, {high:.2f}]      {share}"
        )


if __name__ == "__main__":
    main()
