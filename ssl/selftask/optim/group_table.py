"""The table of parameter groups, for the log and ``groups.txt``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from selftask.config.schema.optimizer import OptimizerConfig
from selftask.errors import aligned
from selftask.optim.param_groups import Settings

_HEADER = ("tensors", "parameters", "lr", "weight decay", "frozen until", "schedule", "names")


def group_table(
    settings: Iterable[Settings], config: OptimizerConfig, *, batch: int, most: int = 3
) -> list[str]:
    """Return the table of parameter groups as lines, with a header.

    Args:
        settings: Settings of every trained parameter.
        config: The ``optimizer`` section.
        batch: Number of samples per step, over all ranks.
        most: Maximum number of name patterns to show for each group; 0 for all.
    """
    groups: dict[tuple[object, ...], list[Settings]] = {}
    for setting in settings:
        groups.setdefault(setting.key, []).append(setting)
    return aligned([_HEADER, *(_row(group, config, batch, most) for group in groups.values())])


def _row(
    group: Sequence[Settings], config: OptimizerConfig, batch: int, most: int
) -> tuple[str, ...]:
    setting = group[0]
    section = config.lr_section(batch, setting.schedule)
    peak = section.get("start")
    decay = setting.weight_decay
    return (
        str(len(group)),
        f"{sum(member.parameter.value.numel() for member in group):,}",
        f"x {setting.lr:.4g}" if peak is None else f"{peak * setting.lr:.4g}",
        decay["name"] if isinstance(decay, dict) else f"{decay:.4g}",
        f"step {setting.frozen_steps}" if setting.frozen_steps else "-",
        section["name"],
        _names([member.parameter.name for member in group], most),
    )


def _names(names: Sequence[str], most: int) -> str:
    """Return names as one pattern, such as ``blocks.{*.weight, *.bias}``; * stands for numbers."""
    parts = [name.split(".") for name in names]
    columns = zip(*(part[:-1] for part in parts), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    rests = [re.sub(r"\b\d+\b", "*", ".".join(part[shared:])) for part in parts]
    patterns = list(dict.fromkeys(rests))
    if most and len(patterns) > most:
        patterns = [*patterns[:most], f"and {len(patterns) - most} more"]
    inside = patterns[0] if len(patterns) == 1 else f"{{{', '.join(patterns)}}}"
    return ".".join([*parts[0][:shared], inside])
