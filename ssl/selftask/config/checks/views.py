"""Checks of groups of views and of lists of transforms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from selftask.config.checks.components import inner_components
from selftask.config.keys import Key, Problem
from selftask.config.schema import Component, Config, ViewConfig
from selftask.errors import nearest
from selftask.registry import BATCHED_TRANSFORMS, REQUIREMENTS, TRANSFORMS, Registry


def view_problems(config: Config) -> Iterator[Problem]:
    """Yield key and text of each problem of groups of views and of lists of transforms."""
    yield from _groups(config.views)
    if config.data.augment_on == config.data.cache == "device":
        yield from _unbatched(config.views)
    yield from _pipelines(config)


def _groups(views: Mapping[str, ViewConfig]) -> Iterator[Problem]:
    """Yield problems of ``of``, ``image`` and ``count`` of groups of views."""
    if not views:
        yield ("views",), "views is empty: a method needs at least one group of views"
    above: list[str] = []
    for name, group in views.items():
        key = ("views", name, "of")
        if group.of in views and group.of not in above:
            text = "made from a group that stands above it in `views`"
            yield key, f"views.{name}.of={group.of!r}: a group can only be {text}"
        elif group.of is not None and group.of not in above:
            yield key, f"views.{name}.of={group.of!r}: no such group; {nearest(group.of, above)}"
        if group.of is not None and group.image is not None:
            text = f"views.{name}: of={group.of!r} and image={group.image!r}: only one can be meant"
            yield ("views", name, "image"), text
        above.append(name)
    parents = {group.of for group in views.values()}
    for name, group in views.items():
        if not group.count and name not in parents:
            text = "needs at least 1, since no other group is made from it (`of`)"
            yield ("views", name, "count"), f"views.{name}.count=0: {text}"


def _unbatched(views: Mapping[str, ViewConfig]) -> Iterator[Problem]:
    """Yield a problem for each transform that ``is_unbatched``, for ``data.cache=device``."""
    for name, group in views.items():
        for index, transform in enumerate(group.transforms):
            if is_unbatched(transform.name):
                key = ("views", name, "transforms", str(index))
                text = (
                    f"{'.'.join(key)}: {transform.name!r} has no form for whole batches, which "
                    "data.cache=device needs; set data.cache=ram, give it a method "
                    "on_batch(images, drawn), or take one that has a form "
                    f"({nearest(transform.name, BATCHED_TRANSFORMS.names())})"
                )
                yield key, text


def _pipelines(config: Config) -> Iterator[Problem]:
    """Yield a problem for each used pipeline whose normalization is missing, repeated or not last.

    Views of groups with ``count: 0``, and an empty ``eval.transforms`` without evaluations, need
    none.
    """
    for key, transforms in config.pipelines.items():
        names = [transform.name for transform in transforms]
        if key[0] == "eval" and not names and not config.eval.evaluations:
            continue
        if key[0] == "views" and not config.views[key[1]].count:
            continue  # its views are only inputs of other groups
        if not names or not normalizes(names[-1]):
            last = f"its last is {names[-1]!r}" if names else "it is empty"
            others = [name for name in config.views if name != key[1]] if key[0] == "views" else []
            if not names and others:
                last += f"; {key[1]!r} is a new group of views: {nearest(key[1], others)}"
            choices = " or ".join(repr(name) for name in TRANSFORMS if normalizes(name))
            yield key, f"{'.'.join(key)} must end with {choices} ({last})"
        for index, name in enumerate(names[:-1]):
            if normalizes(name):
                where = (*key, str(index))
                yield where, f"{'.'.join(where)}: {name!r} must come last, once"


def normalizes(name: str) -> bool:
    """Return whether a transform normalizes pixels for the network, and so ends a pipeline."""
    return bool(TRANSFORMS.declared(name, "normalizes", False))


def is_unbatched(name: str) -> bool:
    """Return whether a transform has no version for whole batches, so that workers apply it.

    The result is False for normalization, and for a name that is not registered.
    """
    if name in BATCHED_TRANSFORMS or name not in TRANSFORMS or normalizes(name):
        return False
    custom = TRANSFORMS.imported(name)
    return not (hasattr(custom, "on_batch") and hasattr(custom, "draw"))


def box_problems(method: str, views: Mapping[str, ViewConfig]) -> Iterator[Problem]:
    """Yield a problem for each transform that is not affine, for a method that requires boxes."""
    for name, group in views.items():
        for index, transform in enumerate(group.transforms):
            transform_key = ("views", name, "transforms", str(index))
            for key, kind in _not_affine(transform, TRANSFORMS, transform_key):
                text = f"{kind!r} moves pixels in a way that no box describes, and {method} needs"
                yield key, f"{'.'.join(key)}: {text} {REQUIREMENTS['boxes']}; take it out"


def _not_affine(transform: Component, registry: Registry, key: Key) -> Iterator[Problem]:
    """Yield keys and names of transforms that are not affine, including nested ones."""
    if not TRANSFORMS.declared(transform.name, "affine", True):
        yield key, transform.name
    for inner in inner_components(transform, registry, key):
        yield from _not_affine(*inner)


def empty_transforms(config: Config) -> Iterator[str]:
    """Yield a note if the run's evaluations and export have no transforms."""
    if not config.eval.transforms:
        yield (
            "eval.transforms is empty, so `eval`, `features` and the exported backbone will see "
            "images that are neither resized nor normalized; to train without evaluations, set "
            "eval.evaluations=null instead of eval=null"
        )


def identical_views(config: Config) -> Iterator[str]:
    """Yield a note for each set of views of an image that are always identical."""
    origins: dict[str, list[Any]] = {}  # for each group, what each of its views is made of
    shown: list[tuple[Any, str]] = []
    for name, group in config.views.items():
        key: Key = ("views", name, "transforms")
        random = any(
            _is_random(part, (*key, str(index))) for index, part in enumerate(group.transforms)
        )
        recipe = repr([part.to_dict() for part in group.transforms])
        sources = origins.get(group.of, []) if group.of else list(group.images)
        made = [
            (source, recipe, (name, number) if random else None)
            for source in sources
            for number in range(max(1, group.count))
        ]
        origins[name] = made
        shown += [(view, name) for view in made] if group.count else []
    numbers = Counter(view for view, _ in shown)
    for view, number in numbers.items():
        groups = dict.fromkeys(f"views.{name}" for other, name in shown if other == view)
        if number > 1:
            yield (
                f"{', '.join(groups)}: {number} views of an image are identical, "
                "since none of their transforms is random; add one, such as random_resized_crop"
            )


def _is_random(transform: Component, key: Key) -> bool:
    """Return whether a transform may give different results for one image."""
    declared = TRANSFORMS.declared(transform.name, "is_random", True)
    probability = transform.args.get("p")
    if probability == 0:
        return False
    if declared == "p" and probability != 1:
        return True
    inner = inner_components(transform, TRANSFORMS, key)
    return declared is True or any(_is_random(part, inner_key) for part, _, inner_key in inner)
