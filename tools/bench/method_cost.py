"""CPU time of a step of every method relative to ``supervised``, for the pages of the methods.

    OMP_NUM_THREADS=1 python tools/bench/method_cost.py [METHOD ...] [--rounds 2]

Networks, batches and views are those of the league (tools/league_plan.py); ``supervised`` runs on
the same network with one view. A turn is 7 steps, of which the first does not count, with reading
and augmenting images; methods and ``supervised`` take turns. The cost is the ratio of
the least times of a step, for equal numbers of images. Figures are kept in method_cost.json beside
this file, also of methods that were not named.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rounds import in_turns

sys.path.append(str(Path(__file__).resolve().parents[1]))

import league
from league_plan import LEAGUES, LEFT_OUT, batch_size, network_of, settings
from selftask.api.objects import overrides
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.registry import METHODS

FILE = Path(__file__).with_suffix(".json")
PLAN = LEAGUES["digits"]
REFERENCE, STEPS = "supervised", 7


def config_of(method: str, out: Path, network: str, batch: int) -> Config:
    """Return the config of a turn of a method on a network of the league."""
    recipe, more = settings(PLAN, method, 1.0, 1, seed=0)
    net = PLAN.networks[network]
    if method == REFERENCE:
        more = {key: value for key, value in more.items() if not key.startswith("backbone.")}
        more |= {"backbone": {"name": network, **net.backbone}}
        more |= {"data.size": net.size, "data.val.size": net.size, "train.batch_size": batch}
    more |= {"train.max_steps": STEPS, "eval.evaluations": {}, "out": str(out)}
    return load_config(recipe, overrides(more))


def image_ms(config: Config) -> float:
    """Train; return the least CPU milliseconds per image of all steps but the first."""
    with contextlib.redirect_stdout(io.StringIO()):
        _, watch = league.train(config, open_data(config.data), float("inf"))
    assert len(watch.times) == STEPS, "test phases are not steps of the training"
    steps = [after - before for before, after in pairwise(watch.times)]
    return 1e3 * min(steps) / batch_size(config)


def cost(method: str, rounds: int) -> float:
    """Return the cost of a method, ``supervised`` being 1."""
    network = network_of(method)
    least = {method: float("inf"), REFERENCE: float("inf")}
    for number in range(rounds):
        for name in in_turns([*least], number):
            with tempfile.TemporaryDirectory() as folder:
                batch = batch_size(load_config(f"{method}/digits", []))
                config = config_of(name, Path(folder) / "run", network, batch)
                least[name] = min(least[name], image_ms(config))
    return least[method] / least[REFERENCE]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.methods or sorted({*METHODS.names()} - {*LEFT_OUT}):
        started = time.monotonic()
        kept.setdefault("cost", {})[name] = round(cost(name, options.rounds), 2)
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        kept["measured"] = f"{league.machine()}, one thread, {date}"
        options.out.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        print(f"{name} {kept['cost'][name]}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
