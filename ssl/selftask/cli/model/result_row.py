"""Additions to the metrics of an evaluation: confidence intervals and scores of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selftask.data.data_module import val_key
from selftask.errors import aligned
from selftask.evaluate.figure import Figure, image_interval
from selftask.evaluate.image_scores import packed_scores
from selftask.report.compare.interval import interval
from selftask.report.layers import by_layer


def described(
    figures: Mapping[str, float], digests: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics with their intervals, and ``image_scores`` for ``evaluations.jsonl``.

    The second result is empty if no metric has a score for each image.

    Args:
        figures: Metrics of an evaluation by name.
        digests: As for ``image_scores``.
    """
    scores = image_scores(figures, digests)
    return with_intervals(figures), {"image_scores": scores} if scores else {}


def with_intervals(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with their 95 % intervals, as ``NAME_low`` and ``NAME_high``.

    Only metrics with a score for each image have these intervals, see ``image_interval``. Metrics
    of several seeds also have ``NAME_seeds_low`` and ``NAME_seeds_high``, by
    Student's t over the seeds.
    """
    extended: dict[str, float] = {}
    for name, value in row.items():
        extended[name] = float(value) if isinstance(value, Figure) else value
        if not isinstance(value, Figure):
            continue
        if value.scores is not None:
            low, high = image_interval(value.scores)
            extended |= {f"{name}_low": low, f"{name}_high": high}
        of_seeds = interval(value.of_seeds)
        if of_seeds is not None and of_seeds.half is not None:
            extended[f"{name}_seeds_low"] = of_seeds.mean - of_seeds.half
            extended[f"{name}_seeds_high"] = of_seeds.mean + of_seeds.half
    return extended


def layer_table(row: Mapping[str, float]) -> list[str]:
    """Return lines with the metrics of each hidden layer; none for fewer than two layers.

    Args:
        row: Metrics and intervals by name, as returned by ``with_intervals``; ``knn_top1_layer3``
            is the metric ``knn_top1`` of layer 3.
    """
    cells: dict[int, dict[str, str]] = {}
    for metric, values in by_layer(row).items():
        for layer, value in values.items():
            name = f"{metric}_layer{layer}"
            low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
            interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
            cells.setdefault(layer, {})[metric] = f"{value:.3f}{interval}"
    if len(cells) < 2:
        return []
    metrics = list(dict.fromkeys(name for layer in cells.values() for name in layer))
    rows = [["layer", *metrics]]
    rows += [[str(n), *(cells[n].get(name, "") for name in metrics)] for n in sorted(cells)]
    return aligned(rows, right=[0])


def image_scores(row: Mapping[str, float], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return per-image scores and digests of the data by metric; empty if no metric has scores.

    Args:
        row: Metrics by name; those of ``data.val_sets`` are called ``NAME/metric``.
        digests: Digest of each set of images by its key; without ``data.val``, ``data`` is the test
            set.
    """
    scored = {
        name: value.scores
        for name, value in row.items()
        if isinstance(value, Figure) and value.scores is not None
    }
    tests = {name: val_key(name.rpartition("/")[0]) for name in scored}
    return {
        name: {
            "train": digests["data"],
            "test": digests.get(tests[name], digests["data"]),
            **packed_scores(scores),
        }
        for name, scores in scored.items()
    }
