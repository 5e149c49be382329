"""Image sizes: the short form ``image_size=96``, and checks against a patch grid.

``image_size`` is one key for the sizes of views, evaluation and a vision transformer's grid. It is
a short form that sets several other keys; the resolved config has only those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from selftask.config.compose.provenance import Layers
from selftask.config.keys import Key, Problem, dotted
from selftask.config.schema import Component, Config, DataConfig, ViewConfig
from selftask.config.schema.component import named_in
from selftask.registry import BACKBONES, SOURCES, TRANSFORMS

KEY: Key = ("image_size",)
C = TypeVar("C", bound=Component)


class _Setter:
    """Decides which values ``image_size`` overrides: those that only earlier config layers set.

    Attributes:
        overridden: Dotted keys of the overridden values.
        problems: Key and text of each conflict with a value that the same layer sets.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.overridden: list[str] = []
        self.problems: list[Problem] = []

    def may_set(self, keys: list[Key]) -> bool:
        """Return whether ``image_size`` overrides all values at ``keys``; record the result."""
        depths, limit = [self._depth(key) for key in keys], self._depth(KEY)
        for key, depth in zip(keys, depths, strict=True):
            if depth == limit:
                text = f"{dotted(key)} and image_size set the same size differently; leave one out"
                self.problems.append((key, text))
        if max(depths) >= limit:
            return False
        self.overridden += map(dotted, keys)
        return True

    def _depth(self, key: Key) -> int:
        """Return the index of the last layer that sets ``key``, or -1."""
        sets = [layer.holds(key) or layer.replaces(key) for layer in self.layers]
        return max((index for index, is_set in enumerate(sets) if is_set), default=-1)


def with_image_size(config: Config, size: int, layers: Layers) -> tuple[Config, list[Problem]]:
    """Return ``config`` with all its image sizes set for images of ``size`` pixels.

    The largest views get ``size``. Smaller views (multi-crop) and a resize before a crop keep their
    ratio to it. A value is kept if a later layer than that of ``image_size`` sets it, for example
    the command line after a recipe. A different value set by the same layer is a problem.

    Args:
        config: The config.
        size: Height and width of the images in pixels.
        layers: Layers of the config, which contain the origin of each value.

    Returns:
        The config, and key and text of each problem.
    """
    if text := undivided(config.backbone, size):
        return config, [(KEY, text)]
    setter = _Setter(layers)
    data = _with_drawn_size(config.data, size, setter)
    is_drawn = _has_size(config.data.source)  # views and evaluation need not set the size then
    views = _resized_views(config.views, size, patch_size(config.backbone), setter, is_drawn)
    key = ("eval", "transforms")
    before, is_set = config.eval.transforms, data is not config.data
    after = before if is_set and nominal_size(before) is None else resized_pipeline(before, size)
    evaluation = replace(config.eval, transforms=_chosen(before, after, key, setter))
    backbone = resized_backbone(config.backbone, size)
    if backbone != config.backbone:
        keys: list[Key] = [("backbone", "args", "img_size"), ("backbone", "args", "image_size")]
        if "patch_size" in backbone.args:
            keys = [("backbone", "img_size")]
        backbone = backbone if setter.may_set(keys) else config.backbone
    places = config.places | dict.fromkeys(setter.overridden, layers.place(KEY) or "image_size")
    config = replace(config, data=data, views=views, eval=evaluation, backbone=backbone)
    return replace(config, places=places), setter.problems


def _with_drawn_size(data: DataConfig, size: int, setter: _Setter) -> DataConfig:
    """Return the data with ``size`` set for sources that draw images in that size (digits)."""

    def resized(source: Component, key: Key) -> Component:
        if not (_has_size(source) and setter.may_set([(*key, "size")])):
            return source
        return replace(source, args={**source.args, "size": size})

    source = resized(data.source, ("data",))
    if source is data.source:
        return data
    sets = {k: resized(c, ("data", "val_sets", k)) for k, c in data.val_sets.items()}
    val = data.val and resized(data.val, ("data", "val"))
    return replace(data, source=source, val=val, val_sets=sets)


def _resized_views(
    views: dict[str, ViewConfig], size: int, patch: int | None, setter: _Setter, is_drawn: bool
) -> dict[str, ViewConfig]:
    """Return all groups of views resized.

    A group without a known size is a problem, unless the source draws its images in this size
    (``is_drawn``).
    """
    sizes = {name: nominal_size(group.transforms) for name, group in views.items()}
    largest = max((side for side in sizes.values() if side is not None), default=0)
    resized = dict(views)
    for name, group in views.items():
        key, side = ("views", name, "transforms"), sizes[name]
        if side is None:
            if not is_drawn:
                text = f"image_size: {dotted(key)} has no crop or resize whose size it could set"
                setter.problems.append((KEY, text))
            continue
        share = size if side == largest else _rounded(side * size / largest, patch)
        after = resized_pipeline(group.transforms, share)
        resized[name] = replace(group, transforms=_chosen(group.transforms, after, key, setter))
    return resized


