"""Curves of one run: the charts and their columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from selftask.logs.checkpoint_results import tables
from selftask.report.charts import Chart, Curve, Line, Mark, charts_html
from selftask.report.page import Section
from selftask.report.record import RunRecord, columns_of
from selftask.report.verdict import collapse_limits

MARKED = ("resume", "requeue", "stop", "warning", "failure")  # events with a line in each chart
MAX_MARKS = 200
MAX_CURVES = 12  # per chart
SCALE = 30.0  # columns whose sizes differ by a larger factor are in different charts
MIB = 2**20

_WITH_CHARTS = """
    step epoch loss loss_median lr weight_decay images_per_s data_wait step_s step_s_median
    memory_mb device_memory_mb device_reserved_mb device_memory_now_mb device_reserved_now_mb
    eta_s eta_recent_s eval_s eval_images_per_s
    chance_loss chance_ratio emb_std mean_cosine effective_rank target_entropy
"""  # columns that have their own chart or need none
_KNOWN = frozenset(_WITH_CHARTS.split())

CHARTS = {
    "loss": Chart("Loss"),
    "chance_ratio": Chart(
        "Loss relative to chance", lines=[Line("chance", 1.0)], note="1: nothing learned"
    ),
    "lr": Chart("Learning rate", smooth=False, from_zero=True),
    "weight_decay": Chart("Weight decay", smooth=False, from_zero=True),
    "emb_std": Chart("Spread of embeddings", note="emb_std: 1 is even, 0 is a collapse"),
    "effective_rank": Chart(
        "Effective rank of embeddings", note="number of directions in which embeddings vary"
    ),
    "target_entropy": Chart(
        "Entropy of targets over prototypes", from_zero=True, note="0: all images have one"
    ),
    "images_per_s": Chart("Images per second", from_zero=True),
    "data_wait": Chart("Waiting for data", format="percent", from_zero=True),
    "step_s": Chart("Time per step", format="seconds", from_zero=True),
}  # column -> chart without curves; also used by comparisons


def curves_section(record: RunRecord) -> Section:
    """Return the section with all charts of a run; it is empty if no chart has data."""
    clocks, marks = {"": record.clock}, marks_of(record)
    return Section("Curves", charts_html(run_charts(record), clocks=clocks, marks=marks), "curves")


def run_charts(record: RunRecord) -> list[Chart]:
    """Return the charts of a run; a chart without data has no curves."""
    least_std, least_rank = collapse_limits(record)
    decays = record.columns.get("weight_decay")
    is_scheduled = decays is not None and len(set(decays.values)) > 1  # else it is in the config
    columns = {
        "lr": _rates(record),
        "weight_decay": ["weight_decay"] if is_scheduled else [],
        "emb_std": ["emb_std", "mean_cosine"],
        "step_s": ["step_s", "step_s_median"],
    }
    lines = {
        "loss": chance_lines(record.last("chance_loss")),
        "emb_std": [Line("collapse", least_std)],
        "effective_rank": [Line("collapse", least_rank)],
    }
    loss, relative_loss, *others = (
        _filled(replace(chart, lines=lines.get(n, chart.lines)), record, columns.get(n, [n]))
        for n, chart in CHARTS.items()
    )
    evaluations = (*_evaluations(record), *_of_checkpoints(record))
    return [loss, relative_loss, *evaluations, *_others(record), *others, _memory(record)]


def marks_of(record: RunRecord) -> list[Mark]:
    """Return the newest ``MAX_MARKS`` events of the kinds in ``MARKED``, to draw in charts."""
    marks = [
        Mark(event.get("step") or 0, str(event["event"]), str(event.get("text", "")))
        for event in record.events
        if event.get("event") in MARKED
    ]
    return marks[-MAX_MARKS:]


def chance_lines(chance: float | None) -> list[Line]:
    """Return the line of the loss of an uninformed network, if it is known."""
    return [] if chance is None else [Line(f"chance {chance:.4g}: nothing learned", chance)]


def _evaluations(record: RunRecord) -> Iterator[Chart]:
    """Yield charts of columns of evaluation rows, such as ``knn_top1``."""
    names = [name for name in _evaluated(record) if name not in _KNOWN]
    accuracies = [name for name in names if is_share(name, record.columns[name].values)]
    yield _filled(Chart("Evaluations", smooth=False), record, accuracies)
    yield from _by_scale(record, "Evaluations", [n for n in names if n not in accuracies])


def _of_checkpoints(record: RunRecord) -> Iterator[Chart]:
    """Yield charts of results of ``selftask eval suite``; labels include its settings."""
    shares: list[Curve] = []
    others: list[Curve] = []
    for settings, table in tables(record.results).items():
        columns = columns_of({"step": step, **metrics} for step, metrics in table.items())
        for name, column in columns.items():
            label = " ".join([name, *settings])
            chosen = shares if is_share(name, column.values) else others
            chosen.append(Curve(label, column.steps, column.values))
    title, note = "Evaluations of checkpoints", "by selftask eval suite"
    for curves in (shares, others):
        yield Chart(title, curves[:MAX_CURVES], note=note, smooth=False)


def _others(record: RunRecord) -> Iterator[Chart]:
    """Yield charts of loss terms and of columns that hooks log."""
    evaluated = set(_evaluated(record))
    names = [n for n in record.columns if n not in _KNOWN | evaluated and not n.startswith("lr/")]
    groups: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("ms_"):
            continue
        title, slash, _ = name.partition("/")
        groups.setdefault(title if slash else "Loss terms and others", []).append(name)
    for title, members in groups.items():
        yield from _by_scale(record, title, members)
    sections = {name: name.removeprefix("ms_") for name in names if name.startswith("ms_")}
    curves = _curves(record, sections, 1e-3)
    yield Chart("Time in each part of a step", curves, format="seconds", from_zero=True)


def _memory(record: RunRecord) -> Chart:
    names = {
        "memory_mb": "host",
        "device_memory_mb": "device",
        "device_reserved_mb": "device, reserved",
        "device_memory_now_mb": "device, at the row",
        "device_reserved_now_mb": "device, reserved, at the row",
    }
    curves = _curves(record, names, MIB)
    return Chart("Memory", curves, format="bytes", smooth=False, from_zero=True)


def _curves(record: RunRecord, labels: Mapping[str, str], factor: float = 1) -> list[Curve]:
    """Return the curves of some columns, with their labels and their values times a factor."""
    return [
        Curve(label, column.steps, [value * factor for value in column.values])
        for name, label in labels.items()
        if (column := record.columns.get(name))
    ]


def _filled(chart: Chart, record: RunRecord, names: Sequence[str]) -> Chart:
    """Return a chart with the curves of these columns, at most ``MAX_CURVES``."""
    curves = _curves(record, {name: name for name in names[:MAX_CURVES]})
    note = chart.note
    if len(names) > MAX_CURVES:
        note = f"{note} the first {MAX_CURVES} of {len(names)}".strip()
    return replace(chart, curves=curves, note=note)


def _rates(record: RunRecord) -> list[str]:
    """Return the columns of learning rates: one for each parameter group, or else ``lr``."""
    return [column for column in record.columns if column.startswith("lr/")] or ["lr"]


def _evaluated(record: RunRecord) -> list[str]:
    """Return the columns of evaluation rows, which have no learning rate."""
    names = (name for row in record.rows if "lr" not in row for name in row)
    return list(dict.fromkeys(name for name in names if name in record.columns))


def is_share(name: str, values: Sequence[float]) -> bool:
    """Return True if a metric's name is that of an accuracy, and its values are from 0 to 1."""
    words = ("top1", "top5", "accuracy", "precision", "recall")
    return any(word in name for word in words) and all(0 <= value <= 1 for value in values)


def _by_scale(record: RunRecord, title: str, names: list[str]) -> Iterator[Chart]:
    """Yield charts, each with columns whose median sizes differ by at most a factor ``SCALE``."""
    remaining = sorted(names, key=lambda name: _size(record, name))
    while remaining:
        least = _size(record, remaining[0])
        together = [
            name for name in remaining if _size(record, name) <= SCALE * least
        ] or remaining[:1]
        remaining = [name for name in remaining if name not in together]
        ordered = [name for name in record.columns if name in together]
        shown = ordered[0] if len(ordered) == 1 else title
        yield _filled(Chart(shown), record, ordered)


def _size(record: RunRecord, name: str) -> float:
    return statistics.median(map(abs, record.columns[name].values))
