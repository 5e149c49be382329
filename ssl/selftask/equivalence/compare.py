"""Merge the records of W ranks and compare them with those of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RTOL = 1e-9  # relative to the largest element of a tensor, in float64
SMALL = 1e-3  # tensors below this fraction of the largest one are compared relative to that one
RESUMED = "2 > 1 > 2"
_STEPWISE = ("samples", "inputs", "loss", "terms", "gradients", "method")
_FINAL = ("network", "optimizer")

Record = dict[str, Any]  # record of one rank, see ``RecordedTask.record``


@dataclass(frozen=True)
class Row:
    """Difference between a quantity on several ranks and on one rank, and its location.

    It is the largest one in the first step whose difference is above ``RTOL``, else in all steps.
    """

    quantity: str
    ranks: str
    difference: float
    place: str
    step: float = math.inf  # from 1; inf for the final state

    @property
    def ok(self) -> bool:
        return self.difference <= RTOL


def merge(records: list[Record]) -> Record:
    """Merge the records of all ranks of a run.

    Samples and inputs are concatenated in rank order, and terms of the loss are averaged. All other
    quantities are kept for each rank, since each rank must agree with the run on one rank.
    """

    def by_step(quantity: str) -> list[tuple[Any, ...]]:
        """Return the values of all ranks for each step."""
        return list(zip(*(record[quantity] for record in records), strict=True))

    def mean(name: str, terms: Sequence[dict[str, Tensor]]) -> Tensor:
        return sum((of_rank[name] for of_rank in terms), start=torch.zeros(())) / len(terms)

    inputs, terms = by_step("inputs"), by_step("terms")
    return {
        "samples": [{"index": [torch.cat(of_ranks)]} for of_ranks in by_step("samples")],
        "inputs": [{k: [torch.cat([i[k] for i in step])] for k in step[0]} for step in inputs],
        "terms": [{name: [mean(name, step)] for name in step[0]} for step in terms],
        "loss": [{"": list(of_ranks)} for of_ranks in by_step("loss")],
        **{name: [_by_name(step) for step in by_step(name)] for name in ("gradients", "method")},
        **{part: _by_name([record[part] for record in records]) for part in _FINAL},
    }


def _by_name(of_ranks: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all ranks by name, with None for a rank that has no such value."""
    names = {name for values in of_ranks for name in values}
    return {name: [values.get(name) for values in of_ranks] for name in names}


def compare(one: Record, records: list[Record], ranks: str) -> Iterator[Row]:
    """Compare a run on several ranks with the run on one rank; yield one row per quantity.

    Args:
        one: Merged record of the run on one rank.
        records: Records of all ranks of the other run.
        ranks: Label of the rows, such as ``"2"``.
    """
    many = merge(records)
    for quantity in _STEPWISE:
        yield _compare_steps(quantity, one[quantity], many[quantity], ranks)
    for part in _FINAL:
        yield Row(part, ranks, *_largest(one[part], many[part]))


def _compare_steps(quantity: str, one: Sequence[Any], many: Sequence[Any], ranks: str) -> Row:
    """Return the row of the first step above the tolerance, or of the largest difference."""
    if len(one) != len(many):
        location = f"{len(one)} steps on one rank, here {len(many)}"
        return Row(quantity, ranks, math.inf, location, min(len(one), len(many)) + 1)
    worst = Row(quantity, ranks, 0.0, "")
    for step, (a, b) in enumerate(zip(one, many, strict=True), start=1):
        difference, location = _largest(a, b)
        if difference > worst.difference:
            location = f"step {step}: {location}".rstrip(": ")
            worst = Row(quantity, ranks, difference, location, step)
        if not worst.ok:
            break
    return worst


def compare_resume(undisturbed: Record, legs: list[list[Record]]) -> Iterator[Row]:
    """Compare a resumed run with an uninterrupted one; yield rows for samples and final state.

    Args:
        undisturbed: Merged record of the uninterrupted run.
        legs: Records of each leg of the resumed run.
    """
    merged = [merge(records) for records in legs]
    samples = [batch for leg in merged for batch in leg["samples"]]
    yield _compare_steps("samples", undisturbed["samples"], samples, RESUMED)
    for part in _FINAL:
        yield Row(part, RESUMED, *_largest(undisturbed[part], merged[-1][part]))
    states = (run["method"][-1] for run in (undisturbed, merged[-1]))
    yield Row("method", RESUMED, *_largest(*states))


def _largest(one: dict[str, Any], many: dict[str, Any]) -> tuple[float, str]:
    """Return the largest relative difference over all tensors and ranks, and its location.

    Both arguments map names to one value per rank; the first rank of ``one`` is the reference.
    """
    kinds = _largest_of_kind(values[0] for values in one.values())
    worst, location = 0.0, ""
    for name in sorted({*one, *many}):
        reference = one.get(name, [None])[0]
        for rank, value in enumerate(many.get(name, [None])):
            difference = relative_difference(reference, value, kinds)
            if difference > worst:
                worst, location = difference, name
                if rank and len(many[name]) > 1:
                    location = f"{name} (rank {rank})".lstrip()
    return worst, location


def _largest_of_kind(tensors: Iterable[Any]) -> float:
    floating = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    return max((float(t.abs().max()) for t in floating if t.numel()), default=0.0)


def relative_difference(one: Any, many: Any, largest: float = 0.0) -> float:
    """Return the largest difference of two tensors, relative to their largest element.

    Args:
        one: A tensor, None (beside a tensor: zeros), or any other value, such as a string.
        many: The value to compare with.
        largest: Largest element of all tensors of this kind. Tensors below ``SMALL * largest`` may
            be rounding errors, so their difference is relative to ``SMALL * largest``.

    Returns:
        The relative difference; infinity if shapes, types, integers or values that are no tensors
        differ, or if an element is not finite.
    """
    if one is None and many is None:
        return 0.0
    if one is None and isinstance(many, Tensor):
        one = torch.zeros_like(many)
    if many is None and isinstance(one, Tensor):
        many = torch.zeros_like(one)
    if not (isinstance(one, Tensor) and isinstance(many, Tensor)):
        return 0.0 if one == many else math.inf
    if one.shape != many.shape or one.dtype != many.dtype:
        return math.inf
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, many) else math.inf
    if not one.numel():
        return 0.0
    distance = float((one - many).abs().max())
    scale = max(float(one.abs().max()), float(many.abs().max()), SMALL * largest)
    if not math.isfinite(distance + scale):
        return math.inf
    return distance / scale if distance else 0.0
