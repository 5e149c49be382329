"""``image_size=96``: one key for the sizes of views, evaluation and a vision transformer's grid.

This is a short form, as ``data=DIR`` is. It sets several keys, and the resolved config has only
those.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from selftask.config.checks.grid import keeps_size, multiples, patch_size, resizes, title
from selftask.config.compose.provenance import Layers
from selftask.config.keys import Key, dotted
from selftask.config.schema import Component, Config, DataConfig, ViewConfig
from selftask.registry import BACKBONES, SOURCES

KEY: Key = ("image_size",)
Problem = tuple[Key, str]

C = TypeVar("C", bound=Component)


class _Setter:
    """Decide by the order of layers which values ``image_size`` overrides.

    Attributes:
        places: Origins of all values, to which those of the overridden ones are added.
        problems: Key and text of each value that is set by the same layer as ``image_size``.
    """

    def __init__(self, layers: Layers, places: dict[str, str]) -> None:
        self.layers, self.places = layers, places
        self.problems: list[Problem] = []

    def may_set(self, keys: list[Key]) -> bool:
        """Return whether ``image_size`` overrides the values at ``keys``."""
        depths, limit = [self._depth(key) for key in keys], self._depth(KEY)
        for key, depth in zip(keys, depths, strict=True):
            if depth == limit:
                text = f"{dotted(key)} and image_size set the same size differently; leave one out"
                self.problems.append((key, text))
        if max(depths) >= limit:
            return False
        origin = self.layers.place(KEY) or "image_size"
        self.places.update({dotted(key): origin for key in keys})
        return True

    def _depth(self, key: Key) -> int:
        """Return the index of the layer that sets ``key``, or -1."""
        sets = [layer.holds(key) or layer.replaces(key) for layer in self.layers]
        return max((index for index, is_set in enumerate(sets) if is_set), default=-1)


def with_image_size(config: Config, size: int, layers: Layers) -> tuple[Config, list[Problem]]:
    """Return ``config`` with all its image sizes set for images of ``size`` pixels.

    The largest views get ``size``. Smaller views (multi-crop) and a resize before a crop keep their
    ratio to it. A size that a later layer than ``image_size`` sets is kept, such as one of the
    command line over one of the recipe. A different size set by the same layer is a problem.

    Args:
        config: The config.
        size: Height and width of the images in pixels.
        layers: Layers of the config, which tell where each value was set.

    Returns:
        The config, and key and text of each problem.
    """
    if text := undivided(config.backbone, size):
        return config, [(KEY, text)]
    setter = _Setter(layers, config.places)
    patch = patch_size(config.backbone)
    data = _with_drawn_size(config.data, size, setter)
    views, drawn = _resized_views(config, size, patch, setter), data is not config.data
    key = ("eval", "transforms")
    before = config.eval.transforms
    after = before if drawn and nominal_size(before) is None else resized_pipeline(before, size)
    evaluation = replace(config.eval, transforms=_chosen(before, after, key, setter))
    backbone = resized_backbone(config.backbone, size)
    if backbone != config.backbone:
        places: list[Key] = [("backbone", "args", "img_size"), ("backbone", "args", "image_size")]
        if "patch_size" in backbone.args:
            places = [("backbone", "img_size")]
        backbone = backbone if setter.may_set(places) else config.backbone
    config = replace(config, data=data, views=views, eval=evaluation, backbone=backbone)
    return config, setter.problems


def _with_drawn_size(data: DataConfig, size: int, setter: _Setter) -> DataConfig:
    """Return the data with ``size`` set for built-in sources with a ``size`` key (digits)."""
    if not _has_size(data.source) or not setter.may_set([("data", "size")]):
        return data

    def resized(source: Component, key: Key) -> Component:
        if not (_has_size(source) and setter.may_set([(*key, "size")])):
            return source
        return replace(source, args={**source.args, "size": size})

    sets = {k: resized(c, ("data", "val_sets", k)) for k, c in data.val_sets.items()}
    val = None if data.val is None else resized(data.val, ("data", "val"))
    source = replace(data.source, args={**data.source.args, "size": size})
    return replace(data, source=source, val=val, val_sets=sets)


def _resized_views(
    config: Config, size: int, patch: int | None, setter: _Setter
) -> dict[str, ViewConfig]:
    """Return all groups of views resized; add a problem for a group without a known size."""
    sizes = {name: nominal_size(group.transforms) for name, group in config.views.items()}
    largest = max((side for side in sizes.values() if side is not None), default=0)
    views = dict(config.views)
    for name, group in config.views.items():
        key, side = ("views", name, "transforms"), sizes[name]
        if side is None:
            if not _has_size(config.data.source):
                text = f"image_size: {dotted(key)} has no crop or resize whose size it could set"
                setter.problems.append((KEY, text))
            continue
        share = size if side == largest else _rounded(side * size / largest, patch)
        after = resized_pipeline(group.transforms, share)
        views[name] = replace(group, transforms=_chosen(group.transforms, after, key, setter))
    return views


def _chosen(
    before: list[Component], after: list[Component], key: Key, setter: _Setter
) -> list[Component]:
    """Return ``after``, or ``before`` if one of its sizes was set explicitly."""
    if after == before:
        return before
    changed = [
        (*key, str(index), "size")
        for index, (old, new) in enumerate(zip(before, after, strict=False))
        if old.args.get("size") != new.args.get("size")
    ]
    return after if setter.may_set(changed if len(before) == len(after) else [key]) else before


def undivided(backbone: Component, size: int) -> str | None:
    """Return a problem if ``size`` is not a multiple of the patch size, else None."""
    patch = patch_size(backbone)
    if not patch or size % patch == 0:
        return None
    return (
        f"image_size={size} cannot be divided into the patches of {patch} pixels of "
        f"{title(backbone)}; {multiples(size, patch)}"
    )


def resized_backbone(backbone: C, size: int) -> C:
    """Return the backbone for images of ``size`` pixels, unchanged if it accepts any size."""
    args = backbone.args
    if "img_size" in args and "patch_size" in args:
        return replace(backbone, args={**args, "img_size": size})
    section = BACKBONES.declared(backbone.name, "sizes_in", None)  # imports nothing
    name = None if section is None else BACKBONES[backbone.name](**args).size_argument
    if name is None:
        return backbone
    return replace(backbone, args={**args, section: {**args[section], name: size}})


def resized_pipeline(transforms: list[Component], size: int) -> list[Component]:
    """Return the transforms for images of ``size`` pixels.

    Earlier sizes keep their ratio to the last one. If no transform changes the size, a resize and
    a center crop are put first.
    """
    nominal = nominal_size(transforms)
    if nominal is None and transforms and all(keeps_size(t) for t in transforms):
        crop = Component(name="center_crop", args={"size": size})
        resize = Component(name="resize", args={"size": size, "interpolation": "bilinear"})
        return [resize, crop, *transforms]
    if nominal is None or nominal == size:
        return transforms
    factor = size / nominal
    scaled = [_scaled({"name": t.name, **t.args}, factor) for t in transforms]
    return [Component(name=args.pop("name"), args=args) for args in scaled]


def nominal_size(transforms: list[Component]) -> int | None:
    """Return the ``size`` of the last transform that resizes images, or None."""
    for transform in reversed(transforms):
        if resizes(transform.name) and isinstance(transform.args.get("size"), int):
            return int(transform.args["size"])
    return None


def _scaled(value: Any, factor: float) -> Any:
    """Return a component as plain yaml values, with its size and nested sizes times ``factor``."""
    if isinstance(value, list):
        return [_scaled(item, factor) for item in value]
    if not isinstance(value, dict):
        return value
    args = {key: _scaled(item, factor) for key, item in value.items()}
    if "name" in args and resizes(args["name"]) and isinstance(args.get("size"), int):
        args["size"] = max(1, round(args["size"] * factor))
    return args


def _rounded(side: float, patch: int | None) -> int:
    """Round to a whole number of patches, or of pixels without patches."""
    return max(1, round(side / (patch or 1))) * (patch or 1)


def _has_size(source: Component) -> bool:
    """Return whether a source is built in and its config sets the size of its images."""
    ours = source.name in SOURCES and SOURCES.address(source.name).module.startswith("selftask.")
    return ours and isinstance(source.args.get("size"), int)
