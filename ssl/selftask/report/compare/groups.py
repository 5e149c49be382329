"""Group runs that differ only in their seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from selftask.logs.rows import is_measured
from selftask.report.compare.differences import SEED, differing, flat, identity, short_names
from selftask.report.compare.interval import Interval, interval
from selftask.report.overview.run_line import RunLine, read_line
from selftask.report.overview.table import smallest_first
from selftask.report.record import RunRecord

MIB = 2**20


@dataclass
class Member:
    """One run of a comparison."""

    record: RunRecord
    line: RunLine
    name: str  # run folder relative to the common parent folder
    settings: dict[str, str] = field(default_factory=dict)  # config as dotted key -> text

    @property
    def is_complete(self) -> bool:
        """True if the run has finished, so that its last values are final."""
        return self.line.state == "finished"

    @property
    def seed(self) -> str:
        return self.settings.get(SEED, "")

    def best(self, column: str) -> float | None:
        """Return the best value of a column, smallest or largest depending on its name, or None."""
        series = self.record.columns.get(column)
        if series is None:
            return None
        return min(series.values) if smallest_first(column) else max(series.values)

    @property
    def seconds(self) -> float | None:
        """Seconds of training, without evaluations and pauses; None if no step was logged."""
        return self.record.clock.seconds[-1] or None

    @property
    def images_per_s(self) -> float | None:
        """Median throughput of the rows, or None if it was not logged."""
        rates = self.record.columns.get("images_per_s")
        return statistics.median(rates.values) if rates else None

    @property
    def memory(self) -> float | None:
        """Peak memory in bytes: of the device or else of the process; None if not logged."""
        columns = self.record.columns
        megabytes = columns.get("device_memory_mb") or columns.get("memory_mb")
        return max(megabytes.values) * MIB if megabytes else None


@dataclass
class Group:
    """Runs whose configs are equal except for the seed and keys that do not affect the result."""

    label: str
    number: int  # position in the ranking, which determines the color
    members: list[Member]

    @property
    def counted(self) -> list[Member]:
        """Runs over which means are computed: the complete ones, or all if none is complete."""
        return [m for m in self.members if m.is_complete] or self.members

    def final(self, column: str) -> Interval | None:
        return self._over([member.record.last(column) for member in self.counted])

    def best(self, column: str) -> Interval | None:
        return self._over([member.best(column) for member in self.counted])

    def cost(self, name: str) -> Interval | None:
        """Return the mean of a property of the runs; None if no run has it.

        Args:
            name: ``seconds``, ``images_per_s`` or ``memory`` of ``Member``.
        """
        return self._over([getattr(member, name) for member in self.counted])

    def _over(self, values: Sequence[float | None]) -> Interval | None:
        return interval([value for value in values if value is not None])


@dataclass
class Comparison:
    """Runs in groups, and the columns by which they can be compared."""

    groups: list[Group]
    keys: list[str]  # keys in which the configs differ
    evaluations: list[str]
    ranked_by: str = ""  # column passed to `rank`

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]

    @property
    def metrics(self) -> list[str]:
        """Columns of the tables: evaluations, then the loss."""
        has_loss = any("loss" in member.record.columns for member in self.members)
        return [*self.evaluations, *(["loss"] if has_loss else [])]

    @property
    def of_one_loss(self) -> bool:
        """True if losses are comparable: all runs have the same method with equal settings."""
        return not any(key.startswith("method.") for key in self.keys)

    def rank(self, column: str) -> None:
        """Sort the groups and the runs in each by the last value of a column; number the groups.

        The best is first. Groups and runs without a value are last.
        """
        self.ranked_by = column
        sign = 1 if smallest_first(column) else -1

        def order(value: float | None) -> tuple[bool, float]:
            return value is None, sign * (value or 0.0)

        for group in self.groups:
            group.members.sort(key=lambda member: order(member.record.last(column)))
        self.groups.sort(key=lambda g: order(final.mean if (final := g.final(column)) else None))
        for number, group in enumerate(self.groups):
            group.number = number


def compare(records: Sequence[RunRecord], names: Sequence[str]) -> Comparison:
    """Group runs whose configs are equal except for the seed, in the given order.

    Keys that do not affect the result, such as ``out``, are not compared.

    Args:
        records: The runs.
        names: Displayed name of each run.
    """
    keys = differing([record.config for record in records])
    members = [
        Member(record, read_line(record.folder), name, flat(record.config))
        for record, name in zip(records, names, strict=True)
    ]
    groups: dict[str, list[Member]] = {}
    for member in members:
        # A run without a readable config is a group of its own.
        same = identity(member.record.config) if member.record.config else member.name
        groups.setdefault(same, []).append(member)
    labels = _labels(list(groups.values()), [key for key in keys if key != SEED])
    evaluations = dict.fromkeys(name for m in members for name in _evaluated(m.record))
    pairs = zip(labels, groups.values(), strict=True)
    return Comparison(
        [Group(label, number, runs) for number, (label, runs) in enumerate(pairs)],
        keys,
        list(evaluations),
    )


def _evaluated(record: RunRecord) -> list[str]:
    """Return the columns of evaluations during training, those of the newest rows first."""
    names = dict.fromkeys(n for row in reversed(record.rows) if "lr" not in row for n in row)
    return [name for name in names if name not in ("step", "epoch") and not is_measured(name)]


def _labels(groups: Sequence[Sequence[Member]], keys: Sequence[str]) -> list[str]:
    """Return a label for each group, such as ``lr 0.003``, with few keys that distinguish it."""
    chosen = [key for key in keys if key == "method.name"]

    def values_of(keys: Sequence[str]) -> list[tuple[str, ...]]:
        return [tuple(runs[0].settings.get(key, "") for key in keys) for runs in groups]

    while len(set(values_of(chosen))) < len(groups):
        gains = {key: len(set(values_of([*chosen, key]))) for key in keys if key not in chosen}
        if not gains or max(gains.values()) == len(set(values_of(chosen))):
            break
        chosen.append(max(gains, key=lambda key: (gains[key], key.endswith(".name"))))
    short = short_names(keys)
    labels = []
    for runs in groups:
        settings = runs[0].settings
        named = [key for key in keys if key in chosen and key in settings]
        named.sort(key=lambda key: key != "method.name")
        parts = [
            settings[key] if key.endswith(".name") else f"{short[key]} {settings[key]}"
            for key in named
        ]
        labels.append(", ".join(parts) or runs[0].record.recipe)
    for number, label in enumerate(labels):
        if labels.count(label) > 1:
            labels[number] = f"{label} ({groups[number][0].name})"
    return labels
