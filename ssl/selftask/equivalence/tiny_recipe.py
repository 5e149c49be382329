"""Any recipe made small: a few images held in memory, a tiny network, a handful of steps.

What the method is stays: its views, its options, its optimizer. Whatever the command line says
stays too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from selftask.config.config_class import config_class
from selftask.config.schema import (
    DEFAULT_HOOKS,
    Component,
    Config,
    OptimizerConfig,
    ResumeConfig,
    ViewConfig,
)
from selftask.config.sections import own_problems
from selftask.data.source import Source
from selftask.errors import ConfigError
from selftask.registry import BACKBONES, METHODS

IMAGE_SIZE = 32  # pixels
UPDATES_PER_EPOCH = 2  # so that a few steps see the end of an epoch
EPS = 1e-3  # of Adam: with its own 1e-8 a zero gradient's rounding becomes an update of its own
_KINDS = 4  # of images: what supervised training has to tell apart
_VIT = {"img_size": IMAGE_SIZE, "patch_size": 4, "depth": 2}
_VIT_CHOICES = ("pool", "class_token", "drop_path", "dynamic_img_size")  # which stay as they are
_NETS = ("small_resnet", "resnet", "torchvision", "timm")
_SMALL = {
    "out_dim": 16,
    "hidden_dim": 32,
    "bottleneck": 16,
    "queue_start": 1,
    "decoder_dim": 16,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "predictor_dim": 16,
    "predictor_depth": 1,
    "predictor_heads": 2,
}  # fields that several methods have, and what costs little and still does everything


def miniature(config: Config, *, batch_size: int, steps: int) -> Config:
    """The config with all that costs time made small; ``batch_size`` unless the user gave one.

    Raises ConfigError if the method cannot be what it then would have to be.
    """
    if not _given(config, "train.batch_size"):
        config = replace(config, train=replace(config.train, batch_size=batch_size))
    small = replace(
        config,
        data=replace(config.data, val=None, num_workers=0),
        views=_small_views(config.views),
        backbone=_small_backbone(config),
        method=_small_method(config),
        train=replace(
            config.train,
            epochs=-(-steps // UPDATES_PER_EPOCH),
            max_steps=None,
            precision="float32",
            compile=False,
            log_every=1,
            device="cpu",
            threads=1,
            stop_at=None,
        ),
        optimizer=_calm_optimizer(config),
        hooks={key: hook for key, hook in config.hooks.items() if key not in DEFAULT_HOOKS},
        eval=replace(config.eval, evaluations={}),
        init=replace(config.init, backbone=None),
        resume=ResumeConfig(),
    )
    problems = [text for _, text in own_problems(small)]
    if problems:
        head = "the small version of this recipe is impossible; set what is named here by key=value"
        raise ConfigError([head, *problems])
    return small


def images_for(config: Config) -> Images:
    """So many that an epoch has ``UPDATES_PER_EPOCH`` updates, and one image is left over."""
    count = UPDATES_PER_EPOCH * config.train.accumulate * config.train.batch_size + 1
    return Images(count, _channels(config))


class Images(Source):
    """Noisy images of four kinds, each a function of its number alone."""

    def __init__(self, count: int, channels: int = 3) -> None:
        self.channels = channels
        self.labels = np.arange(count, dtype=np.int64) % _KINDS

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        kind = int(self.labels[index])
        coarse = np.random.default_rng(kind).integers(0, 156, (4, 4, self.channels))
        size = IMAGE_SIZE, IMAGE_SIZE, self.channels
        noise = np.random.default_rng(_KINDS + index).integers(0, 100, size)
        enlarged = np.kron(coarse, np.ones((IMAGE_SIZE // 4, IMAGE_SIZE // 4, 1), dtype=np.int64))
        return (enlarged + noise).astype(np.uint8), kind

    def path(self, index: int) -> str:
        return f"synthetic image {index}"

    def describe(self) -> str:
        return f"{len(self)} synthetic images of {IMAGE_SIZE}x{IMAGE_SIZE}"


def _channels(config: Config) -> int:
    """As many as the means to subtract are for: the data themselves are not opened."""
    lists = [*(view.transforms for view in config.views.values()), config.eval.transforms]
    args = [one.args for transforms in lists for one in transforms if one.name == "normalize"]
    return next((len(given["mean"]) for given in args if given.get("mean")), 3)


def _given(config: Config, key: str) -> bool:
    """Whether the command line says what ``key`` is."""
    return config.place(key).startswith("command line")


def _small_backbone(config: Config) -> Component:
    """A tiny network of the same sort; the user's own stays, and so does one that was asked for."""
    name, args = config.backbone.name, config.backbone.args
    given = {key: value for key, value in args.items() if _given(config, f"backbone.{key}")}
    if name.startswith("vit_") or "vit" in str(args.get("model", "")):
        kept = {key: args[key] for key in _VIT_CHOICES if key in args}
        if "drop_path_rate" in args.get("args", {}):  # timm's word for it
            kept["drop_path"] = args["args"]["drop_path_rate"]
        small = Component(name="vit_micro", args={**_VIT, **kept, **given})
    elif name.startswith(_NETS):
        small = Component(name="small_resnet", args={"width": 8, **given})
    else:
        return config.backbone
    schema = config_class(BACKBONES, small.name)
    known = {field.name for field in fields(schema)} if schema else set()
    asked_for = _given(config, "backbone.name") or not given.keys() <= known
    return config.backbone if asked_for else small


def _calm_optimizer(config: Config) -> OptimizerConfig:
    args = config.optimizer.args
    if "eps" not in args or _given(config, "optimizer.eps"):
        return config.optimizer
    return replace(config.optimizer, args={**args, "eps": EPS})


def _small_method(config: Config) -> Component:
    schema = config_class(METHODS, config.method.name)
    args = dict(config.method.args)
    for name, value in _small_fields(config, args):
        if not _given(config, f"method.{name}"):
            args[name] = value
    return Component(name=config.method.name, args=args) if schema else config.method


def _small_fields(config: Config, args: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in _SMALL.items() if name in args)
    if "queue_size" in args:  # in use, and overwritten within a few steps
        yield "queue_size", 2 * config.train.batch_size * config.train.accumulate
    if isinstance(args.get("num_prototypes"), int):
        yield "num_prototypes", 12
    elif "num_prototypes" in args:
        yield "num_prototypes", [max(2, 6 - i) for i, _ in enumerate(args["num_prototypes"])]


def _small_views(views: dict[str, ViewConfig]) -> dict[str, ViewConfig]:
    """Sizes of at most 32 pixels in the same proportions: crops of 224 and 96 become 32 and 12."""
    pipelines = [[transform.to_dict() for transform in view.transforms] for view in views.values()]
    share = min(1.0, IMAGE_SIZE / max(_sizes(pipelines), default=IMAGE_SIZE))
    return {
        name: replace(
            view,
            transforms=[replace(t, args=_resized(t.args, share)) for t in view.transforms],
        )
        for name, view in views.items()
    }


def _sizes(value: Any) -> Iterator[int]:
    """Every ``size`` in pixels of transforms, and of those within them."""
    if isinstance(value, dict):
        if isinstance(value.get("size"), int):
            yield value["size"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _sizes(item)


def _resized(value: Any, share: float) -> Any:
    """The same with every ``size`` smaller, in whole patches."""
    if share == 1.0:
        return value
    if isinstance(value, dict):
        small = {key: _resized(item, share) for key, item in value.items()}
        if isinstance(value.get("size"), int):
            small["size"] = max(8, 4 * int(value["size"] * share / 4))
        return small
    return [_resized(item, share) for item in value] if isinstance(value, list) else value
