"""The constants of the leagues, and the settings of one run; see tools/league.py.

``LEAGUES`` is the one place of all budgets. A network is one of ``League.networks``: a method uses
the one of the kind that its digits recipe has.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np

from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.subset import Part, Subset
from selftask.registry import METHODS

PIXELS, UNTRAINED = "raw_pixels", "untrained"
BASELINES = (PIXELS, UNTRAINED)
REFERENCE = "supervised"
"""The method whose images are the unit of cost."""
BUDGETS = ("images", "cost")
"""Numbers of ``League`` that end a run, in the order of the runs."""
LABELED = ("supervised", "supcon", "multilabel", "clip", "siglip")
TEACHERS = {  # option of the method, and the method of the league that is its teacher
    "beit": ("tokenizer", "vqkd"),
    "compress": ("teacher", "simclr"),
    "distill_features": ("teacher", "simclr"),
    "distill_logits": ("teacher", "supervised"),
    "distill_prototypes": ("teacher", "dinov2"),
    "eva": ("teacher", "data2vec2"),
    "milan": ("teacher", "data2vec2"),
    "salt": ("teacher", "mae"),
    "seed": ("teacher", "simclr"),
    "vqkd": ("teacher", "data2vec2"),
}
TWO_TEACHERS = {"unic": {"first": "data2vec2", "second": "dinov2"}}
FIRST = ("simclr", "mae", "dino", "barlow", "swav", "byol", "ibot", "moco", "simmim", "rotation")
"""Methods of different families, which ``--next`` runs first."""
LEFT_OUT = {
    "cmc": "its two networks see lightness and color, and the images are gray",
    "igpt": "its transformer has a token for each pixel",
}


@dataclass(frozen=True)
class Net:
    """A backbone, and the size in pixels of the images that it sees."""

    title: str
    size: int
    backbone: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Networks, search and seeds of a league."""

    networks: dict[str, Net] = field(default_factory=dict)
    factors: tuple[float, ...] = (1 / 3, 1.0, 3.0)
    """The search: learning rates relative to that of the recipe."""
    search_length: float = 1 / 3
    """Length of the runs of the search, relative to a run of all images."""
    search_seed: int = 0
    seeds: tuple[int, ...] = (1, 2, 3)
    kept: float = 0.8
    """Share of the training images that the runs of the search train on. The others rate them."""
    repeats: int = 3
    """Draws of 10 labels per class."""

    @property
    def evaluations(self) -> dict[str, Any]:
        """Evaluations of every run."""
        few = {"few_labels": [10], "repeats": self.repeats}
        return {"knn": {}, "linear": few, "spectrum": {}}

    def backbone(self, name: str) -> dict[str, Any]:
        """Return the ``backbone`` section of a network without weights of a method."""
        made = {"name": name, **self.networks[name].backbone}
        return {**made, "pool": "avg"} if name.startswith("vit") else made


@dataclass(frozen=True, kw_only=True)
class League(Protocol):
    """Data and budget of a league on a CPU."""

    title: str
    nuisance: tuple[dict[str, Any], ...]
    """Transforms of all images, in training and evaluation."""
    images: int = 18 * 1347
    """First budget: number of training images read; several views of an image count once."""
    cost: int = 80_000
    """Second budget: images of ``supervised`` on the same network that need the same CPU time."""
    search_length: float = 1 / 2


LEAGUES = {
    "digits": League(
        title="Distorted digits",
        nuisance=(
            {"name": "random_affine", "degrees": 20, "scale": [0.7, 1.1], "translate": 0.12},
            {"name": "contrast_noise", "contrast": [0.5, 1.0], "noise": 0.05},
            {"name": "normalize", "stats": "half"},
        ),
        networks={
            "small_resnet": Net("small ResNet", 32, {"width": 32, "stem_stride": 2}),
            "vit_micro": Net("ViT", 16, {"img_size": 16, "patch_size": 4, "depth": 3}),
        },
    )
}
# Distortions of configs/base/digits.yaml, digits_gentle.yaml and digits_masked.yaml. A recipe's own
# ones, such as the weak views of ressl, stay.
AFFINE = ([45.0, 0.25], [20.0, 0.12], [25.0, 0.08])
NOISE = ([[0.35, 1.0], 0.05], [[0.5, 1.0], 0.05], [[1.0, 1.0], 0.1])


class Remaining(Subset):
    """The images that are not in a subset."""

    def __init__(self, subset: Subset) -> None:
        super().__init__(subset.source, subset.part)
        self.rows = np.setdiff1d(np.arange(len(subset.source)), subset.rows)
        labels = subset.source.labels
        self.labels = None if labels is None else labels[self.rows]


def held_out(sources: Sources, kept: float) -> Sources:
    """Return two parts of the training images, to train and to rate; test images are not used."""
    part = Subset(sources.train, Part(fraction=kept))
    return Sources(part, Remaining(part))


