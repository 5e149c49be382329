"""Nearest rows by cosine.

N rows, B queries, E features, k neighbors.

The search takes B * N * E multiply-adds. CPUs with the matching instructions compute them twice as
fast in bfloat16 and four times as fast in int8. A first pass in the lower precision keeps all rows
that may be among the k nearest, given the rounding errors. Only these rows are compared in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.distributed.device import computes_in_bfloat16
from selftask.distributed.heartbeat import track
from selftask.evaluate.features import FileRows, in_blocks

QUERIES = 512
"""Number of queries of a search; with fewer, it takes more time per query."""
_BLOCK = 8192  # rows; with 512 queries, their products have 16 MiB, and larger blocks are slower
_GROUP = 32  # products that are compared with a threshold at once, by their maximum
_SPARE = 4  # rows that the first pass keeps per neighbor
_FEWEST = 64  # queries from which on a first pass is faster
_DEVIATIONS = 8.0  # standard deviations of the difference of two rounding errors, in int8


class _UnitRows:
    """Rows of a file of features, scaled to length 1 when they are read."""

    def __init__(self, rows: FileRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> Tensor:
        return F.normalize(self._rows[rows], dim=1)


class Bank:
    """Nearest-neighbor search by cosine in a set of features.

    Args:
        features: (N, E). Rows of a file are read block by block in each search.
        first_pass: Data type of the first pass, ``torch.bfloat16`` or ``torch.int8``. After
            bfloat16, the neighbors are exactly those of float32; after int8, unless a rounding
            error exceeds 8 standard deviations. The first pass is used for rows in memory, on CPUs
            with bfloat16 instructions.
    """

    _rows: Tensor | _UnitRows  # (N, E), normalized

    def __init__(
        self, features: Tensor | FileRows, *, first_pass: torch.dtype = torch.bfloat16
    ) -> None:
        if isinstance(features, FileRows):
            self._rows = _UnitRows(features)
        else:
            self._rows = F.normalize(features, dim=1)
        self._first_pass: torch.dtype | None = first_pass
        self._rounded: _Rounded | None = None

    def nearest(self, queries: Tensor, k: int, left_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and row indices (B, min(k, N)) of the nearest rows, nearest first.

        If k is N or more, an excluded row is last, with a cosine of -inf.

        Args:
            queries: (B, E), normalized.
            k: Number of neighbors.
            left_out: (B,) row that is excluded for each query, -1 for none.
        """
        k = min(k, len(self._rows))
        cosine, row = self._nearest(queries, min(k + 1, len(self._rows)))
        cosine = cosine.masked_fill(row == left_out[:, None], -torch.inf)
        cosine, order = cosine.topk(k, dim=1)
        return cosine, row.gather(1, order)

    def nearest_others(self) -> tuple[Tensor, Tensor]:
        """Return the cosine and the index of the nearest other row of each row, (N,) each."""
        nearest = []
        for first in range(0, len(self._rows), QUERIES):
            queries = self._rows[first : first + QUERIES]
            own_rows = torch.arange(first, first + len(queries), device=queries.device)
            nearest.append(self.nearest(queries, 1, own_rows))
        cosine, row = (torch.cat(parts)[:, 0] for parts in zip(*nearest, strict=True))
        return cosine, row

    def _nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, most = self._rows, _SPARE * k
        dtype = self._first_pass if most < len(rows) and _is_faster(queries) else None
        if isinstance(rows, _UnitRows) or dtype is None:
            return _largest(queries, rows, k)
        if self._rounded is None:
            self._rounded = _Rounded.of(rows, dtype)
        rounded, margin = self._rounded.round(queries)
        product, row = _largest(rounded, self._rounded.rows, k, margin, most)
        counts = (product >= margin.below(product[:, k - 1 : k])).sum(dim=1).tolist()
        cosine = queries.new_full(row.shape, -torch.inf)
        for query, near, count, values in zip(queries, row, counts, cosine, strict=True):
            torch.mv(rows.index_select(0, near[:count]), query, out=values[:count])
        cosine, order = cosine.topk(k, dim=1)
        row = row.gather(1, order)
        if most in counts:  # rows that were not kept may be near, too
            again = torch.tensor(counts) == most
            cosine[again], row[again] = _largest(queries[again], rows, k)
            if 2 * int(again.sum()) > len(queries):
                self._first_pass = self._rounded = None  # differences are below rounding errors
        return cosine, row


class _Margin(NamedTuple):
    """Tolerance below the k-th largest product within which a row may be among the k nearest."""

    absolute: Tensor | float  # (B, 1)
    relative: float

    def below(self, kth: Tensor) -> Tensor:
        """Return the smallest product within the tolerance of the k-th largest one, (B, 1)."""
        return kth - self.absolute - self.relative * kth.abs()


_NO_MARGIN = _Margin(0.0, 0.0)


