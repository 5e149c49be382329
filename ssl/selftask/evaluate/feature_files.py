"""Features as files: ``features.npy``, ``images.csv`` and ``features.json``, or a parquet file.

Rows are written batch by batch, so that memory does not grow with the number of images. Features
are float32 (N, E).
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selftask.data.source import Source
from selftask.errors import UserError, explained
from selftask.evaluate.features import Features, FileFeatures, FileRows
from selftask.files.addresses import is_remote
from selftask.files.replace import replacing

IMAGES, FACTS = "images.csv", "features.json"


def features_name(layer: int | None = None) -> str:
    """Return the file name of the features of a layer, or of the backbone's own output."""
    return "features.npy" if layer is None else f"features_layer{layer}.npy"


def write_features(
    out: Path,
    parts: Iterable[tuple[Features, Sequence[Features]]],
    source: Source,
    facts: dict[str, Any],
    layers: Sequence[int | None] = (None,),
) -> Path:
    """Write a folder with a file of features for each layer, ``images.csv`` and ``features.json``.

    Files of features get their final names when all other files exist. After an error, the files
    are removed.

    Args:
        out: The folder, which is created if needed.
        parts: Features of each batch, and the same features split into one block per layer.
        source: Source of the images, for their paths.
        facts: Content of ``features.json``; names of the classes are added, if there are any.
        layers: Numbers of the layers; None for the backbone's own output.

    Returns:
        The path of the last layer's file.

    Raises:
        UserError: If there are no images, or features are not finite.
        OSError: If a file cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    files: list[_NpyFile] = []
    try:
        with (out / IMAGES).open("w", encoding="utf-8", errors="surrogateescape", newline="") as f:
            rows = csv.writer(f)
            rows.writerow(("path", "label"))
            for batch, blocks in parts:
                batch.check_finite()
                numbers = batch.indices.tolist(), batch.targets.tolist()
                for index, label in zip(*numbers, strict=True):
                    rows.writerow((source.path(index), label if label >= 0 else ""))
                files = files or [
                    _NpyFile(out / features_name(layer), block.features.shape[1])
                    for layer, block in zip(layers, blocks, strict=True)
                ]
                for npy, block in zip(files, blocks, strict=True):
                    npy.append(block.features.numpy())
        if not files:
            raise UserError("there are no images to take features of")
        text = json.dumps(_with_classes(facts, source), indent=1) + "\n"
        (out / FACTS).write_text(text, encoding="utf-8")
        for npy in files:
            npy.close()
    except BaseException:  # a full disk, Ctrl-C: the command may be repeated
        written = [path for npy in files for path in (npy.part, npy.path)]
        for path in (out / IMAGES, out / FACTS, *written):
            path.unlink(missing_ok=True)
        raise
    return files[-1].path


def write_parquet(
    path: Path,
    parts: Iterable[tuple[Features, Sequence[Features]]],
    source: Source,
    facts: dict[str, Any],
    layers: Sequence[int | None] = (None,),
) -> tuple[int, int]:
    """Write one parquet file with the columns path, label (or null) and feature (lists of float32).

    The features of hidden layers are columns ``feature_layerN``. The metadata of the schema has the
    content of ``features.json`` under ``selftask``.

    Args:
        path: The file; its folder is created if needed.
        parts: Features of each batch, and the same features split into one block per layer.
        source: Source of the images, for their paths.
        facts: Content of ``features.json``; names of the classes are added, if there are any.
        layers: Numbers of the layers; None for the backbone's own output.

    Returns:
        The number of images, and the number of features of the last layer.

    Raises:
        UserError: If there are no images, features are not finite, or a path is not UTF-8.
        OSError: If the file cannot be written.
    """
    import pyarrow.parquet as parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    names = ["feature" if layer is None else f"feature_layer{layer}" for layer in layers]
    tables = (_arrow_table(source, batch, names, blocks) for batch, blocks in parts)
    num_images = 0
    with replacing(path) as temporary:
        first = next(tables, None)
        if first is None:
            raise UserError("there are no images to take features of")
        text = json.dumps(_with_classes(facts, source))
        schema = first.schema.with_metadata({"selftask": text})
        with parquet.ParquetWriter(temporary, schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table.cast(schema))
                num_images += len(table)
    return num_images, schema.types[-1].list_size


def _arrow_table(
    source: Source, batch: Features, names: Sequence[str], blocks: Sequence[Features]
) -> Any:
    """Return a batch as a table of pyarrow.

    Raises:
        UserError: If features are not finite, or a path is not UTF-8.
    """
    import pyarrow as pa

    batch.check_finite()
    labels = batch.targets.numpy()
    columns = {
        "path": [_utf8(source.path(index)) for index in batch.indices.tolist()],
        "label": pa.array(labels, mask=labels < 0),
    }
    for name, block in zip(names, blocks, strict=True):
        rows = block.features.numpy()
        columns[name] = pa.FixedSizeListArray.from_arrays(rows.ravel(), rows.shape[1])
    return pa.table(columns)


def _with_classes(facts: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the facts, with the names of the classes if the source has them."""
    names = source.class_names() if hasattr(source, "class_names") else None
    return facts if names is None else {**facts, "classes": [*map(str, names)]}


