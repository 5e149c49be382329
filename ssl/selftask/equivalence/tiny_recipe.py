"""Any recipe made tiny: a few images held in memory, a tiny network, a handful of steps.

For ``selftask check`` and for tests. Views, options of the method and the optimizer stay, and so
does what the command line sets. The tiny values are declared by those that they belong to: fields
of a method's ``Config`` by ``setting(..., tiny=...)``, backbones by a method ``tiny``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from selftask.config.checks.components import component_problems
from selftask.config.checks.requirements import required
from selftask.config.config_class import config_class
from selftask.config.schema import (
    DEFAULT_HOOKS,
    Component,
    Config,
    OptimizerConfig,
    ResumeConfig,
    ViewConfig,
)
from selftask.data.source import ExtraKind, Source
from selftask.errors import ConfigError
from selftask.registry import BACKBONES, METHODS, TRANSFORMS

IMAGE_SIZE = 32  # pixels
STEPS_PER_EPOCH = 2  # so that a few steps see the end of an epoch
EPS = 1e-3  # of Adam: with its own 1e-8 a zero gradient's rounding becomes an update of its own
_KINDS = 4  # of images: what supervised training has to tell apart


def make_tiny(config: Config, *, batch_size: int, steps: int) -> Config:
    """Return the config with all that costs time made small.

    Args:
        config: Any config; what its command line sets stays.
        batch_size: Images a batch, unless the command line gives another.
        steps: What training is made long enough for.

    Raises:
        ConfigError: If the method cannot be that small.
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
            epochs=-(-steps // STEPS_PER_EPOCH),
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
    problems = [text for _, text in component_problems(small)]
    if problems:
        head = "the small version of this recipe is impossible; set what is named here by key=value"
        raise ConfigError([head, *problems])
    return small


def images_for(config: Config) -> Images:
    """So many that an epoch has ``STEPS_PER_EPOCH`` steps, and one image is left over."""
    count = STEPS_PER_EPOCH * config.train.accumulate * config.train.batch_size + 1
    extras: dict[str, ExtraKind] = {
        group.image: "image" for group in config.views.values() if group.image is not None
    }
    if "captions" in required(config.method.name):
        extras["caption"] = "text"
    return Images(count, _channels(config), extras)


class Images(Source):
    """Noisy images of four kinds, each a function of its number alone.

    Further images of a sample are those of the next numbers; captions name kind and number.
    """

    def __init__(
        self, count: int, channels: int = 3, extras: Mapping[str, ExtraKind] | None = None
    ) -> None:
        self.channels = channels
        self.labels = np.arange(count, dtype=np.int64) % _KINDS
        self.extras = extras or {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        kind = int(self.labels[index])
        coarse = np.random.default_rng(kind).integers(0, 156, (4, 4, self.channels))
        size = IMAGE_SIZE, IMAGE_SIZE, self.channels
        noise = np.random.default_rng(_KINDS + index).integers(0, 100, size)
        enlarged = np.kron(coarse, np.ones((IMAGE_SIZE // 4, IMAGE_SIZE // 4, 1), dtype=np.int64))
        return (enlarged + noise).astype(np.uint8), kind

    def extra(self, index: int, name: str) -> Any:
        if self.extras[name] == "text":
            return f"kind {self.labels[index]}, number {index}"
        return self[(index + 1 + [*self.extras].index(name)) % len(self)][0]

    def path(self, index: int) -> str:
        return f"synthetic image {index}"

    def describe(self) -> str:
        return f"{len(self)} synthetic images of {IMAGE_SIZE}x{IMAGE_SIZE}"


def _channels(config: Config) -> int:
    """Number of channels of the means that are subtracted; the data are not opened."""
    lists = [*(view.transforms for view in config.views.values()), config.eval.transforms]
    every = [transform for transforms in lists for transform in transforms]
    last = [t.args for t in every if TRANSFORMS.declared(t.name, "normalizes", False)]
    return next((len(args["mean"]) for args in last if args.get("mean")), 3)


def _given(config: Config, key: str) -> bool:
    """Whether the command line sets ``key``."""
    return config.place(key).startswith("command line")


def _small_backbone(config: Config) -> Component:
    """The tiny network that the backbone names, unless the command line names the backbone."""
    given = {k: v for k, v in config.backbone.args.items() if _given(config, f"backbone.{k}")}
    backbone = BACKBONES[config.backbone.name](**config.backbone.args)
    if _given(config, "backbone.name") or not hasattr(backbone, "tiny"):
        return config.backbone
    args = backbone.tiny()
    name = args.pop("name")
    schema = config_class(BACKBONES, name)
    known = {field.name for field in fields(schema)} if schema else set()
    if not given.keys() <= known:
        return config.backbone
    return Component(name=name, args={**args, **given})


def _calm_optimizer(config: Config) -> OptimizerConfig:
    args = config.optimizer.args
    if "eps" not in args or _given(config, "optimizer.eps"):
        return config.optimizer
    return replace(config.optimizer, args={**args, "eps": EPS})


def _small_method(config: Config) -> Component:
    """The method with the ``tiny`` values that the fields of its ``Config`` declare."""
    schema = config_class(METHODS, config.method.name)
    batch = config.train.batch_size * config.train.accumulate
    args = dict(config.method.args)
    for field in fields(schema) if schema else ():
        value = field.metadata.get("tiny")
        if value is not None and not _given(config, f"method.{field.name}"):
            args[field.name] = value(batch) if callable(value) else value
    return replace(config.method, args=args)


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
