"""Retrieval benchmarks: queries, database and ground truth.

M images in the database.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.source import Source
from selftask.errors import UserError, check_known, nearest_path
from selftask.evaluate.retrieval.buildings import Truth, read_instre, read_truth
from selftask.evaluate.retrieval.names import ImageNames
from selftask.evaluate.tables import read_rows
from selftask.files.paths import is_file

COPYDAYS = "copydays"
_COLUMNS = ("query", "positives", "junk", "box")

Positions = np.ndarray
"""Positions in the database, int64."""
Judge = Callable[[int], tuple[Positions, Positions] | None]
"""Query number -> (positives, ignored images); None if the query is in another part."""


@dataclass(frozen=True)
class Query:
    """A query image."""

    image: int  # index in the source
    box: tuple[float, float, float, float] | None = None  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class Benchmark:
    """Queries, database, and ground truth for each part of the benchmark."""

    queries: list[Query]
    database: np.ndarray  # (M,) int64: indices in the source
    parts: Mapping[str, Judge]  # such as ``easy``, ``strong``; one empty name if there are no parts
    trapezoidal: bool = False  # the trapezoidal rule of the benchmark's authors


def open_benchmark(source: Source, truth: str | None) -> Benchmark:
    """Return the benchmark of images with a ground truth.

    Args:
        source: The images.
        truth: None for images of the same class; ``copydays``; a ``gnd_*.pkl`` of Oxford or Paris,
            revisited or original; ``gnd_instre.mat``; or a table with a row for each query.

    Raises:
        UserError: If the ground truth is missing, damaged, or names images that do not exist.
    """
    if truth is None:
        return _of_classes(source)
    if truth == COPYDAYS:
        return _of_copydays(source)
    path = Path(truth).expanduser()
    if not is_file(path):
        raise UserError(f"truth={truth}: there is no such file; {nearest_path(path)}")
    if path.suffix == ".pkl":
        return _of_buildings(source, read_truth(path), path)
    if path.suffix == ".mat":
        return _of_instre(source, path)
    if path.suffix in (".csv", ".tsv"):
        return _of_table(source, path)
    raise UserError(
        f"truth={truth}: expected `copydays`, a .pkl of Oxford or Paris, the .mat of "
        "INSTRE, or a .csv"
    )


def _of_classes(source: Source) -> Benchmark:
    """Use each image as a query; images of its class are positives, and the query is ignored."""
    labels = source.labels
    if labels is None or (labels == NO_LABEL).any():
        raise UserError(
            "data: retrieval needs to know which images belong together: a sub-folder for each "
            "class, or truth=FILE"
        )
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels))
    members = np.split(order, ends[:-1])
    if all(len(images) < 2 for images in members):
        raise UserError("data: no class has two images, so there is nothing to find")

    def judge(query: int) -> tuple[Positions, Positions]:
        return members[labels[query]], np.array([query])

    queries = [Query(index) for index in range(len(source))]
    return Benchmark(queries, np.arange(len(source)), {"": judge})


def _of_buildings(source: Source, truth: Truth, path: Path) -> Benchmark:
    """Return revisited Oxford or Paris in parts (arXiv:1803.11285, section 3), or the original."""
    names = ImageNames(source)
    database = [names.find(name, f"truth={path}: imlist") for name in truth.images]
    queries = [
        Query(names.find(name, f"truth={path}: qimlist"), truth_of.box)
        for name, truth_of in zip(truth.queries, truth.known, strict=True)
    ]

    def judge(
        positives: tuple[str, ...], ignored: tuple[str, ...], query: int
    ) -> tuple[Positions, Positions]:
        truth_of = truth.known[query]
        right, left_out = (
            np.concatenate([getattr(truth_of, name) for name in names])
            for names in (positives, ignored)
        )
        return right, left_out

    parts = {
        "easy": partial(judge, ("easy",), ("junk", "hard")),
        "medium": partial(judge, ("easy", "hard"), ("junk",)),
        "hard": partial(judge, ("hard",), ("junk", "easy")),
    }
    if not truth.is_revisited:
        parts = {"": parts["medium"]}
    return Benchmark(queries, np.array(database), parts, trapezoidal=True)


def _of_instre(source: Source, path: Path) -> Benchmark:
    """Return INSTRE: objects in any place of an image, without boxes (Wang and Jiang, 2015).

    The file is that of Iscen et al. (arXiv:1611.05113): names ``imlist`` and ``qimlist``, and
    ``gnd`` with the positives of each query, counted from 1.
    """
    queries, images, positives = read_instre(path)
    names = ImageNames(source)
    database = [names.find(name, f"truth={path}: imlist") for name in images]
    query_list = [Query(names.find(name, f"truth={path}: qimlist")) for name in queries]

    def judge(query: int) -> tuple[Positions, Positions]:
        return positives[query], np.empty(0, dtype=np.int64)

    return Benchmark(query_list, np.array(database), {"": judge}, trapezoidal=True)


def _of_copydays(source: Source) -> Benchmark:
    """Return Copydays: find originals of copies among distractors (Douze et al., CIVR 2009).

    The folders are ``original``, ``strong``, ``jpegqual/3``, ... The numbers of a copy and its
    original differ in the last two digits only. Images in ``distractors`` are also in the database.
    """
    paths = [source.path(index) for index in range(len(source))]
    folders = [os.path.dirname(path) for path in paths]
    roots = {os.path.dirname(f) for f in folders if os.path.basename(f) == "original"}
    if len(roots) != 1:
        raise UserError(
            f"truth=copydays: data has {len(roots)} folders `original`; one is expected, next to "
            "`strong` and others with the copies"
        )
    (root,) = roots
    splits = [os.path.relpath(folder, root or ".").split(os.sep) for folder in folders]
    is_database = [split[0] in ("original", "distractors") for split in splits]
    database = np.flatnonzero(is_database)
    copies = np.flatnonzero(np.logical_not(is_database)).tolist()
    if not copies:
        raise UserError("truth=copydays: there are no copies next to the folder `original`")
    blocks = {
        _block(paths[image]): position
        for position, image in enumerate(database)
        if splits[image][0] == "original"
    }
    orphans = [paths[image] for image in copies if _block(paths[image]) not in blocks]
    if orphans:
        raise UserError(
            f"truth=copydays: {len(orphans)} copies have no original, such as {orphans[0]}; "
            "copies of 200000.jpg are called 200001.jpg to 200099.jpg"
        )
    names = ["_".join(splits[image]) for image in copies]

    def judge(part: str, query: int) -> tuple[Positions, Positions] | None:
        if names[query] != part:
            return None
        right = np.array([blocks[_block(paths[copies[query]])]])
        return right, np.array([], dtype=np.int64)

    parts = {name: partial(judge, name) for name in sorted(set(names))}
    return Benchmark([Query(image) for image in copies], database, parts, trapezoidal=True)


def _block(path: str) -> int:
    """Return the number that is common to an image and its copies."""
    stem = os.path.basename(path).partition(".")[0]
    if not stem.isdecimal():
        raise UserError(f"truth=copydays: {path}: expected a number as name, such as 200001.jpg")
    return int(stem) // 100


def _of_table(source: Source, path: Path) -> Benchmark:
    """Return the benchmark of a table with a row per query; the database is all images."""
    names = ImageNames(source)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    queries: list[Query] = []
    truths: list[tuple[Positions, Positions]] = []
    rows = read_rows(path, _COLUMNS[:2], f"truth={path}", delimiter)
    for column in rows[0]:
        check_known(column, _COLUMNS, f"truth={path}: unknown column {column!r}")
    for line, row in enumerate(rows, start=2):
        where = f"truth={path}:{line}"

        def all_of(cell: str | None, where: str = where) -> list[int]:
            return [names.find(name.strip(), where) for name in (cell or "").split(";") if name]

        query = names.find(row["query"] or "", where)
        queries.append(Query(query, _box(row.get("box"), where)))
        ignored = [*all_of(row.get("junk")), query]
        truths.append((np.array(all_of(row["positives"]), np.int64), np.array(ignored)))
    return Benchmark(queries, np.arange(len(source)), {"": lambda query: truths[query]})


def _box(cell: str | None, where: str) -> tuple[float, float, float, float] | None:
    if not cell:
        return None
    try:
        left, top, right, bottom = map(float, cell.split())
    except ValueError:
        raise UserError(
            f"{where}: box {cell!r}; expected left top right bottom, such as 0 0 9 9"
        ) from None
    if not (left < right and top < bottom):
        raise UserError(f"{where}: box {cell!r} is empty")
    return left, top, right, bottom
