"""CPU time of linear probes on one thread: selftask and scikit-learn's logistic regression.

    OMP_NUM_THREADS=1 python tools/bench/linear.py [--images 10000] [--rounds 7]

Each round runs every entry once. Shown are median and minimum of CPU seconds, the median over
rounds of the ratio to one fit of scikit-learn with its 95 % bootstrap interval, and the accuracy on
5,000 other images. Features are standardized for both; for scikit-learn this is not timed.
Difficulties differ in the distance of the classes.

    scikit-learn  LogisticRegression, lbfgs, default tolerance, unlimited iterations
    converged     the same with tolerance 1e-5
    single        selftask, one weight decay (the same): standardizing, fitting and testing
    grid          selftask, five weight decays, one picked on held-out images, and a last fit
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rounds import in_turns, median_and_interval
from sklearn.linear_model import LogisticRegression

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.distributed.device import keep_freed_memory
from selftask.evaluate import linear
from selftask.evaluate.features import Features
from selftask.evaluate.linear import Linear

CLASSES, TEST = 10, 5_000
Contestant = Callable[[], float]


def draw(num: int, width: int, distance: float) -> tuple[Features, Features]:
    """Draw correlated features of ``num`` and 5,000 images, with variances of a power law."""
    draws = np.random.default_rng(0)
    turned = np.linalg.qr(draws.standard_normal((width, width)))[0]
    spread = np.arange(1, width + 1) ** -0.7
    centers = draws.standard_normal((CLASSES, width)) * distance
    labels = draws.integers(0, CLASSES, num + TEST)
    rows = ((draws.standard_normal((num + TEST, width)) + centers[labels]) * spread) @ turned
    features, targets = torch.from_numpy(rows).float(), torch.from_numpy(labels)
    every = Features(features, targets, torch.arange(num + TEST))
    return every[torch.arange(num)], every[torch.arange(num, num + TEST)]


def contestants(train: Features, test: Features, decay: float) -> dict[str, Contestant]:
    known, tested = linear._standardized(train, test)
    x, y = known.features.numpy(), known.targets.numpy()

    def of_scikit_learn(tol: float) -> float:
        model = LogisticRegression(C=1 / (decay * len(x)), max_iter=10_000, tol=tol).fit(x, y)
        return float(model.score(tested.features.numpy(), tested.targets.numpy()))

    def single() -> float:
        first, second = linear._standardized(train, test)
        problem = linear._Problem(first, Linear().iterations)
        return problem.accuracy(problem.fit(decay), second)

    return {
        "scikit-learn": lambda: of_scikit_learn(1e-4),
        "converged": lambda: of_scikit_learn(1e-5),
        "single": single,
        "grid": lambda: Linear()(train, test)["linear_top1"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    print(
        f"{args.images} x {args.width}, {CLASSES} classes; {args.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'distance, decay':<17}{'':<14}{'median s':>9}{'least s':>9}   x [95 %]             top-1"
    )
    for distance in (0.1, 0.15, 0.3):
        train, test = draw(args.images, args.width, distance)
        for decay in (1e-2, 1e-4):
            solvers = contestants(train, test, decay)
            seconds: dict[str, list[float]] = {name: [] for name in solvers}
            accuracy: dict[str, float] = {name: run() for name, run in solvers.items()}  # warm-up
            for number in range(args.rounds):
                for name in in_turns(list(solvers), number):
                    started = time.process_time()
                    solvers[name]()
                    seconds[name].append(time.process_time() - started)
            for name, taken in seconds.items():
                pairs = zip(taken, seconds["scikit-learn"], strict=True)
                middle, low, high = median_and_interval([mine / other for mine, other in pairs])
                interval = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
                print(
                    f"{f'{distance}, {decay:g}':<17}{name:<14}{statistics.median(taken):>9.2f}"
                    f"{min(taken):>9.2f}   {interval:<18}{accuracy[name]:>8.4f}"
                )


if __name__ == "__main__":
    main()