@cache
def network_of(method: str) -> str:
    """Return the name of the network that a method uses."""
    return str(load_config(f"{method}/digits", []).backbone.name)


def group_of(method: str) -> str:
    """Return ``labels``, ``teacher`` or the name of the network."""
    if method in LABELED:
        return "labels"
    return "teacher" if method in TEACHERS or method in TWO_TEACHERS else network_of(method)


def order() -> list[str]:
    """Return baselines and methods in the order in which they are run."""
    taught = [*TEACHERS, *TWO_TEACHERS]
    apart = {*FIRST, *taught, *LEFT_OUT}
    others = [name for name in METHODS.names() if name not in apart]
    last = sorted(taught, key=lambda name: (name == "beit", name))  # its teacher is taught, too
    return [*BASELINES, *FIRST, *others, *last]


def settings(
    league: League, method: str, factor: float, steps: int, seed: int
) -> tuple[str, dict[str, Any]]:
    """Return the recipe's name and the settings of a run, by dotted key.

    Args:
        league: The league.
        method: Name of the method.
        factor: Learning rate relative to that of the recipe.
        steps: Number of steps; schedules end with it.
        seed: Seed of weights, order of images, augmentations and test images.
    """
    recipe = f"{method}/digits"
    given = load_config(recipe, []).to_dict()
    net = league.networks[given["backbone"]["name"]]
    made: dict[str, Any] = {f"backbone.{name}": value for name, value in net.backbone.items()}
    made |= {"data.size": net.size, "data.val.size": net.size, "data.num_workers": 0}
    for name, group in given["views"].items():
        made[f"views.{name}.transforms"] = [_shared(league, item) for item in group["transforms"]]
    made["optimizer.lr"] = factor * float(given["optimizer"]["lr"])
    made |= {"train.epochs": None, "train.max_steps": steps, "train.seed": seed}
    made |= {"train.threads": 1, "train.device": "cpu"}
    return recipe, made | training_alone(given) | evaluation(league)


def reference_settings(
    league: League, network: str, steps: int, batch: int
) -> tuple[str, dict[str, Any]]:
    """Return recipe and settings of a run of ``supervised`` on a network; see :func:`settings`."""
    recipe, made = settings(league, REFERENCE, 1.0, steps, league.search_seed)
    net = league.networks[network]
    made = {key: value for key, value in made.items() if not key.startswith("backbone.")}
    made |= {"backbone": {"name": network, **net.backbone}}
    made |= {"data.size": net.size, "data.val.size": net.size, "train.batch_size": batch}
    return recipe, made


def training_alone(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings without checkpoints, evaluations and test phases, for a recipe's values."""
    hooks = ("checkpoint", "export", "preemption", "progress", "evaluation", "train_meters")
    off = [f"hooks.{name}" for name in hooks] + [f"meters.{name}" for name in given["meters"]]
    return dict.fromkeys(off)


def evaluation(league: League) -> dict[str, Any]:
    """Return the settings of the evaluations."""
    return {"eval.transforms": list(league.nuisance), "eval.evaluations": league.evaluations}


def _shared(league: League, item: dict[str, Any]) -> dict[str, Any]:
    """Return the league's transform in place of one of the base recipes; else the recipe's."""
    affine, noise, normalize = league.nuisance
    if item["name"] == "normalize":
        return normalize
    if item["name"] == "random_affine" and [item["degrees"], item["translate"]] in AFFINE:
        return affine
    if item["name"] == "contrast_noise" and [item["contrast"], item["noise"]] in NOISE:
        return noise
    return item


def batch_size(config: Config) -> int:
    """Return the number of images that a step reads."""
    return config.train.batch_size * config.train.accumulate


# -- what is there of a method ---------------------------------------------------------------------


def budget(league: Any) -> dict[str, Any]:
    """Return the constants of a league as JSON has them."""
    made: dict[str, Any] = json.loads(json.dumps(asdict(league)))
    return made


def protocol(budget: dict[str, Any]) -> dict[str, Any]:
    """Return the constants without the lengths of runs, since each run has its steps."""
    return {name: value for name, value in budget.items() if name not in BUDGETS}


def lengths(league: League, cost: dict[str, Any]) -> dict[str, int]:
    """Return the number of steps of each budget, given the measured cost of a method."""
    images = {"images": league.images, "cost": round(league.cost / cost["relative"])}
    return {name: -(-count // cost["batch_size"]) for name, count in images.items()}


def is_done(entry: dict[str, Any], league: League) -> bool:
    """Return True if a method has all runs of both budgets, with the settings of the league."""
    made = entry["runs"]
    if protocol(entry["budget"]) != protocol(budget(league)) or "relative_cost" not in made:
        return False
    steps = lengths(league, made["relative_cost"])
    keys = [(name, f"{name}_{seed}") for name in BUDGETS for seed in league.seeds]
    return all(made.get(key, {}).get("steps") == steps[name] for name, key in keys)