class _Rounded(NamedTuple):
    """Rows for a first pass; subtracting their mean keeps the order of products with a query."""

    rows: Tensor  # (N, E), in bfloat16 or int8
    unit: float  # value of a 1 in rows
    error: float  # largest norm of a rounding error
    norm: float  # largest norm of a row

    @classmethod
    def of(cls, rows: Tensor, dtype: torch.dtype) -> _Rounded:
        """Subtract the mean of rows (N, E), and round them to ``dtype``."""
        mean = rows.mean(dim=0)
        unit = max(float(_unit(block - mean, dtype).max()) for block in in_blocks(rows))
        parts, errors, norms = [], [0.0], [0.0]
        for block in in_blocks(rows):
            centered = block - mean
            parts.append(_round(centered, unit, dtype))
            errors.append(float((centered - parts[-1].float() * unit).norm(dim=1).max()))
            norms.append(float(centered.norm(dim=1).max()))
        return cls(torch.cat(parts), unit, max(errors), max(norms))

    def round(self, queries: Tensor) -> tuple[Tensor, _Margin]:
        """Round normalized queries (B, E); return them and the margin of their products."""
        dtype = self.rows.dtype
        unit = _unit(queries, dtype)
        rounded = _round(queries, unit, dtype)
        error = (queries - rounded.float() * unit).norm(dim=1, keepdim=True)
        if dtype == torch.int8:
            variance = (error.square() * self.norm**2 + self.error**2) / queries.shape[1]
            return rounded, _Margin(_DEVIATIONS * (2 * variance).sqrt() / (unit * self.unit), 0.0)
        sums = queries.shape[1] * 2**-23 * self.norm  # additions are in float32
        bound = error * self.norm + (1 + error) * self.error + sums
        return rounded, _Margin(2 * bound, 2**-7)  # products are rounded, too


def _unit(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales (N, 1) by which rows (N, E) are divided before they are rounded."""
    if dtype == torch.bfloat16:
        return rows.new_ones(len(rows), 1)
    return rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127


def _round(rows: Tensor, unit: Tensor | float, dtype: torch.dtype) -> Tensor:
    return rows.bfloat16() if dtype == torch.bfloat16 else (rows / unit).round().to(dtype)


def _is_faster(queries: Tensor) -> bool:
    """Return True if a first pass saves time."""
    return queries.device.type == "cpu" and len(queries) >= _FEWEST and computes_in_bfloat16()


def _largest(
    queries: Tensor,
    bank: Tensor | _UnitRows,
    k: int,
    margin: _Margin = _NO_MARGIN,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest products of each query in descending order, and their rows.

    Args:
        queries: (B, E).
        bank: (N, E).
        k: Number of products, at most N.
        margin: Products within this margin below the k-th are returned, too.
        most: Largest number of products; k if None.

    Returns:
        Products (B, M) in float32 or higher, M between k and ``most``, and rows (B, M).
    """
    size = _BLOCK * 2 if queries.dtype == torch.bfloat16 else _BLOCK
    best = torch.empty(len(queries), 0, device=queries.device)
    row = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for first in track("k-NN", range(0, len(bank), size)):
        products = _products(queries, bank[first : first + size])
        least = margin.below(best[:, k - 1 : k]) if best.shape[1] >= k else None
        values, columns = _top(products, k, margin, most or k, least)
        best, row = torch.cat([best, values], dim=1), torch.cat([row, columns + first], dim=1)
        best, order = best.topk(min(most or k, best.shape[1]), dim=1)
        row = row.gather(1, order)
    return best, row


def _top(
    products: Tensor, k: int, margin: _Margin, most: int, least: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the largest products of each query in a block, and their columns, unordered.

    Args:
        products: (B, N).
        k: Number of products.
        margin: Products within this margin below the k-th are returned, too.
        most: More products are not needed.
        least: (B, 1), or None. Smaller products are not needed.

    Returns:
        Products and columns, (B, M) each. A product of -inf means none.
    """
    num_groups = -(-products.shape[1] // _GROUP)
    is_small = least is None and num_groups < 2 * k
    if products.device.type != "cpu" or is_small or not len(products):
        return _all(products, most)
    info = torch.finfo if products.is_floating_point() else torch.iinfo
    padding = -products.shape[1] % _GROUP
    padded = F.pad(products, (0, padding), value=info(products.dtype).min) if padding else products
    columns = torch.arange(padded.shape[1])
    if products.dtype == torch.bfloat16:  # torch has a fast maximum of bfloat16 over rows only
        groups, columns = (each.unflatten(-1, (_GROUP, -1)).mT for each in (padded, columns))
    else:
        groups, columns = (each.unflatten(-1, (-1, _GROUP)) for each in (padded, columns))
    dtype = _dtype_of(products)
    highest = groups.amax(dim=2).to(dtype)  # (B, groups)
    if least is None:
        least = margin.below(highest.topk(k, dim=1).values[:, -1:])
    query, group = (highest >= least).nonzero(as_tuple=True)
    if len(query) > 2 * most * len(products):  # many are equal
        return _all(products, most)
    members = groups[query, group].to(dtype)
    chosen, member = (members >= least[query]).nonzero(as_tuple=True)
    query, columns = query[chosen], columns[group[chosen], member]
    counts = query.bincount(minlength=len(products))
    rank = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
    shape = (len(products), int(counts.max()))
    values = torch.full(shape, -torch.inf, dtype=dtype)
    values[query, rank] = members[chosen, member]
    return values, columns.new_zeros(shape).index_put((query, rank), columns)


def _all(products: Tensor, most: int) -> tuple[Tensor, Tensor]:
    values, columns = products.topk(min(most, products.shape[1]), dim=1)
    return values.to(_dtype_of(products)), columns


def _dtype_of(products: Tensor) -> torch.dtype:
    return torch.promote_types(products.dtype, torch.float32)


def _products(queries: Tensor, block: Tensor) -> Tensor:
    """Return ``queries @ block.T``; float32 on a CPU uses oneDNN, twice as fast as MKL on AMD."""
    if queries.dtype == torch.int8:
        return torch._int_mm(queries, block.T)
    dense = queries.dtype == torch.float32 and queries.device.type == "cpu" and len(queries) > 0
    if dense and torch.backends.mkldnn.is_available():
        return F.linear(queries.to_mkldnn(), block.to_mkldnn()).to_dense()
    return queries @ block.T
