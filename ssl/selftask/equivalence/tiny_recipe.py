"""Make any recipe tiny: a few synthetic images, a tiny network and a few steps.

Used by ``selftask check`` and tests. The method, the views and the optimizer are those of the
recipe, with smaller sizes. Tiny values are declared by their owners: ``setting(..., tiny=...)`` in
a method's ``Config``, and a method ``tiny`` of a backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from selftask.config.checks.components import component_problems, hook_problems
from selftask.config.checks.requirements import required
from selftask.config.checks.views import normalizes
from selftask.config.config_class import config_class
from selftask.config.schema import (
    DEFAULT_HOOKS,
    Component,
    Config,
    OptimizerConfig,
    ResumeConfig,
    ViewConfig,
)
from selftask.config.schema.component import BackboneComponent
from selftask.data.source import ExtraKind, Source
from selftask.errors import ConfigError
from selftask.registry import BACKBONES, METHODS

IMAGE_SIZE = 32  # pixels
STEPS_PER_EPOCH = 2  # a few steps then include the end of an epoch
EPS = 1e-3  # Adam's eps; the default 1e-8 would amplify rounding errors of zero gradients
_KINDS = 4  # number of classes


def make_tiny(config: Config, *, batch_size: int, steps: int) -> Config:
    """Return the config with everything expensive made small.

    Args:
        config: Any config. Of the values set on the command line, those of ``train.batch_size``,
            backbone, method and optimizer are kept.
        batch_size: Images per batch, unless set on the command line.
        steps: Minimum number of steps of the training.

    Raises:
        ConfigError: If the tiny config is invalid.
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
    problems = [text for _, text in (*component_problems(small), *hook_problems(small))]
    if problems:
        head = "the small version of this recipe is impossible; set what is named here by key=value"
        raise ConfigError([head, *problems])
    return small


def images_for(config: Config) -> Images:
    """Return images for ``STEPS_PER_EPOCH`` steps per epoch, plus one remaining image."""
    count = STEPS_PER_EPOCH * config.train.accumulate * config.train.batch_size + 1
    extras: dict[str, ExtraKind] = {
        image: "image" for group in config.views.values() for image in group.images if image
    }
    if "captions" in required(config.method.name):
        extras["caption"] = "text"
    if "numbers" in required(config.method.name):
        extras |= dict.fromkeys(config.method.args["targets"], "array")
    return Images(count, _channels(config), extras)


class Images(Source):
    """Noisy synthetic images of four classes, uint8 (32, 32, C); each depends on its index only.

    An extra of kind ``image`` is the image of a following index, of kind ``text`` a text with class
    and index, of kind ``array`` a float32 scalar: -1, 0 or 1.

    Args:
        count: Number of images.
        channels: Number of channels, C.
        extras: Kind of each extra, by name; see ``Source.extras``.
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
        if self.extras[name] == "array":
            return np.float32((index + [*self.extras].index(name)) % 3 - 1)
        return self[(index + 1 + [*self.extras].index(name)) % len(self)][0]

    def path(self, index: int) -> str:
        return f"synthetic image {index}"

    def describe(self) -> str:
        return f"{len(self)} synthetic images of {IMAGE_SIZE}x{IMAGE_SIZE}"


def _channels(config: Config) -> int:
    """Return the number of channels from the normalization, without opening the data."""
    every = [transform for transforms in config.pipelines.values() for transform in transforms]
    last = [transform.args for transform in every if normalizes(transform.name)]
    return next((len(args["mean"]) for args in last if args.get("mean")), 3)


def _given(config: Config, key: str) -> bool:
    """Return True if the command line sets ``key``."""
    return config.place(key).startswith("command line")


def _small_backbone(config: Config) -> BackboneComponent:
    """Return the backbone's tiny version, if it has one that takes the command line's values."""
    typed = {k: v for k, v in config.backbone.args.items() if _given(config, f"backbone.{k}")}
    backbone = BACKBONES[config.backbone.name](**config.backbone.args)
    if _given(config, "backbone.name") or not hasattr(backbone, "tiny"):
        return config.backbone
    args = backbone.tiny()
    name = args.pop("name")
    schema = config_class(BACKBONES, name)
    names = {field.name for field in fields(schema)} if schema else set()
    if not typed.keys() <= names:
        return config.backbone
    return replace(config.backbone, name=name, args={**args, **typed})


def _calm_optimizer(config: Config) -> OptimizerConfig:
    """Return the optimizer with a larger eps and no parameter groups; keep command-line values."""
    optimizer = config.optimizer
    if not _given(config, "optimizer.groups"):
        optimizer = replace(optimizer, groups=[])
    if "eps" not in optimizer.args or _given(config, "optimizer.eps"):
        return optimizer
    return replace(optimizer, args={**optimizer.args, "eps": EPS})


def _small_method(config: Config) -> Component:
    """Return the method with the ``tiny`` values of its ``Config``; keep command-line values."""
    schema = config_class(METHODS, config.method.name)
    batch = config.train.batch_size * config.train.accumulate
    args = dict(config.method.args)
    for field in fields(schema) if schema else ():
        value = field.metadata.get("tiny")
        if value is None or _given(config, f"method.{field.name}"):
            continue
        if not callable(value):
            args[field.name] = value
        elif args.get(field.name) is not None:  # a number of images that is off stays off
            args[field.name] = value(batch)
    return replace(config.method, args=args)


def _small_views(views: dict[str, ViewConfig]) -> dict[str, ViewConfig]:
    """Scale view sizes to at most 32 pixels: crops of 224 and 96 become 32 and 12."""
    pipelines = [[transform.to_dict() for transform in view.transforms] for view in views.values()]
    share = min(1.0, IMAGE_SIZE / max(_sizes(pipelines), default=IMAGE_SIZE))
    return {
        name: replace(
            view, transforms=[replace(t, args=_resized(t.args, share)) for t in view.transforms]
        )
        for name, view in views.items()
    }


def _sizes(value: Any) -> Iterator[int]:
    """Yield every ``size`` in pixels of transforms, including nested ones."""
    if isinstance(value, dict):
        if isinstance(value.get("size"), int):
            yield value["size"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _sizes(item)


def _resized(value: Any, share: float) -> Any:
    """Return ``value`` with every ``size`` scaled to a multiple of 4, at least 8.

    With ``share`` 1, nothing changes.
    """
    if share == 1.0:
        return value
    if isinstance(value, dict):
        small = {key: _resized(item, share) for key, item in value.items()}
        if isinstance(value.get("size"), int):
            small["size"] = max(8, 4 * int(value["size"] * share / 4))
        return small
    return [_resized(item, share) for item in value] if isinstance(value, list) else value