def _utf8(path: str) -> str:
    """Return the path; raise UserError if its bytes are no UTF-8, as parquet expects."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"out: parquet cannot hold the path {path!r}; give out=DIR") from error
    return path


def read_features(path: Path) -> tuple[FileFeatures, list[str]]:
    """Return features, read lazily, and the names of the classes, an empty list if unknown.

    Labels are read from ``images.csv`` in the same folder.

    Args:
        path: The folder, or one of its files of features.

    Raises:
        UserError: If a file is missing or damaged, or they have different numbers of rows.
    """
    path = path if path.suffix == ".npy" else _only_features(path)
    rows, images = FileRows.of(path), path.parent / IMAGES
    facts = path.parent / FACTS
    with explained(f"{images}: labels or {FACTS} cannot be read", OSError, ValueError):
        with images.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            texts = [row.get("label") or "" for row in csv.DictReader(file)]
        names = json.loads(facts.read_text("utf-8")).get("classes", []) if facts.exists() else []
    labels = [_label(text, f"{images}:{line}") for line, text in enumerate(texts, start=2)]
    if len(labels) != len(rows):
        raise UserError(f"{images}: has {len(labels)} images, and {path.name} {len(rows)}")
    return FileFeatures(rows, torch.tensor(labels)), names


def _only_features(folder: Path) -> Path:
    """Return the path of ``features.npy`` in a folder; raise UserError if the folder lacks it."""
    path = folder / features_name()
    if path.exists() or not folder.exists():
        return path
    if layers := sorted(file.name for file in folder.glob("features_layer*.npy")):
        raise UserError(f"{folder}: has features of layers; give one file, {folder / layers[0]}")
    raise UserError(f"{folder}: has no {path.name}; if `selftask features` was killed, repeat it")


def _label(text: str, line: str) -> int:
    """Return the number of a class, -1 for an empty cell.

    Raises:
        UserError: If the text is not a number; the message begins with ``line``.
    """
    if text and not text.isdecimal():
        raise UserError(f"{line}: label {text!r} is not the number of a class, such as 0")
    return int(text or -1)


def write_table(path: Path, images: Path, labels: Iterable[int]) -> None:
    """Write the images of ``images.csv`` with new labels, as a table that ``data=`` can read.

    Paths relative to the working directory become absolute, since paths in a table are relative to
    its folder.

    Args:
        path: The table to write.
        images: An ``images.csv``.
        labels: A label for each of its rows.
    """
    with (
        images.open(encoding="utf-8", errors="surrogateescape", newline="") as listed,
        path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        rows = csv.writer(file)
        rows.writerow(("path", "label"))
        for row, label in zip(csv.DictReader(listed), labels, strict=True):
            name = row["path"]
            rows.writerow((name if is_remote(name) else os.path.abspath(name), label))


def write_ranking(path: Path, images: Path, cosines: Sequence[float]) -> None:
    """Write path and cosine of the images of ``images.csv``, smallest cosine first.

    Args:
        path: The CSV file to write.
        images: An ``images.csv``.
        cosines: A cosine for each of its rows.
    """
    with images.open(encoding="utf-8", errors="surrogateescape", newline="") as listed:
        named = zip(cosines, (row["path"] for row in csv.DictReader(listed)), strict=True)
        ranked = sorted(named)
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "cosine"))
        rows.writerows((name, f"{cosine:.6f}") for cosine, name in ranked)


def indices_of(images: Path, source: Source) -> list[int]:
    """Return the index in the source of each row of ``images.csv``.

    Both must have the same order; images of the source may be missing from the file.
    """
    indices = iter(range(len(source)))
    with images.open(encoding="utf-8", errors="surrogateescape", newline="") as listed:
        return [
            next(index for index in indices if source.path(index) == row["path"])
            for row in csv.DictReader(listed)
        ]


class _NpyFile:
    """A ``.npy`` file of float32 rows; the number of rows is written at the end."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width, self.rows = path, width, 0
        self.part = path.with_name(f"{path.name}.part")
        self.file = self.part.open("wb")
        self._write_header()

    def append(self, rows: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(rows, dtype="<f4").data)
        self.rows += len(rows)

    def close(self) -> None:
        """Write the number of rows and rename the file to its final name."""
        self.file.seek(0)
        self._write_header()  # numpy reserves space for more digits, so the length is unchanged
        self.file.close()
        self.part.rename(self.path)

    def _write_header(self) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.width)}
        np.lib.format.write_array_header_1_0(self.file, header)
