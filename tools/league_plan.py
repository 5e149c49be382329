"""The constants of the leagues, and the settings of one run; see tools/league.py.

``LEAGUES`` is the one place of all budgets. A network is one of ``League.networks``: a method uses
the one of the kind that its digits recipe has.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar

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
"""Budgets of ``League`` that every method has, in the order of the runs."""
LONG = "long"
"""Budget of the runs that ``--long`` adds."""
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
LEFT_OUT = ("cmc", "igpt")
"""Methods that do not fit: two networks for lightness and color, and a token for each pixel."""
OF_PHOTOGRAPHS = (
    *("simclr", "mae", "dino", "barlow", "swav", "byol", "ijepa", "moco", "vicreg", "rotation"),
    *("simsiam", "ibot", "nnclr", "supervised", "mmcr", "data2vec", "deepcluster", "tico"),
    *("lejepa", "npid", "simmim", "dinov2", "ressl", "maskfeat", "frossl", "wmse"),
)
"""Methods that train on photographs: one of each family first."""
# Distortions of configs/base/digits.yaml, digits_gentle.yaml and digits_masked.yaml. A recipe's own
# ones, such as the weak views of ressl, stay.
AFFINE = ([45.0, 0.25], [20.0, 0.12], [25.0, 0.08])
NOISE = ([[0.35, 1.0], 0.05], [[0.5, 1.0], 0.05], [[1.0, 1.0], 0.1])
CROP = {"name": "random_resized_crop", "size": 32, "scale": [0.2, 1.0], "interpolation": "bicubic"}
STRENGTHS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
COLORS = ({"name": "color_jitter", "p": 0.8, **STRENGTHS}, {"name": "grayscale", "p": 0.2})
FLIP = {"name": "horizontal_flip"}


@dataclass(frozen=True)
class Net:
    """A backbone, and the size in pixels of the images that it sees."""

    title: str
    size: int
    backbone: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class League:
    """Data, networks, search, budgets and seeds. Runs of other constants are made again."""

    measured: ClassVar[float] = 1.0
    """Share of the training images with which the cost of a method is measured."""

    title: str
    networks: dict[str, Net]
    nuisance: tuple[dict[str, Any], ...]
    """Transforms of the images of evaluations."""
    images: int
    """First budget: number of training images read; several views of an image count once."""
    cost: int
    """Second budget: images of ``supervised`` on the same network that need the same CPU time."""
    long: dict[str, int] = field(default_factory=dict)
    """By network: like ``cost``, for long runs with the learning rate of the search."""
    factors: tuple[float, ...] = (1 / 3, 1.0, 3.0)
    """The search: learning rates relative to that of the recipe."""
    search_length: float = 1 / 2
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

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods in the order in which they are run."""
        taught = [*TEACHERS, *TWO_TEACHERS]
        apart = {*FIRST, *taught, *LEFT_OUT}
        others = [name for name in METHODS.names() if name not in apart]
        last = sorted(taught, key=lambda name: (name == "beit", name))  # its teacher is taught, too
        return (*FIRST, *others, *last)

    @property
    def measured_views(self) -> list[dict[str, Any]]:
        """Transforms of the views with which :class:`ViewMeasures` compares features."""
        return list(self.nuisance)

    def backbone(self, name: str) -> dict[str, Any]:
        """Return the ``backbone`` section of a network without weights of a method."""
        made = {"name": name, **self.networks[name].backbone}
        return {**made, "pool": "avg"} if name.startswith("vit") else made

    def data(self, net: Net) -> dict[str, Any]:
        """Return the settings of the images for a network."""
        return {"data.size": net.size, "data.val.size": net.size, "data.num_workers": 0}

    def transforms(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the league's transforms in place of one of a recipe."""
        affine, noise, normalize = self.nuisance
        if item["name"] == "normalize":
            return [normalize]
        if item["name"] == "random_affine" and [item["degrees"], item["translate"]] in AFFINE:
            return [affine]
        if item["name"] == "contrast_noise" and [item["contrast"], item["noise"]] in NOISE:
            return [noise]
        return [item]


class Photographs(League):
    """CIFAR-10 as JPEG files, in ``data/cifar10/train`` and ``test``."""

    measured: ClassVar[float] = 0.04

    @property
    def methods(self) -> tuple[str, ...]:
        return OF_PHOTOGRAPHS

    @property
    def measured_views(self) -> list[dict[str, Any]]:
        return [CROP, *COLORS, FLIP, *self.nuisance]

    def data(self, net: Net) -> dict[str, Any]:
        folder = {"name": "folder", "path": "data/cifar10/train", "cache": "ram"}
        val = {"name": "folder", "path": "data/cifar10/test"}
        return {"data": {**folder, "num_workers": 0, "val": val}}

    def transforms(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return crop and flip in place of an affine transform.

        Where that is a strong one, also changes of color: masked patches and weak views have weak
        ones.
        """
        if item["name"] == "random_affine":
            weak = item["scale"][0] > 0.8
            return [CROP, *([] if weak else COLORS), FLIP]
        if item["name"] == "contrast_noise":
            return []
        return [*self.nuisance] if item["name"] == "normalize" else [item]


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
        images=18 * 1347,
        cost=80_000,
    ),
    "cifar10": Photographs(
        title="CIFAR-10",
        nuisance=({"name": "normalize", "stats": "cifar10"},),
        networks={
            "small_resnet": Net("small ResNet", 32, {"width": 32, "stem_stride": 2}),
            "vit_micro": Net("ViT", 32, {"img_size": 32, "patch_size": 4, "depth": 3}),
        },
        images=50_000,
        cost=300_000,
        long={"small_resnet": 2_250_000},  # the ViT needs the same time for ``cost``
    ),
}


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


def measured(sources: Sources, share: float) -> Sources:
    """Return the part of the training images with which a cost is measured."""
    return Sources(Subset(sources.train, Part(fraction=share)), None)


@cache
def network_of(method: str) -> str:
    """Return the name of the network that a method uses."""
    return str(load_config(f"{method}/digits", []).backbone.name)


def group_of(method: str) -> str:
    """Return ``labels``, ``teacher`` or the name of the network."""
    if method in LABELED:
        return "labels"
    return "teacher" if method in TEACHERS or method in TWO_TEACHERS else network_of(method)


def order(league: League) -> list[str]:
    """Return baselines and methods in the order in which they are run."""
    return [*BASELINES, *league.methods]


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
    made |= league.data(net)
    for name, group in given["views"].items():
        items = [new for item in group["transforms"] for new in league.transforms(item)]
        made[f"views.{name}.transforms"] = items
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
    made |= {**league.data(net), "train.batch_size": batch}
    return recipe, made


def training_alone(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings without checkpoints, evaluations and test phases, for a recipe's values."""
    hooks = ("checkpoint", "export", "preemption", "progress", "evaluation", "train_meters")
    off = [f"hooks.{name}" for name in hooks] + [f"meters.{name}" for name in given["meters"]]
    return dict.fromkeys(off)


def evaluation(league: League) -> dict[str, Any]:
    """Return the settings of the evaluations."""
    return {"eval.transforms": list(league.nuisance), "eval.evaluations": league.evaluations}


def batch_size(config: Config) -> int:
    """Return the number of images that a step reads."""
    return config.train.batch_size * config.train.accumulate


# -- what is there of a method ---------------------------------------------------------------------


def budget(league: League) -> dict[str, Any]:
    """Return the constants of a league as JSON has them."""
    made: dict[str, Any] = json.loads(json.dumps(asdict(league)))
    return made


def protocol(budget: dict[str, Any]) -> dict[str, Any]:
    """Return the constants without the lengths of runs, since each run has its steps."""
    return {name: value for name, value in budget.items() if name not in (*BUDGETS, LONG)}


def lengths(league: League, cost: dict[str, Any], network: str = "") -> dict[str, int]:
    """Return the number of steps of each budget.

    Args:
        league: The league.
        cost: The measured cost of a method.
        network: Name of its network, for the length of long runs.
    """
    images = {"images": league.images, "cost": round(league.cost / cost["relative"])}
    if network in league.long:
        images[LONG] = round(league.long[network] / cost["relative"])
    return {name: -(-count // cost["batch_size"]) for name, count in images.items()}


def is_done(entry: dict[str, Any], league: League) -> bool:
    """Return True if a method has all runs of both budgets, with the settings of the league."""
    made = entry["runs"]
    if protocol(entry["budget"]) != protocol(budget(league)) or "relative_cost" not in made:
        return False
    steps = lengths(league, made["relative_cost"])
    keys = [(name, f"{name}_{seed}") for name in BUDGETS for seed in league.seeds]
    return all(made.get(key, {}).get("steps") == steps[name] for name, key in keys)


def long_runs(entry: dict[str, Any], league: League, network: str) -> list[dict[str, Any]]:
    """Return the long runs of a finished method that have the length of the league."""
    made = [entry["runs"].get(f"{LONG}_{seed}") for seed in league.seeds]
    steps = lengths(league, entry["runs"]["relative_cost"], network).get(LONG)
    return [run for run in made if run is not None and run["steps"] == steps]
