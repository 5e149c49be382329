"""Compare methods on CIFAR-10 with the same number of images seen, on one GPU; see docs/league.md.

    python tools/cifar_league.py --images DIR/cifar10.npz --pack DIR   write that file once
    python tools/cifar_league.py --images DIR/cifar10.npz [--processes 14] [METHOD ...]
    python tools/cifar_league.py --page | --check                      as of tools/league.py

``--pack DIR`` reads DIR/train/CLASS/*.jpg and DIR/test/CLASS/*.jpg. Processes share the GPU, so the
time of a run says nothing. Each run is written when it ends to ``league/cifar10/METHOD.json``, and
the same command continues. First each method gets its search of the learning rate and one seed,
then the other seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch import nn

import league_page
from league import RESULTS, Runs, best_factor
from league_plan import BASELINES, PIXELS, Net, Protocol, held_out, network_of, training_alone
from selftask.api.objects import overrides
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources, open_data
from selftask.evaluate.features import collect
from selftask.evaluate.offline import iterate_source
from selftask.evaluate.online import evaluate_features
from selftask.models.build import build_backbone
from selftask.task import Task
from selftask.task.exported import export_backbone
from selftask.task.loop import train_loop

NORMALIZE = {"name": "normalize", "stats": "cifar10"}
CROP = {"name": "random_resized_crop", "size": 32, "scale": [0.2, 1.0], "interpolation": "bicubic"}
STRENGTHS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
COLORS = [{"name": "color_jitter", "p": 0.8, **STRENGTHS}, {"name": "grayscale", "p": 0.2}]
METHODS = (
    *("simclr", "mae", "dino", "barlow", "swav", "byol", "ibot", "moco", "rotation", "vicreg"),
    *("simsiam", "nnclr", "ijepa", "supervised", "dcl", "data2vec", "mmcr", "tico", "maskfeat"),
    *("ressl", "lejepa", "simmim", "dinov2", "deepcluster", "mocov3", "msn", "npid", "mec"),
    *("frossl", "corinfomax", "all4one", "directclr", "crossmae", "aim", "wmse", "visreg"),
    "supcon",
)
"""Methods in the order in which they run: one of each family first."""


@dataclass(frozen=True, kw_only=True)
class CifarLeague(Protocol):
    """Networks and budget; learning rates are relative to those of the ``digits`` recipes."""

    networks: dict[str, Net] = field(
        default_factory=lambda: {
            "small_resnet": Net("small ResNet", 32, {"width": 64, "stem_stride": 1}),
            "vit_micro": Net("ViT", 32, {"img_size": 32, "patch_size": 4, "depth": 6}),
        }
    )
    images: int = 10 * 50_000
    """Training images read by a run; several views of an image count once."""
    batch_size: int = 256


def settings(
    league: CifarLeague, method: str, factor: float, steps: int, seed: int
) -> tuple[str, dict[str, Any]]:
    """Return the recipe's name and the settings of a run, by dotted key."""
    recipe = f"{method}/digits"
    given = load_config(recipe, []).to_dict()
    net = league.networks[given["backbone"]["name"]]
    made: dict[str, Any] = {f"backbone.{name}": value for name, value in net.backbone.items()}
    for name, group in given["views"].items():
        items = [new for item in group["transforms"] for new in for_photographs(item)]
        made[f"views.{name}.transforms"] = items
    made["optimizer.lr"] = factor * float(given["optimizer"]["lr"])
    made |= {"train.epochs": None, "train.max_steps": steps, "train.seed": seed}
    made |= {"train.batch_size": league.batch_size, "train.log_every": 500, "train.threads": 1}
    return recipe, made | training_alone(given) | evaluation(league)


