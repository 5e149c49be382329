"""Checks that a run provides what its method requires (``Method.requires``).

Each requirement is checked as early as possible, before a run starts: with the config
(``requirement_problems``), the opened data (``of_labels``, ``of_extras``) or the built backbone
(``of_backbone``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from selftask.config.checks import grid
from selftask.config.checks.views import box_problems
from selftask.config.keys import Problem
from selftask.config.schema import Component, Config, num_views
from selftask.errors import UserError, nearest, with_noun
from selftask.registry import BACKBONES, EVALUATIONS, METHODS, REQUIREMENTS, TRAIN_STEPS

OF_BACKBONES = ("tokens", "subset", "attention", "groups", "sparse", "dense", "hidden")
"""Requirements of the backbone; a backbone declares those that it meets in ``offers``."""


def required(method: str) -> frozenset[str]:
    """Return the requirements of a method, without importing it.

    Raises:
        UserError: If the method declares an unknown requirement.
    """
    words = METHODS.declared(method, "requires", ())
    words = (words,) if isinstance(words, str) else words
    for word in words:
        if word not in REQUIREMENTS:
            raise UserError(
                f"{METHODS.address(method)}: the method {method!r} requires {word!r}, which is "
                f"no requirement; {nearest(word, REQUIREMENTS)}"
            )
    return frozenset(words)


def requirement_problems(config: Config) -> Iterator[Problem]:
    """Yield conflicts between the config and what its method and other components declare."""
    method, needs = config.method.name, required(config.method.name)
    least = METHODS.declared(method, "min_batch_size", 1)
    declared = _declared_views(method)
    offered = BACKBONES.declared(config.backbone.name, "offers", None)
    step, shipped = config.train.step.name, TRAIN_STEPS.is_shipped(config.train.step.name)
    if config.eval.loss and "index" in needs:
        text = f"{method} remembers each training image, and has no loss for others; take it out"
        yield ("eval", "loss"), f"eval.loss=true: {text}"
    batch = config.train.batch_size
    if batch < least:
        text = f"{method} computes statistics of the images of a batch, and needs at least {least}"
        yield ("train", "batch_size"), f"train.batch_size={batch}: {text}"
    if config.views:
        yield from count_problems(method, declared, num_views(config.views))
    if offered is not None:  # None: known only after the backbone is built
        for text in of_backbone(config, offered):
            yield ("backbone",), text
    if config.train.accumulate > 1 and shipped and step != "accumulate":
        text = (
            f"train.accumulate={config.train.accumulate} has no effect with train.step={step!r}, "
            "which uses one batch per step; use train.step=accumulate, or set it to 1"
        )
        yield ("train", "accumulate"), text
    if "boxes" in needs:
        yield from box_problems(method, config.views)


def _declared_views(method: str) -> Any:
    """Return ``Method.views`` of a method, without importing it; raise UserError if it is wrong."""
    declared = METHODS.declared(method, "views", (1, None))
    for numbers in declared.values() if isinstance(declared, dict) else (declared,):
        is_pair = isinstance(numbers, tuple) and len(numbers) == 2
        least, most = numbers if is_pair else (numbers, numbers)
        if not (isinstance(least, int) and isinstance(most, int | None)):
            raise UserError(
                f"{METHODS.address(method)}: the method {method!r} has views = {numbers!r}; a "
                "number, (smallest, largest or None), or a dict of these by group is expected"
            )
    return declared


def count_problems(method: str, declared: Any, numbers: Mapping[str, int]) -> Iterator[Problem]:
    """Yield a problem for each group whose number of views is not what the method declares.

    Args:
        method: Name of the method, for messages.
        declared: ``Method.views``.
        numbers: Number of views of an image in each group.
    """
    groups = declared if isinstance(declared, dict) else {None: declared}
    for group, wanted in groups.items():
        least, most = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        number = sum(numbers.values()) if group is None else numbers.get(group, 0)
        if number < least or (most is not None and number > most):
            location = "of an image" if group is None else f"in group {group!r}"
            text = f"{method} needs {_range(least, most)} {location}, got {number}"
            yield ("views",), f"views: {text}"
    if isinstance(declared, dict):
        for name, number in numbers.items():
            if number and name not in declared:
                text = f"{method} has no use for group {name!r}; {nearest(name, list(declared))}"
                yield ("views", name), f"views: {text}"


def _range(least: int, most: int | None) -> str:
    """Format a range of view counts: ``2 views``, ``1 view or more``, ``2 to 4 views``."""
    if most == least:
        return with_noun(least, "view")
    if most is None:
        return f"{with_noun(least, 'view')} or more"
    return f"{least} to {most} views"


def of_backbone(config: Config, offered: Collection[str]) -> Iterator[str]:
    """Yield a problem for each of ``OF_BACKBONES`` that the method requires and that is missing.

    Args:
        config: Config of the run.
        offered: Requirements that the backbone meets.
    """
    for word in OF_BACKBONES:
        if word in required(config.method.name) - {*offered}:
            fit = [name for name in BACKBONES if word in BACKBONES.declared(name, "offers", ())]
            others = [name for name in METHODS if "sparse" in required(name)]
            masks = word in ("tokens", "subset") and "sparse" in offered
            more = f", or mask the patches of this one with {' or '.join(others)}" if masks else ""
            yield (
                f"backbone: {config.method.name} needs {REQUIREMENTS[word]}, and "
                f"{grid.title(config.backbone)} has none; take {', '.join(fit)} or one of "
                f"timm: and torchvision: that has them{more}"
            )


def of_labels(config: Config, unlabeled: int, total: int, key: str = "data") -> Iterator[str]:
    """Yield a problem if the method needs labels and some of the images have none.

    Args:
        config: Config of the run.
        unlabeled: Number of images without a label.
        total: Number of images.
        key: Config key of the images.
    """
    method = config.method.name
    if unlabeled and "labels" in required(method):
        if unlabeled == total:
            yield (
                f"{key}: method.name={method} needs labels, and these images have none; put those "
                "of each class into a folder of its own, or give a table with a column of labels"
            )
        else:
            yield (
                f"{key}: {unlabeled} of {total} images have no label, and method.name={method} "
                "needs all of them; leave those images out"
            )


def of_extras(config: Config, kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for missing captions and for each missing number or extra image.

    Args:
        config: The config; its method may require captions or numbers, and its groups of views
            may use extra images.
        kinds: Kind of each field of the data besides image and label, as in ``Source.extras``.
    """
    method = config.method.name
    if "captions" in required(method) and kinds.get("caption") != "text":
        yield (
            f"data: method.name={method} needs captions, and this data has none; name their column "
            "with data.caption (a table, Hugging Face's data sets), or take a source that has them"
        )
    arrays = [name for name, kind in kinds.items() if kind == "array"]
    for name in config.method.args["targets"] if "numbers" in required(method) else ():
        if name not in arrays:
            has = f"it has {', '.join(arrays)}" if arrays else "name columns with data.numbers"
            yield f"method.targets: the data has no numbers {name!r}; {has}"
    images = [name for name, kind in kinds.items() if kind == "image"]
    has = f"it has {', '.join(images)}" if images else "it has one image a sample"
    for name, group in config.views.items():
        for image in group.images:
            if image is not None and image not in images:
                yield f"views.{name}.image: the data has no extra image {image!r}; {has}"


def label_free(evaluations: Mapping[str, Component]) -> dict[str, Component]:
    """Return the evaluations that need no labels: those with ``needs_labels = False``."""
    declares = EVALUATIONS.declared
    return {k: c for k, c in evaluations.items() if not declares(c.name, "needs_labels", True)}


def takes_backbone(evaluations: Mapping[str, Component]) -> dict[str, Component]:
    """Return the evaluations that take the backbone: those with ``takes_backbone = True``."""
    declares = EVALUATIONS.declared
    return {k: c for k, c in evaluations.items() if declares(c.name, "takes_backbone", False)}
