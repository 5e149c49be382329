"""CPU time of k-NN on one thread: selftask, faiss, scikit-learn, lightly, and a matrix product.

    OMP_NUM_THREADS=1 python tools/bench/knn.py [--train 50000] [--test 10000] [--rounds 7]

Each round runs every entry once. Shown are median and minimum of CPU seconds, the median over
rounds of the ratio to faiss (pip install faiss-cpu lightly) with its 95 % bootstrap interval, and
the shares of neighbors and of predicted classes that equal those of faiss. Classes are predicted by
votes of the neighbors, in double precision for entries that only search.

    faiss     IndexFlatIP, search only: features are normalized and indexed before
    product   torch.mm in blocks only
    sklearn   NearestNeighbors, brute force, cosine
    exact     selftask's search, with normalization
    int8      the same with a first pass in int8
    lightly   knn_predict in batches of 512, with votes: features are normalized before
    votes     as exact, with votes
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
from selftask.evaluate.nearest import QUERIES, Bank
from selftask.models.feature_queue import class_votes

CLASSES = 100
TEMPERATURE = 0.07


def draw(num: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw features (num, width), with similarities as in a network, and classes of images."""
    centers = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (num,), generator=generator)
    features = centers[classes] + torch.randn(num, width, generator=generator)
    return features.relu(), classes


def of_faiss(train: Tensor, test: Tensor, k: int) -> Callable[[], Tensor]:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(train.shape[1])
    index.add(F.normalize(train).numpy())
    queries = F.normalize(test).numpy()
    return lambda: torch.from_numpy(index.search(queries, k)[1])


def of_sklearn(train: Tensor, test: Tensor, k: int) -> Callable[[], Tensor]:
    from sklearn.neighbors import NearestNeighbors

    index = NearestNeighbors(n_neighbors=k, algorithm="brute", metric="cosine").fit(train.numpy())
    return lambda: torch.from_numpy(index.kneighbors(test.numpy(), return_distance=False))


def of_lightly(train: Tensor, test: Tensor, k: int, classes: Tensor) -> Callable[[], Tensor]:
    from lightly.utils.benchmarking import knn_predict

    bank = F.normalize(train).T.contiguous()  # (E, N), as its callers have it
    batches = F.normalize(test).split(QUERIES)
    options = {"num_classes": CLASSES, "knn_k": k, "knn_t": TEMPERATURE}
    return lambda: torch.cat([knn_predict(x, bank, classes, **options)[:, 0] for x in batches])


def of_product(train: Tensor, test: Tensor, k: int) -> Callable[[], Tensor]:
    def search() -> Tensor:
        for queries in test.split(512):
            for block in train.split(8192):
                torch.mm(queries, block.T)
        return torch.zeros(len(test), k, dtype=torch.int64)

    return search


def of_selftask(
    train: Tensor, test: Tensor, k: int, first_pass: torch.dtype, classes: Tensor | None = None
) -> Callable[[], Tensor]:
    """Return a search for neighbors, or with ``classes`` a prediction."""

    def run() -> Tensor:
        bank = Bank(train, first_pass=first_pass)
        queries = F.normalize(test, dim=1)
        chunks = queries.split(QUERIES)
        none = [torch.full((len(chunk),), -1) for chunk in chunks]
        neighbors = [
            bank.nearest(*pair) for pair in ((c, k, n) for c, n in zip(chunks, none, strict=True))
        ]
        if classes is None:
            return torch.cat([rows for _, rows in neighbors])
        votes = [class_votes(c, classes[rows], CLASSES, TEMPERATURE) for c, rows in neighbors]
        return torch.cat(votes).argmax(dim=1)

    return run


def predicted(train: Tensor, test: Tensor, classes: Tensor, rows: Tensor) -> Tensor:
    """Return the classes (N,) that neighbors (N, k) vote for."""
    cosines = [
        F.cosine_similarity(x, train[near].double())
        for x, near in zip(test.double(), rows, strict=True)
    ]
    votes = torch.zeros(len(test), CLASSES, dtype=torch.float64)
    votes.scatter_add_(1, classes[rows], (torch.stack(cosines) / TEMPERATURE).exp())
    return votes.argmax(dim=1)


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
    (train, classes), (test, _) = draw(args.train, args.width, 1), draw(args.test, args.width, 2)
    contestants = {
        "faiss": of_faiss(train, test, args.k),
        "product": of_product(train, test, args.k),
        "sklearn": of_sklearn(train, test, args.k),
        "exact": of_selftask(train, test, args.k, torch.bfloat16),
        "int8": of_selftask(train, test, args.k, torch.int8),
        "lightly": of_lightly(train, test, args.k, classes),
        "votes": of_selftask(train, test, args.k, torch.bfloat16, classes),
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
    print(f"{'':<10}{'median s':>10}{'least s':>10}   x faiss [95 %]       neighbors  classes")
    expected = predicted(train, test, classes, rows["faiss"])
    for name, taken in seconds.items():
        ratios = [mine / other for mine, other in zip(taken, seconds["faiss"], strict=True)]
        middle, low, high = median_and_interval(ratios)
        print(
            f"{name:<10}{statistics.median(taken):>10.2f}{min(taken):>10.2f}   "
            f"{middle:.2f} [{low:.2f}, {high:.2f}]      ",
            end="",
        )
        mine = rows[name]
        if name == "product":
            print()
            continue
        share = ""
        if mine.ndim == 2:
            pairs = zip(mine, rows["faiss"], strict=True)
            share = f"{sum(int(torch.isin(*pair).sum()) for pair in pairs) / mine.numel():.5%}"
            mine = predicted(train, test, classes, mine)
        print(f"{share:>10} {(mine == expected).double().mean():.5%}")


if __name__ == "__main__":
    main()