def for_photographs(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return CIFAR-10's transforms in place of one of a ``digits`` recipe.

    Crop and flip replace its affine transform, and where that is a strong one, changes of color,
    too: recipes for masked patches and weak views have weak ones.
    """
    if item["name"] == "random_affine":
        weak = item["scale"][0] > 0.8
        return [CROP, *([] if weak else COLORS), {"name": "horizontal_flip"}]
    if item["name"] == "contrast_noise":
        return []
    return [NORMALIZE if item["name"] == "normalize" else item]


def evaluation(league: CifarLeague) -> dict[str, Any]:
    """Return the settings of the evaluations."""
    return {"eval.transforms": [NORMALIZE], "eval.evaluations": league.evaluations}


def data(images: Path) -> dict[str, Any]:
    """Return the settings of images that are kept on the device."""
    made: dict[str, Any] = {"data": {"name": "array", "path": str(images)}}
    made["data"] |= {"cache": "device", "augment_on": "device", "num_workers": 0}
    made["data"]["val"] = {"name": "array", "path": str(images.with_stem(images.stem + "_test"))}
    return made


def pack(folder: Path, images: Path) -> None:
    """Write the decoded images of both splits as .npz files."""
    for split, path in (("train", images), ("test", images.with_stem(images.stem + "_test"))):
        source = open_data(load_config("simclr/digits", [f"data={folder / split}"]).data).train
        pixels = np.stack([np.asarray(source[index][0]) for index in range(len(source))])
        assert source.labels is not None
        np.savez(path, images=pixels, labels=np.asarray(source.labels))


class Runner:
    """Runs of one process.

    Args:
        league: The constants.
        images: The file of the training images.
        out: Folder of the results.
        scratch: Folder of run folders.
    """

    def __init__(self, league: CifarLeague, images: Path, out: Path, scratch: Path) -> None:
        self.league, self.data, self.out, self.scratch = league, data(images), out, scratch

    def of(self, method: str) -> Runs:
        return Runs(self.league, "cifar10", method, self.out)

    def search(self, method: str) -> float:
        """Return the best factor of the learning rate."""
        steps = self._steps(self.league.search_length)
        rated = partial(self.one, method, steps=steps, seed=self.league.search_seed, search=True)
        runs = self.of(method)
        return best_factor(
            [
                runs.run(f"search_{f:.2g}", partial(rated, f), factor=f, steps=steps)
                for f in self.league.factors
            ]
        )

    def seed(self, method: str, seed: int) -> None:
        """Run a method with all images, after its search; or a baseline on each network."""
        if method in BASELINES:
            for name in self.league.networks:
                self.of(method).run(f"{name}_{seed}", partial(self.baseline, method, name, seed))
            return
        factor, steps = self.search(method), self._steps(1.0)
        made = partial(self.one, method, factor, steps=steps, seed=seed, search=False)
        self.of(method).run(f"images_{seed}", made, factor=factor, steps=steps)

    def _steps(self, share: float) -> int:
        return round(share * self.league.images / self.league.batch_size)

    def one(
        self, method: str, factor: float, *, steps: int, seed: int, search: bool
    ) -> dict[str, Any]:
        """Train and evaluate; return the figures."""
        recipe, more = settings(self.league, method, factor, steps, seed)
        out = self.scratch / f"{method}_{time.monotonic_ns()}"
        config = load_config(recipe, overrides({**more, **self.data, "out": out}))
        sources = open_data(config.data)
        sources = held_out(sources, self.league.kept) if search else sources
        task = Task(config, sources=sources)
        train_loop(task)
        figures = rate(export_backbone(task).eval(), config, sources, task.device)
        lr = config.to_dict()["optimizer"]["lr"]
        made = {"factor": factor, "lr": lr, "seed": seed, "steps": steps}
        return {**figures, **made, "device": device_name(task.device)}

    def baseline(self, method: str, name: str, seed: int) -> dict[str, Any]:
        """Evaluate raw pixels, or a network with initial weights."""
        more = {"train.seed": seed, "backbone": self.league.backbone(name)}
        more |= {"views.main.transforms": [CROP, NORMALIZE]}
        more |= {**evaluation(self.league), **self.data}
        config = load_config("simclr/digits", overrides(more))
        torch.manual_seed(seed)
        backbone = nn.Flatten() if method == PIXELS else build_backbone(config.backbone).eval()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        figures = rate(backbone, config, open_data(config.data), device)
        return {**figures, "seed": seed, "device": device_name(device)}


def device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}"


def rate(
    backbone: nn.Module, config: Config, sources: Sources, device: torch.device
) -> dict[str, float]:
    """Return the figures of frozen features."""
    assert sources.val is not None
    known, test = (
        collect(
            iterate_source(backbone.to(device), config, source, device=device, tell=lambda _: None)
        )
        for source in (sources.train, sources.val)
    )
    figures = evaluate_features(backbone, config.eval.evaluations, known, test)
    return {name: round(float(value), 6) for name, value in figures.items()}


# -- the page ------------------------------------------------------------------------------------


def table(entries: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the table of docs/league.md: the best run of the search, and the runs of all images."""
    heads = "search: lr | linear | k-NN", "all images: linear | k-NN | 10 labels"
    yield f"\n| method | network | {' | '.join(heads)} |\n"
    yield "|---" * 8 + "|\n"
    rows = []
    for method in (name for name in METHODS if name in entries):
        runs = entries[method]["runs"]
        search = [run for name, run in runs.items() if name.startswith("search")]
        best = max(search, key=lambda run: run["knn_top1"] + run["linear_top1"])
        title = CifarLeague().networks[network_of(method)].title
        cells = [f"`{method}`", title, f"{best['lr']:.2g}"]
        cells += [f"{best[figure]:.3f}" for figure in league_page.FIGURES[:2]]
        rows.append((-best["knn_top1"], [*cells, *_figures(runs, "images")]))
    for name in (name for name in BASELINES if name in entries):
        for network, net in CifarLeague().networks.items():
            cells = _figures(entries[name]["runs"], network)
            if any(cells):
                rows.append((0.0, [name.replace("_", " "), net.title, "", "", "", *cells]))
    yield from (f"| {' | '.join(cells)} |\n" for _, cells in sorted(rows))
    runs = [run for entry in entries.values() for run in entry["runs"].values()]
    for key in ("device", "date", "commit"):
        yield f"\n{key.capitalize()}: {', '.join(sorted({run[key] for run in runs}))}.\n"
    yield "\n"


def _figures(runs: dict[str, Any], group: str) -> list[str]:
    """Return the three columns of all images; empty ones if no seed was run."""
    made = [run for name, run in runs.items() if name.startswith(f"{group}_")]
    return [league_page.shown(made, figure) if made else "" for figure in league_page.FIGURES[:3]]


# -- all runs ------------------------------------------------------------------------------------

Job = tuple[str, tuple[int, ...]]


def jobs(league: CifarLeague, methods: list[str]) -> Iterator[Job]:
    """Yield methods with their first seed, then with the others."""
    for seeds in (league.seeds[:1], league.seeds[1:]):
        for method in (*methods[:4], *BASELINES, *methods[4:]):
            yield method, seeds


def work(queue: Queue[Job], runner: Runner) -> None:
    """Run jobs until the queue is empty."""
    torch.set_num_threads(1)
    while True:
        try:
            method, seeds = queue.get(timeout=1)
        except Empty:
            return
        for seed in seeds:
            begun = time.monotonic()
            try:
                runner.seed(method, seed)
            except Exception:  # noqa: BLE001 - the other methods go on
                traceback.print_exc()
                print(f"{method}: failed", flush=True)
                break
            print(f"{method} {seed}: {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    """Run the league, or write its images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", choices=[*METHODS, []])
    parser.add_argument("--images", type=Path, help="the .npz file of --pack")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="write --images, and end")
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--seconds", type=float, help="stop all runs after this time")
    parser.add_argument("--count", type=int, help="images a run reads, for a trial")
    parser.add_argument("--out", type=Path, default=RESULTS / "cifar10")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/cifar_league"))
    parser.add_argument("--page", action="store_true", help="write docs/league.md")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is not up to date")
    options = parser.parse_args()
    if options.page or options.check:
        return league_page.update(
            "tools/cifar_league.py",
            table(league_page.read(options.out, "cifar10")),
            check=options.check,
        )
    if options.images is None:
        parser.error("--images is missing")
    if options.pack:
        pack(options.pack, options.images)
        return 0
    league = CifarLeague()
    if options.count:
        league = dataclasses.replace(league, images=options.count)
    context = multiprocessing.get_context("spawn")
    queue: Queue[Job] = context.Queue()
    for job in jobs(league, options.methods or list(METHODS)):
        queue.put(job)
    runner = Runner(league, options.images, options.out, options.scratch)
    processes = [
        context.Process(target=work, args=(queue, runner), daemon=True)
        for _ in range(options.processes)
    ]
    for process in processes:
        process.start()
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    for process in processes:
        process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()  # what it finished is written
    return 0


if __name__ == "__main__":
    sys.exit(main())
