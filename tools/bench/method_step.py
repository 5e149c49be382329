"""Time of a train step: selftask's methods beside those of other libraries.

    pip install lightly stable-pretraining
    python tools/bench/method_step.py [METHOD ...] [--peer lightly] [--rounds 5] [--batch 64]

Images of 32x32 in memory, drawn at random; networks, heads and views are equal (``method_parts``).
SGD with momentum. selftask runs its trainer with default hooks; modules of the other library run in
a plain loop, as in lightly's examples. Rounds take turns in one process with one thread. Shown is
CPU time per step: least of all steps, and the median over rounds of the ratio of both medians, with
its 95 % interval by bootstrap. Parameters are those that are trained. With ``--precision auto``,
the other library computes in float32, as in its examples.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from contestants import LR, MOMENTUM, train_in_memory
from method_parts import CONTESTS, Contest
from rounds import in_turns, median_and_interval
from small_models import Stamped

from selftask.batch import Draws
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.models.build import build_backbone

STEPS = 5  # per turn; the first one does not count
MODULES = {"lightly": "lightly_methods", "stable-pretraining": "stable_methods"}


class _Batches(Stamped):
    """Views of random images, and labels; records the time of every request."""

    def __init__(self, contest: Contest, batch: int, steps: int) -> None:
        draw = torch.Generator().manual_seed(0)
        groups = {
            name: [torch.randn(batch, 3, size, size, generator=draw) for _ in range(count)]
            for name, (count, size) in contest.views.items()
        }
        self.views = [view for group in groups.values() for view in group]
        whole = Draws(
            matrix=torch.eye(2, 3).expand(batch, 2, 3) * 32,
            image_size=torch.full((batch, 2), 32.0),
            params={},
        )
        self.draws = {name: [whole] * len(group) for name, group in groups.items()}
        self.pool: list[Any] = [(groups, torch.zeros(batch, dtype=torch.long))]
        self.steps, self.wall, self.cpu = steps, [], []


def load_contest(name: str, contest: Contest, batch: int, precision: str, folder: Path) -> Config:
    """Return the config of selftask, with a recipe in ``folder``."""
    views = ", ".join(
        f"{group}: {{count: {count}, transforms: [{{name: resize, size: {size}}}, normalize]}}"
        for group, (count, size) in contest.views.items()
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"data: digits\nviews: {{{views}}}\neval: {{transforms: [normalize]}}\n"
        f"backbone: {contest.backbone}\nmethod: {json.dumps({'name': name, **contest.parts})}\n"
        f"train: {{max_steps: {STEPS}, batch_size: {batch}, precision: {precision}}}\n"
        f"optimizer: {{name: sgd, lr: {LR}, sgd_momentum: {MOMENTUM}}}\n"
    )
    words = [f"out={folder / 'run'}", "train.device=cpu", "train.threads=1"]
    return load_config(str(recipe), words)


class Pair:
    """One method, in both libraries."""

    def __init__(self, name: str, peer: str, batch: int, precision: str) -> None:
        self.name, self.peer, self.contest = name, peer, CONTESTS[peer][name]
        self.batch, self.precision = batch, precision
        methods = importlib.import_module(MODULES[peer])
        with tempfile.TemporaryDirectory() as folder:
            backbone = build_backbone(self.config(folder).backbone)
        self.theirs = methods.build(name, backbone, self.contest.parts)
        trained = [p for p in self.theirs.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)
        self.parameters = {"peer": _numel(self.optimizer)}

    def config(self, folder: str) -> Config:
        return load_contest(self.name, self.contest, self.batch, self.precision, Path(folder))

    def run_peer(self, batches: _Batches) -> None:
        """Train the other library's method in the loop of lightly's examples."""
        half = self.precision == "bfloat16"
        for _ in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = self.theirs(batches.views)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run_selftask(self, batches: _Batches) -> None:
        """Train with selftask's trainer."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            config = self.config(folder)
            Path(config.out).mkdir()
            task = train_in_memory(config, batches)
        self.parameters["selftask"] = _numel(task.optimizer)

    def measure(self, rounds: int) -> str:
        """Return a line of the table, after ``rounds`` rounds."""
        times: dict[str, list[list[float]]] = {"selftask": [], "peer": []}
        for number in range(rounds):
            for side in in_turns([*times], number):
                batches = _Batches(self.contest, self.batch, STEPS)
                gc.collect()
                getattr(self, f"run_{side}")(batches)
                times[side].append(batches.step_times()[1].tolist())
        medians = [list(map(statistics.median, side)) for side in times.values()]
        ratio, low, high = median_and_interval([a / b for a, b in zip(*medians, strict=True)])
        ours, theirs = (1e3 * min(map(min, side)) for side in times.values())
        millions = " / ".join(f"{self.parameters[side] / 1e6:.2f}" for side in times)
        return (
            f"| {self.name} | {self.peer} | {ours:.0f} | {theirs:.0f} "
            f"| {ratio:.2f} [{low:.2f}, {high:.2f}] | {millions} |"
        )


def _numel(optimizer: Any) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--peer", choices=CONTESTS, help="by default the first that has the method")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", choices=("float32", "bfloat16", "auto"), default="float32")
    options = parser.parse_args()
    peers = [options.peer] if options.peer else [*CONTESTS]
    peer_of = {name: peer for peer in reversed(peers) for name in CONTESTS[peer]}
    for name in options.methods:
        if name not in peer_of:
            parser.error(f"{name}: none of {', '.join(peer_of)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| method | peer | selftask, ms | peer, ms | ratio | parameters, millions |")
    print("|---|---|---|---|---|---|")
    for name in options.methods or peer_of:
        pair = Pair(name, peer_of[name], options.batch, options.precision)
        print(pair.measure(options.rounds), flush=True)


if __name__ == "__main__":
    main()
