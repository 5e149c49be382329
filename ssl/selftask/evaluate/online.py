"""Evaluations of a run while it trains: the backbone as it is now, on the labelled images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selftask.evaluate.features import extract_features
from selftask.registry import EVALUATIONS

if TYPE_CHECKING:
    from selftask.task import Task


def evaluate_task(task: Task) -> dict[str, float]:
    """The numbers of ``eval.evaluations``; none without labels. The run's state stays untouched."""
    components = task.config.eval.evaluations
    if not (components and task.feed.has_test and task.feed.num_classes):
        return {}
    backbone = task.loss.export_backbone(task.base_model)
    train = extract_features(backbone, task.feed.labelled_samples(), device=task.device)
    test = extract_features(backbone, task.feed.test_samples(), device=task.device)
    row: dict[str, float] = {}
    for component in components.values():
        row |= EVALUATIONS[component.name](**component.args)(train, test)
    return row
