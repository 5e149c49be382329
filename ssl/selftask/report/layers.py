"""Metrics over the hidden layers of the backbone, each from its newest evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from selftask.files.received import is_number
from selftask.report.charts import Chart, Curve, charts_html
from selftask.report.curves import MAX_CURVES, is_share
from selftask.report.page import Section
from selftask.report.record import RunRecord


def by_layer(row: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return the metrics of hidden layers: metric -> layer -> value.

    Args:
        row: Metrics by name; ``knn_top1_layer3`` is the metric ``knn_top1`` of layer 3.
    """
    metrics: dict[str, dict[int, float]] = {}
    for name, value in row.items():
        match = re.fullmatch(r"(.+)_layer(\d{1,6})", name)
        if match and is_number(value):
            metrics.setdefault(match[1], {})[int(match[2])] = value
    return metrics


def layers_section(record: RunRecord) -> Section:
    """Return the section with a chart over layers; it is empty if fewer than two were evaluated."""
    charts = layer_charts(record)
    return Section("Hidden layers", charts_html(charts, id="layers", x="layer"), "hidden-layers")


def layer_charts(record: RunRecord) -> list[Chart]:
    """Return a chart of accuracies and a chart of each other metric, at most 12, over layers."""
    curves = {curve.label: curve for curve in _curves(record)}.values()  # the newest of each name
    shares = [curve for curve in curves if is_share(curve.label, curve.values)]
    others = [Chart(curve.label, [curve]) for curve in curves if curve not in shares]
    charts = [Chart("Accuracy", shares[:MAX_CURVES]), *others[:MAX_CURVES]]
    return [replace(chart, smooth=False) for chart in charts if chart.curves]


def _curves(record: RunRecord) -> Iterator[Curve]:
    during: dict[str, Any] = next((row for row in reversed(record.rows) if "lr" not in row), {})
    rows = [("during training", during), *(("", row) for row in record.evaluations)]
    for when, row in rows:
        for metric, values in by_layer(row).items():
            if len(values) > 1:
                layers = sorted(values)
                yield Curve(f"{metric} {when}".strip(), layers, [values[n] for n in layers])