def _chosen(
    before: list[Component], after: list[Component], key: Key, setter: _Setter
) -> list[Component]:
    """Return ``after``, or ``before`` if ``image_size`` may not override its sizes."""
    if after == before:
        return before
    changed = [
        (*key, str(index), "size")
        for index, (old, new) in enumerate(zip(before, after, strict=False))
        if old.args.get("size") != new.args.get("size")
    ]
    return after if setter.may_set(changed if len(before) == len(after) else [key]) else before


def undivided(backbone: Component, size: int) -> str | None:
    """Return a message if ``size`` is not a multiple of the backbone's patch size, else None."""
    patch = patch_size(backbone)
    if not patch or size % patch == 0:
        return None
    return (
        f"image_size={size} cannot be divided into the patches of {patch} pixels of "
        f"{title(backbone)}; {multiples(size, patch)}"
    )


def resized_backbone(backbone: C, size: int) -> C:
    """Return the backbone for images of ``size`` pixels; unchanged if it has no size to set."""
    args = backbone.args
    if "img_size" in args and "patch_size" in args:
        return replace(backbone, args={**args, "img_size": size})
    section = _sizes_in(backbone)
    if section is None:
        return backbone
    name = BACKBONES[backbone.name](**args).size_argument
    if name is None:
        return backbone
    return replace(backbone, args={**args, section: {**args[section], name: size}})


def resized_pipeline(transforms: list[Component], size: int) -> list[Component]:
    """Return the transforms with an output of ``size`` pixels, if their output size is known.

    Earlier sizes keep their ratio to the last one. If all transforms keep the size, a resize and a
    center crop are inserted first. An empty list, and transforms whose output size is unknown (a
    custom one may change it), are returned unchanged.
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
    return list(map(Component.from_dict, scaled))


def nominal_size(transforms: list[Component]) -> int | None:
    """Return the output size in pixels of the last transform with a fixed ``size``, or None."""
    for transform in reversed(transforms):
        if _sets_size(transform):
            return int(transform.args["size"])
    return None


def _sets_size(transform: Component) -> bool:
    """Return whether the ``size`` of a transform is the size of its output, in pixels."""
    size = transform.args.get("size")
    return isinstance(size, int) and resizes(transform) not in (None, "unknown")


def _scaled(value: Any, factor: float) -> Any:
    """Return a component, as plain values, with its size and nested sizes times ``factor``."""
    if isinstance(value, list):
        return [_scaled(item, factor) for item in value]
    if not isinstance(value, dict):
        return value
    args = {key: _scaled(item, factor) for key, item in value.items()}
    if "name" in args and _sets_size(Component(name=args["name"], args=args)):
        args["size"] = max(1, round(args["size"] * factor))
    return args


def _rounded(side: float, patch: int | None) -> int:
    """Round to a whole number of patches, or of pixels without patches."""
    return max(1, round(side / (patch or 1))) * (patch or 1)


def _has_size(source: Component) -> bool:
    """Return whether a source draws its images in the size that its config sets."""
    drawn = SOURCES.declared(source.name, "drawn_in_size", False)
    return drawn and isinstance(source.args.get("size"), int)


def patch_problems(config: Config) -> Iterator[Problem]:
    """Yield problems of image sizes that the config's vision transformer does not accept.

    Some models of timm and torchvision must be built before their sizes are known.
    ``selftask.models.build.check_sizes`` checks those.
    """
    key, args = _grid(config.backbone)
    patch = args.get("patch_size")
    if not args.get("dynamic_img_size", True):  # absent: no ViT, or no fixed grid
        yield from other_sizes(config, key, args.get("img_size"), patch=patch)
    elif patch and args.get("dynamic_img_size") and not args.get("dynamic_img_pad"):
        yield from undivided_sizes(config, patch)


def other_sizes(
    config: Config,
    key: Key,
    built: int | None,
    *,
    patch: int | None,
    size: str = "img_size",
    dynamic: bool = True,
) -> Iterator[Problem]:
    """Yield problems of the sizes of views and evaluation for a backbone with a fixed patch grid.

    A backbone that interpolates its position embeddings accepts views of different sizes, if one of
    the sizes is that of its grid, or unknown.

    Args:
        config: The config to check.
        key: Key of the section with the backbone's image size.
        built: Image size of the backbone in pixels, or None if it is built for the size of the
            views.
        patch: Patch size in pixels, or None for a backbone that does not interpolate positions.
        size: Field at ``key`` that sets the image size.
        dynamic: Whether the backbone has an option ``dynamic_img_size``.
    """
    shown_views = {name: group for name, group in config.views.items() if group.count}
    sides = {name: output_side(group.transforms) for name, group in shown_views.items()}
    fixed_sides = {side for side in sides.values() if side is not None}
    taken = max(fixed_sides, default=None) if built is None else built
    name = title(config.backbone)
    if patch is not None and (taken in fixed_sides or None in sides.values()):
        yield from undivided_sizes(config, patch, evaluated=False)
    elif len(fixed_sides | {taken}) > 1:
        one = patch is not None or len(set(sides.values())) == 1
        field = size if one or not dynamic else "dynamic_img_size"
        value = "true" if field == "dynamic_img_size" else max(fixed_sides)
        shown = [f"views.{name}: {side}" for name, side in sides.items() if side is not None]
        fixed = "" if built is None else f" for images of {built} pixels"
        others = "" if one or dynamic else ", and all views to that size"
        text = (
            f"{name} has one grid of patches{fixed}, and the views are of other sizes "
            f"({', '.join(shown)}); set {'.'.join(key)}.{field}={value}{others}"
        )
        yield (*key, field), text
        return
    side = output_side(config.eval.transforms)
    if _evaluates(config) and len({side, taken, None}) > 2:
        text = (
            f"eval.transforms: images of {side} pixels, and {name} takes those of {taken} only; "
            f"image_size={taken} sets views, evaluation and backbone together"
        )
        yield ("eval", "transforms"), text


def undivided_sizes(config: Config, patch: int, *, evaluated: bool = True) -> Iterator[Problem]:
    """Yield problems of views and evaluations whose size is not a multiple of ``patch``.

    Args:
        config: The config to check.
        patch: Patch size in pixels.
        evaluated: Whether to check ``eval.transforms`` as well.
    """
    pipelines: dict[Key, list[Component]] = {
        ("views", name, "transforms"): group.transforms
        for name, group in config.views.items()
        if group.count
    }
    if evaluated and _evaluates(config):
        pipelines["eval", "transforms"] = config.eval.transforms
    for key, transforms in pipelines.items():
        side = output_side(transforms)
        if side is not None and side % patch:
            text = (
                f"{'.'.join(key)}: images of {side} pixels cannot be divided into the patches of "
                f"{patch} pixels of {title(config.backbone)}; {multiples(side, patch)}"
            )
            yield key, text


def title(backbone: Component) -> str:
    """Return a backbone's name for messages: ``backbone 'vit_tiny'``, ``backbone 'timm:NAME'``."""
    model = backbone.args.get("model")
    return f"backbone {backbone.name!r}" if model is None else f"backbone '{backbone.name}:{model}'"


