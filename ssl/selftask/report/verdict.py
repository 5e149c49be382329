"""Verdict on a run in words, from its rows, events and status."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from selftask.data.loading.data_stall import LONG_ENOUGH, TOO_MUCH, Cores, workers_advice
from selftask.errors import with_noun
from selftask.hooks.watching.limits import (
    CHANCE_STEPS,
    COLLAPSED,
    FROM_STEP,
    MIN_RANK,
    beats_chance,
    stays_at_chance,
)
from selftask.logs.unreadable import unreadable_sentences
from selftask.report.overview.durations import show_seconds
from selftask.report.record import Column, RunRecord, columns_of

Kind = Literal["good", "warning", "bad", "plain"]
MIN_ROWS = 4  # training rows needed for a verdict on learning
GAIN = 0.02  # smallest change of an accuracy that is mentioned
CLEAR_GAIN = 0.05  # change of an accuracy above the noise of some hundred images
NARROWER = 4.0  # smallest ratio of first and last effective_rank that is mentioned
LEAST_FALL = 1e-3  # smallest relative change of the loss that counts
MANY_EVALUATIONS = 0.25  # time of evaluations relative to training that is mentioned
DECODED = ("folder", "list", "glob", "table", "webdataset", "frames", "lmdb", "hdf5")


@dataclass(frozen=True)
class Finding:
    """One statement about a run."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Verdict:
    """Outcome of a run in one line, and other findings.

    ``learns`` is whether the run learns, regardless of its state, or None if that is unknown.
    """

    kind: Kind
    headline: str
    findings: list[Finding] = field(default_factory=list)
    learns: bool | None = None


def verdict_of(record: RunRecord) -> Verdict:
    """Return the verdict on a run: how it ended, or whether it learns."""
    rows = record.rows
    columns = columns_of(row for row in rows if "lr" in row and row.get("loss") is not None)
    learning, learns = _learning(columns, record)
    others = [
        *_evaluations(rows),
        *_narrower(columns),
        *_data_wait(record),
        *_evaluation_time(record),
        *(Finding("warning", text) for text in unreadable_sentences(record.status)),
        *_interruptions(record.events),
        *_warnings(record.events),
    ]
    ended = _ended(record)
    if ended is None:
        return Verdict(learning.kind, learning.text, others, learns)
    headline, _, more = ended.text.partition(". ")  # advice follows the first sentence of an error
    details = [Finding(ended.kind, more)] if more else []
    shown = [*details, *([learning] if rows else []), *others]
    return Verdict(ended.kind, headline, shown, learns)


def collapse_limits(record: RunRecord) -> tuple[float, float]:
    """Return the limits of emb_std and effective_rank below which embeddings have collapsed."""
    std, rank = (record.setting(f"hooks.health.{name}") for name in ("collapsed", "min_rank"))
    return COLLAPSED if std is None else float(std), MIN_RANK if rank is None else float(rank)


def _ended(record: RunRecord) -> Finding | None:
    """Return how the run ended, or None if it finished or is still running."""
    status = record.status
    state = status.get("state")
    step = status.get("step")
    at_step = f" at step {step:,}" if isinstance(step, int) else ""
    if state == "failed":
        error = str(status.get("error") or "").strip().splitlines()
        reason = error[0] if error else "no reason was recorded"
        rank = status.get("rank")
        where = f"{at_step} on rank {rank}" if rank is not None else at_step
        return Finding("bad", f"failed{where}: {reason}")
    if state in ("interrupted", "requeued"):
        by = f" by {status['by']}" if status.get("by") else ""
        after = "waits in the queue" if state == "requeued" else "the same command resumes it"
        return Finding("warning", f"{state}{at_step}{by}; {after}")
    if record.lost:
        outcome = "hangs" if record.state == "hung" else "does not run any more"
        return Finding("bad", f"{outcome}: {record.lost}")
    if state is None and not record.rows and not record.events:
        return Finding("plain", "nothing is recorded yet")
    return None


def _learning(columns: Mapping[str, Column], record: RunRecord) -> tuple[Finding, bool | None]:
    """Return whether the run learns, in words, and as a bool or None if unknown."""
    if "loss" not in columns:
        return Finding("plain", "no step is logged yet"), None
    if collapse := _collapse(columns, record):
        return Finding("bad", collapse), False
    if still := _frozen(columns, record.events):
        return Finding("bad", still), False
    last = columns["loss"].steps[-1]
    if len(columns["loss"].steps) < MIN_ROWS or last < FROM_STEP:
        early = f"too early to say whether it learns: {with_noun(last, 'step')}"
        return Finding("plain", early), None
    loss, gain = _fall(columns["loss"]), _gain(record.rows)
    ratio = columns.get("chance_ratio")
    if ratio is not None and last >= CHANCE_STEPS:
        return _against_chance(ratio, loss, gain)
    if loss.falls and gain.known and not gain.rises:
        stays = f"the features do not improve: {_and(gain.text, loss.text)}"
        return Finding("warning", stays), False
    if loss.falls or gain.is_clear:
        return Finding("good", f"learning: {_and(loss.text, gain.text)}"), True
    return Finding("warning", f"no sign of learning: {_and(loss.text, gain.text)}"), False


