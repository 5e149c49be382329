"""Evaluations of a run while it trains: the backbone as it is now, on the labelled images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from selftask.collectives import gather_objects, world_size
from selftask.evaluate.features import Features, extract_features
from selftask.registry import EVALUATIONS

if TYPE_CHECKING:
    from selftask.config.schema import Component
    from selftask.task import Task


def evaluate_task(task: Task) -> dict[str, float]:
    """The numbers of ``eval.evaluations``; none without labels. The run's state stays untouched."""
    components = task.config.eval.evaluations
    if not (components and task.feed.has_test and task.feed.num_classes):
        return {}
    backbone = task.export_backbone()
    train, test = (
        _of_all_ranks(extract_features(backbone, samples, device=task.device))
        for samples in (task.feed.labelled_samples(), task.feed.test_samples())
    )
    return run_evaluations(components, train, test)


def run_evaluations(
    components: dict[str, Component], train: Features, test: Features
) -> dict[str, float]:
    """Every evaluation on the same features; their numbers together."""
    row: dict[str, float] = {}
    for component in components.values():
        row |= EVALUATIONS[component.name](**component.args)(train, test)
    return row


def _of_all_ranks(part: Features) -> Features:
    """The parts of all ranks in rank order, which is the order of the data set."""
    if world_size() == 1:
        return part
    parts = gather_objects(part)
    return Features(
        *(
            torch.cat([getattr(p, name) for p in parts])
            for name in ("features", "targets", "indices")
        )
    )