def _grid(backbone: Component) -> tuple[Key, Mapping[str, Any]]:
    """Return key and values of the section with img_size, patch_size and dynamic_img_size.

    If a backbone declares ``sizes_in``, they are in that inner section, and its method ``grid``
    returns them.
    """
    section = _sizes_in(backbone)
    if section is None:
        return ("backbone",), backbone.args
    return ("backbone", section), BACKBONES[backbone.name](**backbone.args).grid()


def _sizes_in(backbone: Component) -> str | None:
    """Return the name of the section inside ``backbone`` that has the image size, or None."""
    return BACKBONES.declared(backbone.name, "sizes_in", None)


def patch_size(backbone: Component) -> int | None:
    """Return the patch size in pixels, or None for a backbone without patches of one size."""
    patch = _grid(backbone)[1].get("patch_size")
    return patch if isinstance(patch, int) else None


def multiples(size: int, patch: int) -> str:
    """Return the nearest multiples of ``patch`` as a hint: ``try 96 or 112``."""
    below = size // patch * patch
    return f"try {below} or {below + patch}" if below else f"try {patch}"


def output_side(transforms: list[Component]) -> int | None:
    """Return the side of a pipeline's square output in pixels, or None if it is not known."""
    for transform in reversed(transforms):
        if resizes(transform) == "square":
            return transform.args["size"]
        if not keeps_size(transform):
            break
    return None


def resizes(transform: Component) -> str | None:
    """Return how a transform changes the image size, see ``Transform.resizes``.

    None: not at all. ``"square"``: to ``size`` x ``size`` pixels. ``"unknown"``: the transform is
    not registered or does not declare it. Any other string: in another way.
    """
    return TRANSFORMS.declared(transform.name, "resizes", "unknown")


def keeps_size(transform: Component) -> bool:
    """Return whether a transform and all transforms nested in it keep an image's size."""
    nested = (inner for inner, _ in named_in(transform.args, ()))
    return not resizes(transform) and all(map(keeps_size, nested))


def _evaluates(config: Config) -> bool:
    tested = config.data.val is not None or bool(config.data.val_sets)
    return tested and bool(config.eval.evaluations)
