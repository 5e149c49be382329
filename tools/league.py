"""Compare all methods at equal cost; figures are kept in ``league/METHOD.json``.

    python tools/league.py METHOD ...              run methods, or raw_pixels and untrained
    python tools/league.py --next [--until HH:MM]  run those that are not finished, in turn
                           --long SEEDS            also the long runs of the first seeds
    python tools/league.py --page | --check        write docs/league.md, or test it

``--league cifar10`` names the second league, whose images are in ``data/cifar10/train/CLASS`` and
``data/cifar10/test/CLASS``.

Each run is written when it ends, and the same command continues after a kill. Runs are made again
if the settings of the league have changed.

Equal cost is measured in images of ``supervised`` (tools/league_cost.py), so that it means the same
on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import league_page
from league_cost import EPOCHS, relative_cost, train
from league_plan import (
    BASELINES,
    LEAGUES,
    LONG,
    PIXELS,
    TEACHERS,
    TWO_TEACHERS,
    League,
    batch_size,
    budget,
    evaluation,
    held_out,
    is_done,
    lengths,
    long_runs,
    measured,
    network_of,
    order,
    protocol,
    reference_settings,
    settings,
)
from selftask.api.objects import overrides
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources, open_data
from selftask.evaluate.clid import CLID
from selftask.evaluate.features import Features, collect
from selftask.evaluate.offline import iterate_source
from selftask.evaluate.online import evaluate_features
from selftask.evaluate.view_measures import ViewMeasures
from selftask.hooks.watching.health import effective_rank
from selftask.models.build import build_backbone
from selftask.task import Task
from selftask.task.loop import train_loop

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "league"
CPU = torch.device("cpu")


def best_factor(search: list[dict[str, Any]]) -> float:
    """Return the learning rate with the largest sum of held-out k-NN and linear top-1."""
    return float(max(search, key=lambda run: run["knn_top1"] + run["linear_top1"])["factor"])


# -- one run -------------------------------------------------------------------------------------


def rate(league: League, backbone: nn.Module, config: Config, sources: Sources) -> dict[str, float]:
    """Return the figures of frozen features."""
    assert sources.val is not None
    parts = [
        iterate_source(backbone, config, source, device=CPU, tell=lambda _: None)
        for source in (sources.train, sources.val)
    ]
    known, test = map(collect, parts)
    figures = evaluate_features(backbone, config.eval.evaluations, known, test)
    figures["effective_rank"] = float(effective_rank(_double(test)))
    figures |= CLID()(known, test)
    figures |= ViewMeasures()(backbone, with_shared_views(league, config), sources, CPU)
    return {name: round(value, 6) for name, value in figures.items()}


def with_shared_views(league: League, config: Config) -> Config:
    """Return a config whose views are the same for all methods."""
    given = overrides({"views.main.transforms": league.measured_views})
    return dataclasses.replace(config, views=load_config("simclr/digits", given).views)


def _double(features: Features) -> torch.Tensor:
    return features.features.double()


class Runs:
    """Runs of a method in a league, kept in a file.

    Args:
        league: Its constants, a dataclass.
        name: Name of the league.
        method: Name of the method, or of a baseline.
        folder: Folder of the file.
        long: Number of seeds with long runs.
    """

    def __init__(
        self, league: League, name: str, method: str, folder: Path = RESULTS, long: int = 0
    ) -> None:
        self.league, self.name, self.method = league, name, method
        self.long_seeds = league.seeds[:long]
        self.path = folder / f"{method}.json"
        self.all: dict[str, Any] = (
            json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
        )
        self.entry: dict[str, Any] = {"budget": budget(league), "runs": {}}
        old = self.all.get(name, {})
        if protocol(old.get("budget", {})) == protocol(self.entry["budget"]):
            self.entry["runs"] = old["runs"]

    def run(
        self, key: str, make: Callable[[], dict[str, Any]], **fixed: float | int
    ) -> dict[str, Any]:
        """Return the result of a run; make and write it if there is none with these settings.

        Args:
            key: Name of the run.
            make: Makes it.
            fixed: Settings that its result names.
        """
        runs: dict[str, Any] = self.entry["runs"]
        if key not in runs or any(runs[key][name] != value for name, value in fixed.items()):
            runs[key] = {**make(), "commit": commit(), "date": today()}
            self.write()
            print(self.method, key, runs[key].get("knn_top1"), flush=True)
        found: dict[str, Any] = runs[key]
        return found

    def write(self) -> None:
        """Replace the file at once, so that a kill leaves the old or the new one."""
        self.path.parent.mkdir(exist_ok=True)
        text = json.dumps({**self.all, self.name: self.entry}, indent=1, sort_keys=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def run_method(runs: Runs, scratch: Path) -> None:
    """Measure the cost, search the learning rate, then run all seeds of both budgets."""
    league, method = runs.league, runs.method
    taught = teachers(runs, scratch)

    def config_of(factor: float, steps: int, seed: int, **more: Any) -> Config:
        recipe, made = settings(league, method, factor, steps, seed)
        out = scratch / f"{method}_{time.monotonic_ns()}"
        return load_config(recipe, overrides({**made, **taught, **more, "out": out}))

    def measure() -> dict[str, Any]:
        config = config_of(1.0, 1, league.search_seed)
        sources = measured(open_data(config.data), league.measured)
        steps = EPOCHS * (len(sources.train) // batch_size(config))
        config = config_of(1.0, steps, league.search_seed)
        recipe, made = reference_settings(league, network_of(method), steps, batch_size(config))
        reference = load_config(recipe, overrides({**made, "out": scratch / "reference"}))
        cost = relative_cost(config, reference, sources)
        return {"relative": round(cost, 3), "batch_size": batch_size(config), "machine": machine()}

    def one(factor: float, steps: int, seed: int, *, search: bool) -> dict[str, Any]:
        config = config_of(factor, steps, seed)
        sources = open_data(config.data)
        sources = held_out(sources, league.kept) if search else sources
        backbone, watch = train(config, sources)
        figures = rate(league, backbone, config, sources)
        return {
            **figures,
            "factor": factor,
            "lr": config.to_dict()["optimizer"]["lr"],
            "seed": seed,
            "steps": len(watch.times),
            "cpu_s": round(watch.times[-1], 2),
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            "machine": machine(),
        }

    cost = runs.run("relative_cost", measure)
    steps = lengths(league, cost, network_of(method))
    length = max(1, round(league.search_length * steps["images"]))
    rated = partial(one, steps=length, seed=league.search_seed, search=True)
    factor = best_factor(
        [
            runs.run(f"search_{f:.2g}", partial(rated, f), factor=f, steps=length)
            for f in league.factors
        ]
    )
    for name, count in steps.items():
        chosen = partial(one, factor, count, search=False)
        for seed in runs.long_seeds if name == LONG else league.seeds:
            fixed = {"factor": factor, "steps": count}
            runs.run(f"{name}_{seed}", partial(chosen, seed=seed), **fixed)


def run_baseline(runs: Runs, scratch: Path) -> None:
    """Rate raw pixels, or networks with initial weights, with the test images of each seed."""
    league = runs.league
    for name, net in league.networks.items():
        for seed in league.seeds:

            def make(name: str = name, net: Any = net, seed: int = seed) -> dict[str, Any]:
                more = {**league.data(net), "backbone": league.backbone(name), **evaluation(league)}
                more |= {"train.seed": seed, "train.threads": 1, "out": scratch / "none"}
                config = load_config("simclr/digits", overrides(more))
                torch.manual_seed(seed)
                flat = runs.method == PIXELS
                twin = next(key for key, other in league.networks.items() if other.size == net.size)
                if flat and twin != name:  # the same pixels
                    return dict(runs.entry["runs"][f"{twin}_{seed}"])
                backbone = nn.Flatten() if flat else build_backbone(config.backbone).eval()
                figures = rate(league, backbone, config, open_data(config.data))
                return {**figures, "seed": seed, "machine": machine()}

            runs.run(f"{name}_{seed}", make)


def teachers(runs: Runs, scratch: Path) -> dict[str, Any]:
    """Train the teachers of a method as in their own first run; return the settings that name them.

    Raises:
        SystemExit: If a teacher's own runs are not finished.
    """
    named: dict[str, str] = {}
    if runs.method in TEACHERS:
        option, teacher = TEACHERS[runs.method]
        named = {f"method.{option}": teacher}
    for option, teacher in TWO_TEACHERS.get(runs.method, {}).items():
        named[f"method.teachers.{option}"] = teacher
    return {key: str(train_teacher(runs, teacher, scratch)) for key, teacher in named.items()}


def train_teacher(runs: Runs, teacher: str, scratch: Path) -> Path:
    """Train one teacher with checkpoint and export; return its run folder."""
    own = Runs(runs.league, runs.name, teacher, runs.path.parent)
    if not finished(own):
        raise SystemExit(f"{runs.method}: its teacher {teacher} has to be run first")
    seed = runs.league.seeds[0]
    first = own.entry["runs"][f"cost_{seed}"]
    recipe, more = settings(runs.league, teacher, first["factor"], first["steps"], seed)
    made = {key: value for key, value in more.items() if value is not None}
    made |= {"train.epochs": None, "hooks.evaluation": None, "out": scratch / f"teacher_{teacher}"}
    config = load_config(recipe, overrides({**made, **teachers(own, scratch)}))
    train_loop(Task(config, sources=open_data(config.data)))
    return Path(config.out_folder)


# -- all runs ------------------------------------------------------------------------------------


def finished(runs: Runs) -> bool:
    """Return True if all runs with these settings are there."""
    league = runs.league
    if runs.method in BASELINES:
        made = runs.entry["runs"]
        return all(f"{name}_{seed}" in made for name in league.networks for seed in league.seeds)
    if not is_done(runs.entry, league):
        return False
    made = long_runs(runs.entry, league, network_of(runs.method))
    return network_of(runs.method) not in league.long or len(made) >= len(runs.long_seeds)


def machine() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((x.split(": ")[1] for x in lines if x.startswith("model name")), "")
    return f"{model or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def commit() -> str:
    words = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def run_one(name: str, league: League, method: str, long: int) -> None:
    runs = Runs(league, name, method, long=long)
    with tempfile.TemporaryDirectory() as scratch:
        (run_baseline if method in BASELINES else run_method)(runs, Path(scratch))


def run_next(name: str, league: League, until: str | None, long: int) -> None:
    """Run what is not finished, each in a process of its own, for its peak of memory."""
    for method in order(league):
        if until is not None and datetime.datetime.now().strftime("%H:%M") >= until:
            return
        if not finished(Runs(league, name, method, long=long)):
            command = [sys.executable, __file__, method, "--league", name, "--long", str(long)]
            if subprocess.run(command, check=False).returncode:
                print(f"{method}: failed", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", choices=[*order(LEAGUES["digits"]), []]
    )
    parser.add_argument("--league", choices=[*LEAGUES], default="digits")
    parser.add_argument("--next", action="store_true", help="run all that are not finished")
    parser.add_argument("--until", metavar="HH:MM", help="start no method after this time")
    parser.add_argument("--long", type=int, default=0, metavar="SEEDS", help="also long runs")
    parser.add_argument("--page", action="store_true", help="write docs/league.md")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is not up to date")
    options = parser.parse_args()
    league = LEAGUES[options.league]
    if options.page or options.check:
        return league_page.update(RESULTS, check=options.check)
    torch.set_num_threads(1)
    for method in options.methods:
        run_one(options.league, league, method, options.long)
    if options.next:
        run_next(options.league, league, options.until, options.long)
    return 0


if __name__ == "__main__":
    sys.exit(main())
