"""Checks that values of different sections of a config do not contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from selftask.config import torch_names
from selftask.config.checks import devices, grid, optimizer, requirements, sbatch
from selftask.config.keys import Key
from selftask.config.schema import (
    Component,
    Config,
    DataConfig,
    EvalConfig,
    ParallelConfig,
    TrainConfig,
    ViewConfig,
)
from selftask.config.values.budget import parse_budget
from selftask.errors import nearest
from selftask.registry import (
    BATCHED_TRANSFORMS,
    TASKS,
    TRAIN_STEPS,
    TRANSFORMS,
)

Problem = tuple[Key, str]


def contradictions(config: Config) -> Iterator[Problem]:
    """Yield key and text of each contradiction in a config whose types are right."""
    yield from _length(config.train)
    yield from _validation(config.data, config.eval)
    yield from _batch(config.train, config.launch.world_size)
    yield from _engine(config.data, config.views)
    yield from _parallel(config.parallel, config.train)
    yield from _views(config)
    for name, (low, high) in config.expected.items():
        if low > high:
            text = f"expected.{name}=[{low:g}, {high:g}]: the lowest value comes first"
            yield ("expected", name), text
    if config.task not in TASKS:
        yield ("task",), f"no task named {config.task!r}; {nearest(config.task, TASKS)}"
    if torch_names.is_torch_name("optimizer", config.optimizer.name):
        yield from torch_names.problems(config)
    yield from optimizer.problems(config)
    yield from devices.problems(config)
    for key, text in sbatch.problems(config.launch.slurm):
        yield ("launch", "slurm", key), text
    yield from requirements.of_config(config)
    yield from grid.problems(config)


def _of_views(views: Mapping[str, ViewConfig]) -> dict[Key, list[Component]]:
    return {("views", name, "transforms"): group.transforms for name, group in views.items()}


def _length(train: TrainConfig) -> Iterator[Problem]:
    if train.epochs is None and train.max_steps is None:
        yield ("train",), "train.epochs and train.max_steps are both null; give at least one"


def _validation(data: DataConfig, evaluation: EvalConfig) -> Iterator[Problem]:
    """Yield problems of validation sets and of the loss on them."""
    for name in data.val_sets:
        if not re.fullmatch(r"[\w.-]+", name):
            text = f"data.val_sets: the name {name!r} may have letters, digits and ._- only"
            yield ("data", "val_sets", name), text
    if evaluation.loss and data.val is None and not data.val_sets:
        yield ("eval", "loss"), "eval.loss=true: data.val is null; give the images to take it of"


def _batch(train: TrainConfig, world: int) -> Iterator[Problem]:
    if train.batch_size % world:
        right = max(train.batch_size // world, 1) * world
        text = (
            f"train.batch_size={train.batch_size} is the global batch and must be divisible by "
            f"the {world} processes of launch; try {right}"
        )
        yield ("train", "batch_size"), text
    step = train.step.name
    ours = TRAIN_STEPS.address(step).module.startswith(TRAIN_STEPS.package)
    if train.accumulate > 1 and ours and step != "accumulate":
        text = (
            f"train.accumulate={train.accumulate} has no effect with train.step={step!r}, which "
            "uses one batch per step; use train.step=accumulate, or set it to 1"
        )
        yield ("train", "accumulate"), text


def _views(config: Config) -> Iterator[Problem]:
    if not config.views:
        yield ("views",), "views is empty: a method needs at least one group of views"
    else:
        yield from _derived_views(config.views)
    for key, transforms in config.pipelines.items():
        names = [transform.name for transform in transforms]
        if key[0] == "eval" and not names and not config.eval.evaluations:
            continue
        if key[0] == "views" and not config.views[key[1]].count:
            continue  # its views are only inputs of other groups
        if not names or not grid.normalizes(names[-1]):
            last = f"its last is {names[-1]!r}" if names else "it is empty"
            others = [name for name in config.views if name != key[1]] if key[0] == "views" else []
            if not names and others:
                last += f"; {key[1]!r} is a new group of views: {nearest(key[1], others)}"
            choices = " or ".join(repr(name) for name in TRANSFORMS if grid.normalizes(name))
            yield key, f"{'.'.join(key)} must end with {choices} ({last})"
        for index, name in enumerate(names[:-1]):
            if grid.normalizes(name):
                where = (*key, str(index))
                yield where, f"{'.'.join(where)}: {name!r} must come last, once"


def _derived_views(views: Mapping[str, ViewConfig]) -> Iterator[Problem]:
    """Yield problems of groups whose views are made from the views of another group."""
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
    used = {group.of for group in views.values()}
    for name, group in views.items():
        if not group.count and name not in used:
            text = "needs at least 1, since no other group is made from it (`of`)"
            yield ("views", name, "count"), f"views.{name}.count=0: {text}"


def _engine(data: DataConfig, views: Mapping[str, ViewConfig]) -> Iterator[Problem]:
    """Yield problems of options that ``data.augment_on`` does not support."""
    if data.augment_on == "device":
        if data.cache == "device":
            yield from _unbatched(views)
        return
    if data.cache == "device":
        yield ("data", "cache"), "data.cache='device' needs data.augment_on=device"
    if data.max_side is not None and data.cache not in ("ram", "disk"):
        text = (
            f"data.max_side={data.max_side} has no effect with data.augment_on='cpu' without a "
            "cache; use data.augment_on=device, or data.cache=ram or disk"
        )
        yield ("data", "max_side"), text


def _unbatched(views: Mapping[str, ViewConfig]) -> Iterator[Problem]:
    """Yield transforms without a batched version, which ``data.cache=device`` needs."""
    for key, transforms in _of_views(views).items():
        for index, transform in enumerate(transforms):
            if is_unbatched(transform.name):
                place = (*key, str(index))
                text = (
                    f"{'.'.join(place)}: {transform.name!r} has no form for whole batches, which "
                    "data.cache=device needs; set data.cache=ram, give it a method "
                    "on_batch(images, drawn), or take one that has a form "
                    f"({nearest(transform.name, BATCHED_TRANSFORMS.names())})"
                )
                yield place, text


def is_unbatched(name: str) -> bool:
    """Return whether a transform has no version for whole batches, so that workers apply it."""
    if name in BATCHED_TRANSFORMS or name not in TRANSFORMS or grid.normalizes(name):
        return False
    custom = TRANSFORMS.imported(name)
    return not (hasattr(custom, "on_batch") and hasattr(custom, "draw"))


_DEFAULT = ParallelConfig()
_ONLY_WITH = {
    "grad_compression": "manual",
    "static_graph": "ddp",
    "find_unused": "ddp",
    "shard_over": "fsdp",
    "cpu_offload": "fsdp",
    "meta_init": "fsdp",
    "prefetch": "fsdp",
}


def _parallel(parallel: ParallelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Yield problems of options that ``parallel.reduce`` does not support."""
    for key, way in _ONLY_WITH.items():
        if getattr(parallel, key) != getattr(_DEFAULT, key) and parallel.reduce != way:
            text = (
                f"parallel.{key} has no effect with parallel.reduce={parallel.reduce!r}; "
                f"use parallel.reduce={way}"
            )
            yield ("parallel", key), text
    if parallel.sync_buffers == "never" and parallel.buffers != _DEFAULT.buffers:
        text = (
            f"parallel.buffers={parallel.buffers!r} has no effect with "
            "parallel.sync_buffers=never; use evaluation or step, or take it out"
        )
        yield ("parallel", "buffers"), text
    if parallel.static_graph and parallel.find_unused:
        text = "parallel.find_unused does not go with parallel.static_graph; take one of them out"
        yield ("parallel", "find_unused"), text
    if parallel.cpu_offload and train.precision == "float16":
        text = (
            "parallel.cpu_offload does not go with train.precision=float16, which checks all "
            "gradients on the device; use train.precision=bfloat16"
        )
        yield ("parallel", "cpu_offload"), text
    if parallel.static_graph and train.accumulate > 1:
        text = "parallel.static_graph does not go with train.accumulate; take one of them out"
        yield ("parallel", "static_graph"), text
    if train.sharded_checkpoints and parallel.reduce != "fsdp":
        text = (
            "train.sharded_checkpoints=true has no effect with "
            f"parallel.reduce={parallel.reduce!r}, which shards nothing; use parallel.reduce=fsdp"
        )
        yield ("train", "sharded_checkpoints"), text
    if parallel.activation_checkpointing not in ("none", "blocks"):
        try:
            parse_budget(parallel.activation_checkpointing)
        except ValueError as error:
            text = (
                f"parallel.activation_checkpointing={parallel.activation_checkpointing!r}: {error}"
            )
            yield ("parallel", "activation_checkpointing"), text
