"""Evaluations during a run: the current backbone on labeled or unlabeled images."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from selftask.config.checks.requirements import label_free, takes_backbone
from selftask.config.extensions.user_code import check_takes, source_of
from selftask.config.schema import Component, Config, EvalConfig
from selftask.data.labels import is_labeled
from selftask.data.loading.open_data import Sources
from selftask.distributed.collectives import gather_objects, world_size
from selftask.errors import UserError
from selftask.evaluate.features import Features, extract_features
from selftask.evaluate.figure import Figure
from selftask.evaluate.label_counts import LabelCounts, check_label_counts
from selftask.evaluate.validation import validation_loss
from selftask.logs.rows import RESERVED_COLUMNS
from selftask.models.features.averaged_views import AveragedViews
from selftask.models.features.pooled_layers import PooledLayers
from selftask.registry import EVALUATIONS
from selftask.task import Task


def evaluate_task(task: Task) -> dict[str, float]:
    """Return the metrics of ``eval.evaluations`` and of ``eval.loss``, and ``eval_images_per_s``.

    Without labels, evaluations that need some are skipped. Those with ``takes_backbone = True``
    choose their images themselves, and all ranks share them. If there are no others, there is no
    ``eval_images_per_s``.

    Metrics of the sets of ``data.val_sets`` are called ``NAME/knn_top1``. Every rank must call this
    function. The state of the run does not change.
    """
    data = task.data_module
    losses: dict[str, float] = {}
    for name in data.val_sources if task.config.eval.loss else ():
        losses |= of_set(name, validation_loss(task, name))
    of_sets = evaluations_of_sets(task)
    on_backbone = takes_backbone(task.config.eval.evaluations)
    if not of_sets and not on_backbone:
        return losses
    exported = task.export_backbone()
    sets = {name: data.val_sources[name] for name in data.labeled_sets if name}
    sources = Sources(data.train_source, data.val_source, sets)
    losses |= run_on_backbone(on_backbone, exported, task.config, sources, task.device)
    if not of_sets:
        return losses
    backbone = evaluated_model(exported, task.config.eval)
    started = time.perf_counter()
    learns = any(len(label_free(chosen)) < len(chosen) for chosen in of_sets.values())
    read = [data.labeled_samples()] if learns else []
    parts = [
        extract_features(backbone, samples, device=task.device)
        for samples in (*read, *map(data.test_samples, of_sets))
    ]
    images = sum(map(len, parts)) * world_size()
    speed = {"eval_images_per_s": images / (time.perf_counter() - started)}
    row: dict[str, float] = {}
    for (name, chosen), test in zip(of_sets.items(), parts[len(read) :], strict=True):
        train = parts[0] if learns else test
        row |= of_set(name, evaluate_features(backbone, chosen, train, test))
    return {**{key: float(value) for key, value in row.items()}, **losses, **speed}


def evaluations_of_sets(task: Task) -> dict[str, dict[str, Component]]:
    """Return the evaluations of each validation set; unlabeled sets get the label-free ones.

    Evaluations with ``takes_backbone = True`` and sets without evaluations are omitted.
    """
    data, every = task.data_module, task.config.eval.evaluations
    components = {key: c for key, c in every.items() if key not in takes_backbone(every)}
    free = label_free(components)
    chosen = {n: components if n in data.labeled_sets else free for n in data.val_sources}
    return {name: evaluations for name, evaluations in chosen.items() if evaluations}


def run_on_backbone(
    components: Mapping[str, Component],
    backbone: nn.Module,
    config: Config,
    sources: Sources,
    device: torch.device,
) -> dict[str, float]:
    """Run evaluations with ``takes_backbone = True``, and merge their results.

    Args:
        components: Evaluations by name.
        backbone: The backbone.
        config: Config with ``eval.transforms``.
        sources: The images of the run, for evaluations without images of their own. Ranks of a
            process group share the images.
        device: Device to compute on; the backbone is moved to it.
    """
    row: dict[str, float] = {}
    for key, component in components.items():
        evaluation = EVALUATIONS[component.name](**component.args)
        row |= over_seeds(
            evaluation, (backbone, config, sources, device), f"eval.evaluations.{key}"
        )
    return row


def of_set(name: str, row: dict[str, float]) -> dict[str, float]:
    """Prefix metrics with the name of their validation set; ``data.val`` has no prefix."""
    return {f"{name}/{key}": value for key, value in row.items()} if name else row


def check_evaluations(config: Config, sources: Sources) -> str | None:
    """Return a description of the labels that a run's evaluations use, or None if they use none.

    Raises:
        ConfigError: If the labels are insufficient.
    """
    evaluations = config.eval.evaluations
    descriptions = []
    for name, source in {"": sources.val, **sources.val_sets}.items():
        if source is None:
            continue
        counts = LabelCounts.of_sources(Sources(sources.train, source))
        if counts is None and evaluations and is_labeled(sources.train) and is_labeled(source):
            descriptions.append(f"{name or 'labels'}: as the images are read")
        if counts is None or not (evaluations and len(counts.classes)):
            continue
        check_label_counts(evaluations, counts)
        descriptions.append(f"{name}: {counts.describe()}" if name else counts.describe())
    if not descriptions:
        return None
    if config.data.val == config.data.source:
        descriptions.append("warning: data.val is data, these are training images")
    return f"{', '.join(evaluations)}: {'; '.join(descriptions)}"


def evaluated_model(backbone: nn.Module, config: EvalConfig) -> nn.Module:
    """Return the backbone, wrapped if ``eval.layers``, ``eval.flip`` or ``eval.scales`` need it."""
    layers, flip, scales = config.layers, config.flip, config.scales
    model = PooledLayers(backbone, layers, config.pool) if layers else backbone
    if not flip and set(scales) <= {1.0}:
        return model
    return AveragedViews(model, backbone, flip=flip, scales=scales or [1.0])


def pooled_layers(model: nn.Module) -> PooledLayers | None:
    """Return the ``PooledLayers`` in a module made by ``evaluated_model``, or None."""
    inner = model.model if isinstance(model, AveragedViews) else model
    return inner if isinstance(inner, PooledLayers) else None


def evaluate_features(
    backbone: nn.Module, components: dict[str, Component], train: Features, test: Features
) -> dict[str, float]:
    """Run every evaluation on the features of a backbone made by ``evaluated_model``.

    Args:
        backbone: Module made by ``evaluated_model``.
        components: Evaluations by name.
        train: Features of this rank's training images.
        test: Features of this rank's test images; the object ``train`` if they are the same.

    Returns:
        Metrics by name: ``knn_top1``, or ``knn_top1_layer3`` and so on for hidden layers.
    """
    layers = pooled_layers(backbone)
    if layers is None:
        return run_evaluations(components, train, test)
    row: dict[str, float] = {}
    columns = zip(train.split(layers.widths), test.split(layers.widths), strict=True)
    for number, (of_train, of_test) in zip(layers.numbers, columns, strict=True):
        same = test is train  # k-NN excludes each image from its own neighbors
        scores = run_evaluations(components, of_train, of_train if same else of_test)
        row |= {f"{name}_layer{number}": value for name, value in scores.items()}
    return row


def run_evaluations(
    components: dict[str, Component], train: Features, test: Features
) -> dict[str, float]:
    """Run every evaluation on the same features and merge their results.

    An evaluation with ``takes_parts = True`` gets only this rank's features; other evaluations get
    the features of all ranks. An evaluation with ``seeds`` above 1 runs once for each seed,
    starting with ``seed``, and its metrics are means over seeds.

    Args:
        components: Evaluations by name.
        train: This rank's training features.
        test: This rank's test features.

    Returns:
        Metrics by name.

    Raises:
        UserError: If two evaluations return a metric of the same name, a result is not a number, or
            an evaluation cannot use the features or labels.
    """
    row: dict[str, float] = {}
    gathered: tuple[Features, Features] | None = None
    for key, component in components.items():
        evaluation = EVALUATIONS[component.name](**component.args)
        features = train, test
        if not getattr(evaluation, "takes_parts", False):
            if gathered is None:
                first = _of_all_ranks(train)
                gathered = first, first if test is train else _of_all_ranks(test)
            features = gathered
        scores = over_seeds(evaluation, features, f"eval.evaluations.{key}")
        if duplicates := sorted(scores.keys() & row.keys()):
            raise UserError(
                f"eval.evaluations.{key}: {', '.join(duplicates)} is the result of an evaluation "
                "before it, too; keep one of them"
            )
        row |= scores
    return row


def over_seeds(evaluation: Any, inputs: tuple[Any, ...], key: str) -> dict[str, float]:
    """Return the metrics of an evaluation, or their means over its seeds.

    Args:
        evaluation: The evaluation; ``seeds`` above 1 repeats it with ``seed``, ``seed + 1``, ...
        inputs: Arguments to call it with.
        key: Config key of the evaluation, for errors.

    Raises:
        UserError: If the evaluation cannot be called or does not take these arguments, or as in
            ``flat_scores``.
    """
    names = ["train", "test"] if len(inputs) == 2 else ["backbone", "config", "sources", "device"]
    if not callable(evaluation):
        kind = type(evaluation)
        raise UserError(f"{source_of(kind)}: {key}: {kind.__name__} has no method __call__")
    check_takes(evaluation, names, key)
    seeds = evaluation.seeds if hasattr(evaluation, "seed") and hasattr(evaluation, "seeds") else 1
    if seeds == 1:
        return flat_scores(evaluation(*inputs), key)
    rows = [
        flat_scores(replace(evaluation, seed=evaluation.seed + number)(*inputs), key)
        for number in range(seeds)
    ]
    return {name: Figure.over_seeds([row[name] for row in rows]) for name in rows[0]}


def flat_scores(metrics: Any, key: str, prefix: str = "") -> dict[str, float]:
    """Return results of an evaluation as floats; ``{"a": {"b": 1}}`` becomes ``{"a/b": 1.0}``.

    Args:
        metrics: Name -> number, NumPy scalar or tensor of one element; mappings may be nested.
        key: Config key of the evaluation, for the error.
        prefix: Prefix of all names, such as ``a/`` inside the mapping ``a``.

    Raises:
        UserError: If a value has any other type, or a metric has the name of a column of training.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(f"{key} gives {metrics!r:.60}; metrics by name are expected")
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if f"{prefix}{name}" in RESERVED_COLUMNS:
            raise UserError(f"{key}: {name} is a column of training; give the metric another name")
        if isinstance(value, Mapping):
            flat |= flat_scores(value, key, f"{prefix}{name}/")
            continue
        try:
            flat[f"{prefix}{name}"] = value if isinstance(value, Figure) else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"{key}: {prefix}{name} is {value!r:.60}; a number is expected"
            ) from None
    return flat


def _of_all_ranks(part: Features) -> Features:
    """Return the features of all ranks in rank order, which is the order of the data set."""
    if world_size() == 1:
        return part
    return Features.joined(gather_objects(part))
