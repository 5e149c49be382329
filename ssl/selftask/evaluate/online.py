"""Evaluations during a run: the current backbone on the labelled images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from selftask.distributed.collectives import gather_objects, world_size
from selftask.evaluate.features import Features, extract_features
from selftask.evaluate.label_counts import LabelCounts, check_label_counts
from selftask.registry import EVALUATIONS

if TYPE_CHECKING:
    from selftask.config.schema import Component, Config
    from selftask.data.loading.open_data import Sources
    from selftask.task import Task


def evaluate_task(task: Task) -> dict[str, float]:
    """Return the metrics of ``eval.evaluations``; none without labels. Keeps the run's state."""
    components = task.config.eval.evaluations
    if not (components and task.data_module.has_test and task.data_module.num_classes):
        return {}
    backbone = task.export_backbone()
    train, test = (
        extract_features(backbone, samples, device=task.device)
        for samples in (task.data_module.labelled_samples(), task.data_module.test_samples())
    )
    return run_evaluations(components, train, test)


def check_evaluations(config: Config, sources: Sources) -> str | None:
    """Describe the labels of the evaluations of a run; None if there are no evaluations.

    Raises ConfigError if the labels do not allow them.
    """
    evaluations = config.eval.evaluations
    counts = LabelCounts.of_sources(sources) if sources.val is not None else None
    if counts is None or not (evaluations and len(counts.classes)):
        return None
    check_label_counts(evaluations, counts)
    told = f"evaluations ({', '.join(evaluations)}): {counts.describe()}"
    same = config.data.val == config.data.source
    return f"{told}; warning: data.val is data, these are training images" if same else told


def run_evaluations(
    components: dict[str, Component], train: Features, test: Features
) -> dict[str, float]:
    """Run every evaluation on the same features and merge their results.

    An evaluation gets the features of all ranks, or only this rank's if it has
    ``takes_parts = True``.

    Args:
        components: Evaluations by name.
        train: This rank's training features.
        test: This rank's test features.

    Returns:
        Metrics by name.
    """
    row: dict[str, float] = {}
    whole: tuple[Features, Features] | None = None
    for component in components.values():
        evaluation = EVALUATIONS[component.name](**component.args)
        if getattr(evaluation, "takes_parts", False):
            row |= evaluation(train, test)
            continue
        if whole is None:
            first = _of_all_ranks(train)
            whole = first, first if test is train else _of_all_ranks(test)
        row |= evaluation(*whole)
    return row


def _of_all_ranks(part: Features) -> Features:
    """Return the features of all ranks in rank order, which is the order of the data set."""
    if world_size() == 1:
        return part
    parts = gather_objects(part)
    return Features(
        *(
            torch.cat([getattr(p, name) for p in parts])
            for name in ("features", "targets", "indices")
        )
    )