def _against_chance(ratio: Column, loss: Trend, gain: Trend) -> tuple[Finding, bool | None]:
    first, now = ratio.values[0], _end(ratio.values)
    lowest = min(ratio.values)
    facts = _and(loss.text, gain.text)
    if beats_chance(now):
        return Finding("good", f"learning: {facts}; the loss is {now:.2f} times chance"), True
    if not beats_chance(lowest) and gain.is_clear:
        slow = f"slowly learning: {facts}; but the loss is still {now:.2f} times chance"
        return Finding("warning", slow), True
    if stays_at_chance(first, lowest):
        advice = "another optimizer.lr, a shorter optimizer.warmup or weaker views"
        return Finding("bad", f"at chance: {facts}; try {advice}"), False
    if beats_chance(lowest):
        step = ratio.steps[ratio.values.index(lowest)]
        lost = f"back at chance: the loss is {now:.2f} times chance, {lowest:.2f} at step {step:,}"
        return Finding("bad", lost), False
    if loss.falls and not gain.known:
        so_far = f"no better than chance so far: {facts}, {now:.2f} times it"
        return Finding("warning", so_far), None
    return Finding("bad", f"at chance: {facts}; the loss is {now:.2f} times chance"), False


def _collapse(columns: Mapping[str, Column], record: RunRecord) -> str | None:
    """Return a text on when the embeddings collapsed, or None."""
    least_std, least_rank = collapse_limits(record)
    for name, limit, meaning in (
        ("emb_std", least_std, "embeddings of different images are almost the same"),
        ("effective_rank", least_rank, "embeddings vary in one direction only"),
    ):
        column = columns.get(name)
        since = _since(column, limit) if column else None
        if column and since is not None:
            when = "from the start" if since == column.steps[0] else f"at step {since:,}"
            return f"collapsed {when}: {meaning} ({name} {column.values[-1]:.3g}, limit {limit:g})"
    return None


def _since(column: Column, limit: float) -> int | None:
    """Return the step from which on all values are below the limit.

    None if the last value is not below it, or if the last step is before ``FROM_STEP``.
    """
    if column.steps[-1] < FROM_STEP:
        return None
    since = None
    for step, value in zip(reversed(column.steps), reversed(column.values), strict=True):
        if value >= limit:
            break
        since = step
    return since


