"""Checks of the image sizes of views and evaluation against a vision transformer's patch grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from selftask.config.checks.components import inner_components
from selftask.config.keys import Key
from selftask.config.schema import Component, Config
from selftask.registry import BACKBONES, TRANSFORMS

Problem = tuple[Key, str]


def problems(config: Config) -> Iterator[Problem]:
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
    """Yield problems of views and evaluation for a backbone with one fixed grid.

    A backbone that interpolates its position embeddings also accepts views of other sizes.

    Args:
        config: The config to check.
        key: Section that holds the backbone's image size.
        built: Image size of the backbone in pixels, or None if it is built for the size of the
            views.
        patch: Patch size in pixels, or None for a backbone that does not interpolate positions.
        size: Field at ``key`` that sets the image size.
        dynamic: Whether the backbone has an option ``dynamic_img_size``.
    """
    sides = _view_sides(config)
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
    """Return the section and the values of img_size, patch_size and dynamic_img_size.

    A backbone that declares ``sizes_in`` keeps them in that section; its method ``grid`` returns
    them.
    """
    section = BACKBONES.declared(backbone.name, "sizes_in", None)  # imports nothing
    if section is None:
        return ("backbone",), backbone.args
    return ("backbone", section), BACKBONES[backbone.name](**backbone.args).grid()


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
        if resizes(transform.name) == "square":
            side: int | None = transform.args["size"]
            return side
        if not keeps_size(transform):
            break
    return None


def resizes(name: str) -> str | None:
    """Return the class attribute ``resizes`` of a transform, or None if it has none.

    ``"square"`` means that its output is a square with a side of ``size`` pixels.
    """
    return TRANSFORMS.declared(name, "resizes", None) if name in TRANSFORMS else None


def normalizes(name: str) -> bool:
    """Return whether a transform normalizes pixels for the network, and so ends a pipeline."""
    return name in TRANSFORMS and bool(TRANSFORMS.declared(name, "normalizes", False))


def keeps_size(transform: Component) -> bool:
    """Return whether a transform and all transforms nested in it keep an image's size."""
    name = transform.name
    ours = name in TRANSFORMS and TRANSFORMS.address(name).module.startswith("selftask.")
    inner = inner_components(transform, TRANSFORMS, ())
    return ours and not resizes(name) and all(keeps_size(part) for part, *_ in inner)


def _view_sides(config: Config) -> Mapping[str, int | None]:
    shown = {name: group for name, group in config.views.items() if group.count}
    return {name: output_side(group.transforms) for name, group in shown.items()}


def _evaluates(config: Config) -> bool:
    tested = config.data.val is not None or bool(config.data.val_sets)
    return tested and bool(config.eval.evaluations)
