"""Retrieval with a frozen backbone: descriptors, ranking by cosine, average precision.

M images in the database, Q queries, D features of a descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.data.source import Source
from selftask.distributed.accelerator import forked_rng
from selftask.errors import UserError
from selftask.evaluate.retrieval.benchmark import Benchmark, Query
from selftask.evaluate.retrieval.descriptors import DescriptorOptions, Descriptors
from selftask.evaluate.retrieval.images import SizedImages
from selftask.evaluate.retrieval.metrics import (
    average_precision,
    precision_at,
    ranks_of_positives,
    trapezoidal_average_precision,
)
from selftask.evaluate.retrieval.whitening import Whitening
from selftask.logs import get_logger
from selftask.logs.stages import staged
from selftask.models.eval_mode import in_eval_mode

_PRODUCTS = 1 << 26  # maximum number of similarities in memory: 256 MiB

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(DescriptorOptions):
    """Options of descriptors, their comparison and metrics."""

    k: list[int] = setting([1, 5, 10], min=1)
    """Numbers of best images for which precision is reported."""
    crop_queries: bool = True
    """Whether queries with a box are cropped to it."""
    whiten_dim: int | None = setting(None, min=1)
    """Number of dimensions that whitening keeps; null: all."""


def evaluate_retrieval(
    backbone: nn.Module,
    config: Config,
    source: Source,
    benchmark: Benchmark,
    options: RetrievalOptions,
    *,
    device: torch.device,
    whiten: Source | None = None,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Return ``retrieval_map`` and ``retrieval_precision_at_K`` of each part of a benchmark.

    Means are over the queries of a part that have positives. Metrics of a named part have its name,
    such as ``retrieval_easy_map``. ``queries``, ``database`` and ``dimensions`` are also returned.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with the normalization of images and the handling of unreadable ones.
        source: Source of the images of queries and database.
        benchmark: Queries, database and ground truth.
        options: Descriptors and metrics.
        device: Device to compute on; the backbone is moved to it.
        whiten: Images for fitting a PCA whitening; None for no whitening.
        tell: Called with a line about the benchmark.

    Raises:
        UserError: If more images are unreadable than ``data`` allows, no query has an image to
            find, the backbone has no map to pool, features are not finite, or there are too few
            images to fit the whitening to.
    """
    model = Descriptors(backbone.to(device), options, device)

    def images(of: Source) -> SizedImages:
        return SizedImages(of, config, options.side, model.multiple)

    with in_eval_mode(backbone), forked_rng():
        if whiten is not None:
            everything = [Query(index) for index in range(len(whiten))]
            seen = _vectors(model, images(whiten), everything)
            kept = (model.to_whiten(vectors) for vectors in seen if vectors is not None)
            model.whitening = Whitening.fit(kept, options.whiten_dim)
        queries = [q if options.crop_queries else Query(q.image) for q in benchmark.queries]
        database, unreadable = _describe_database(model, images(source), benchmark)
        good = np.flatnonzero(~unreadable).tolist()
        described = {int(benchmark.database[position]): database[position] for position in good}
        descriptors = _describe_queries(model, images(source), queries, described)
    lost = {query.image for query, row in zip(queries, descriptors, strict=True) if row is None}
    lost |= {*benchmark.database.tolist()} - described.keys()
    if lost:
        tell(f"warning: images that cannot be read are left out: {len(lost)}")
    row = _judge(benchmark, descriptors, database.to(device), np.flatnonzero(unreadable), options.k)
    facts = {"queries": len(queries), "database": len(database), "dimensions": database.shape[1]}
    tell(
        "{queries} queries in {database} images, by descriptors of {dimensions} features".format(
            **facts
        )
    )
    return {**row, **facts}


def _vectors(
    model: Descriptors, images: SizedImages, queries: Sequence[Query]
) -> Iterator[list[Tensor] | None]:
    for pixels in staged("features", images.each(queries), len(queries)):
        yield None if pixels is None else model.vectors(pixels.to(model.device))


def _describe_database(
    model: Descriptors, images: SizedImages, benchmark: Benchmark
) -> tuple[Tensor, np.ndarray]:
    """Return descriptors (M, D), and a mask (M,) of unreadable images, whose rows are 0."""
    wanted = [Query(index) for index in benchmark.database.tolist()]
    rows: Tensor | None = None
    unreadable = np.zeros(len(wanted), dtype=bool)
    for position, vectors in enumerate(_vectors(model, images, wanted)):
        if vectors is None:
            unreadable[position] = True
            continue
        row = model.combine(vectors)
        if rows is None:
            rows = torch.zeros(len(wanted), len(row))
        rows[position] = row
    if rows is None:
        raise UserError("retrieval: no image of the database can be read")
    return rows, unreadable


def _describe_queries(
    model: Descriptors, images: SizedImages, queries: Sequence[Query], described: dict[int, Tensor]
) -> list[Tensor | None]:
    """Return the descriptor (D,) of each query, or None if it is unreadable.

    Args:
        model: Model for descriptors.
        images: Reader of the images.
        queries: The queries.
        described: Known descriptors of whole images by index, which are not computed again.
    """
    rows = [described.get(query.image) if query.box is None else None for query in queries]
    new = [number for number, row in enumerate(rows) if row is None]
    seen = _vectors(model, images, [queries[number] for number in new])
    for number, vectors in zip(new, seen, strict=True):
        rows[number] = None if vectors is None else model.combine(vectors)
    return rows


def _judge(
    benchmark: Benchmark,
    queries: Sequence[Tensor | None],
    database: Tensor,
    unreadable: np.ndarray,
    depths: Sequence[int],
) -> dict[str, float]:
    """Return the means of the metrics over the queries of each part.

    Args:
        benchmark: The benchmark.
        queries: Descriptors (D,); None is skipped.
        database: (M, D).
        unreadable: Positions in the database to ignore.
        depths: Numbers of best images of ``precision_at_K``.
    """
    precision = trapezoidal_average_precision if benchmark.trapezoidal else average_precision
    names = ["map", *(f"precision_at_{k}" for k in depths)]
    results: dict[str, list[list[float]]] = {part: [] for part in benchmark.parts}
    for number, scores in _similarities(queries, database):
        for part, judge in benchmark.parts.items():
            judged = judge(number)
            if judged is None:
                continue
            positives, ignored = judged
            ranks = ranks_of_positives(scores, positives, np.append(ignored, unreadable))
            if len(ranks):
                row = [precision(ranks), *(precision_at(ranks, k) for k in depths)]
                results[part].append(row)
    if not any(results.values()):
        raise UserError("retrieval: no query has an image to find")
    return {
        "_".join(filter(None, ("retrieval", part, name))): value
        for part, rows in results.items()
        if rows
        for name, value in zip(names, np.mean(rows, axis=0).tolist(), strict=True)
    }


def _similarities(
    queries: Sequence[Tensor | None], database: Tensor
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number and the cosines (M,) of each readable query, computed block by block."""
    size = max(1, _PRODUCTS // len(database))
    described = [(number, row) for number, row in enumerate(queries) if row is not None]
    for first in range(0, len(described), size):
        numbers, rows = zip(*described[first : first + size], strict=True)
        cosines = torch.stack(rows).to(database.device) @ database.T
        yield from zip(numbers, cosines.cpu().numpy(), strict=True)