def _frozen(columns: Mapping[str, Column], events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why no weights change, or None if nothing indicates that."""
    lr = columns.get("lr")
    rates = [value for name in columns if name.startswith("lr/") for value in columns[name].values]
    if lr and len(lr.values) > 1 and not any([*lr.values, *rates]):
        return "nothing is trained: the learning rate is 0; raise optimizer.lr"
    for event in events:
        if event.get("event") == "warning" and (event.get("data") or {}).get("about") == "weights":
            return f"nothing is trained: {event.get('text', '')}"
    return None


@dataclass(frozen=True)
class Trend:
    """Trend of a column, also in words; ``text`` is empty if there is no such column."""

    text: str = ""
    falls: bool = False
    rises: bool = False
    is_clear: bool = False  # whether it rises by more than noise
    known: bool = True  # False for a column of fewer than two values


def _fall(loss: Column) -> Trend:
    """Compare the start and the end of the loss, ignoring changes within its noise."""
    part = max(2, len(loss.values) // 5)
    start, end = loss.values[:part], loss.values[-part:]
    first, last = statistics.fmean(start), statistics.fmean(end)
    jumps = [abs(b - a) for a, b in pairwise(loss.values)]
    noise = 2 * statistics.median(jumps) / part**0.5
    if abs(first - last) <= max(noise, LEAST_FALL * abs(first)):
        return Trend(f"the loss stays at {last:.4g}")
    falls = last < first
    words = "fell" if falls else "rose"
    return Trend(f"the loss {words} from {loss.values[0]:.4g} to {_end(loss.values):.4g}", falls)


def _gain(rows: Sequence[Mapping[str, Any]]) -> Trend:
    """Compare the first and the last accuracy of an evaluation, of k-NN if there is one."""
    accuracies = _accuracies(rows)
    if not accuracies:
        return Trend(known=False)
    name, column = next(iter(accuracies.items()))
    first, last = column.values[0], column.values[-1]
    if len(column.values) < 2:
        return Trend(f"{name} is {last:.3g}", known=False)
    gain = last - first
    words = "stays near" if abs(gain) < GAIN else "rose to" if gain > 0 else "fell to"
    text = f"{name} {words} {last:.3g}, from {first:.3g} at step {column.steps[0]:,}"
    return Trend(text, rises=gain >= GAIN, is_clear=gain >= CLEAR_GAIN)


def _accuracies(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Return accuracies of evaluations during training, k-NN first."""
    columns = columns_of(row for row in rows if "lr" not in row)
    names = [name for name in columns if name.endswith("top1")]
    return {name: columns[name] for name in sorted(names, key=lambda n: not n.startswith("knn"))}


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report evaluations whose best value is clearly better than the last."""
    findings = []
    for name, column in _accuracies(rows).items():
        best = max(column.values)
        if best - column.values[-1] >= GAIN:
            step, now = column.steps[column.values.index(best)], column.values[-1]
            if step:
                text = f"{name} was best at step {step:,} ({best:.3g}) and is {now:.3g} now; "
                text += f"train.keep_best.metric={name} keeps the best checkpoint"
            else:
                text = f"{name} is {now:.3g}, less than before training ({best:.3g})"
            findings.append(Finding("warning", text))
    return findings


def _narrower(columns: Mapping[str, Column]) -> list[Finding]:
    """Report embeddings that now vary in far fewer directions than at first."""
    column = columns.get("effective_rank")
    if column is None or len(column.values) < MIN_ROWS:
        return []
    first, now = column.values[0], _end(column.values)
    if now <= 0 or first < NARROWER * now:
        return []
    ranks = f"effective_rank {first:.3g} at first, now {now:.3g}"
    text = f"embeddings vary in ever fewer directions: {ranks}"
    return [Finding("warning", text)]


def data_wait(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share (0 to 1) of training time spent waiting for data, or None if not known yet.

    The first row is ignored, since it includes the start of the workers.
    """
    waited_s = trained_s = evaluated_s = 0.0
    before: int | None = None
    for row in rows:
        evaluated_s += row.get("eval_s", 0.0)
        if row.get("data_wait") is None or not row.get("step_s"):
            continue
        if before is not None:
            seconds = row["step_s"] * max(1, row["step"] - before)  # with evaluations
            waited_s += seconds * row["data_wait"]
            trained_s += max(0.0, seconds - evaluated_s)
        before, evaluated_s = row["step"], 0.0
    return min(1.0, waited_s / trained_s) if trained_s else None


def _data_wait(record: RunRecord) -> list[Finding]:
    share = data_wait(record.rows)
    if share is None or share <= TOO_MUCH or record.rows[-1]["step"] < LONG_ENOUGH:
        return []
    return [Finding("warning", f"waiting for data {share:.0%} of the time: {_data_advice(record)}")]


def _data_advice(record: RunRecord) -> str:
    processes = record.setting("launch.processes")
    workers, cpus = record.setting("data.num_workers"), record.environment.get("cpus")
    advice = None
    if isinstance(workers, int) and isinstance(cpus, int):
        advice = workers_advice(workers, Cores(cpus, processes if type(processes) is int else 1))
    if record.setting("data.cache") == "none" and record.setting("data.name") in DECODED:
        return f"set data.cache=ram{f', or: {advice}' if advice else ''}"
    return advice or "cheaper or fewer views, or smaller images (data.max_side), would help"


def _evaluation_time(record: RunRecord) -> list[Finding]:
    spent, trained = record.evaluation_s, record.clock.seconds[-1]
    if not trained or spent <= MANY_EVALUATIONS * trained or spent < 60:
        return []
    text = f"evaluations took {show_seconds(spent)}, training {show_seconds(trained)}"
    return [Finding("warning", f"{text}; eval.every sets how often they run")]


def _interruptions(events: Sequence[Mapping[str, Any]]) -> list[Finding]:
    counts = Counter(event.get("event") for event in events)
    words = {"resumed": counts["resume"], "requeued": counts["requeue"]}
    parts = [f"{word} {with_noun(n, 'time')}" for word, n in words.items() if n]
    return [Finding("plain", ", ".join(parts))] if parts else []


def _warnings(events: Sequence[Mapping[str, Any]]) -> list[Finding]:
    texts = [str(event.get("text", "")) for event in events if event.get("event") == "warning"]
    if not texts:
        return []
    number = len(texts)
    return [Finding("warning", f"{with_noun(number, 'warning')}, the last: {texts[-1]}")]


def _end(values: Sequence[float]) -> float:
    """Return the median of the last tenth of the values."""
    return statistics.median(values[-max(1, len(values) // 10) :])


def _and(*texts: str) -> str:
    return ", ".join(text for text in texts if text)
