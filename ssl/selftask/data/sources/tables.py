"""Tables (csv, tsv, parquet, json) that list image files, or rectangles in images."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from selftask.data.reading import index as store
from selftask.data.reading.class_numbers import number_labels, refuse_misspelled
from selftask.data.reading.index import Index
from selftask.data.reading.path_table import PathTable, arrays_of_paths
from selftask.data.source import ExtraKind
from selftask.data.sources.files import FileSource, folder_of, is_there
from selftask.errors import BadImage, UserError, check_known, explained, nearest_path, require
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import is_file, is_folder
from selftask.registry import register_source

PATH_COLUMNS = (
    *("path", "file", "filename", "file_name", "filepath", "file_path"),
    *("image", "image_path", "img", "img_path"),
)
BOX = ("left", "top", "right", "bottom")
_LABELS = "label"  # default of label_column, which may be missing


@dataclass
class Table:
    """Columns of a table that are used."""

    paths: Sequence[str | None]
    labels: Sequence[Any] | None
    extras: Mapping[str, Sequence[Any]]  # extra data and sides of the box, by name
    lines: Sequence[int] | None  # line of each row in the file; None if the file has no lines


@register_source("table")
class TableSource(FileSource):
    """Image files in a column of a .csv, .tsv, .parquet or .json file, with labels in another.

    With ``box``, each row is a rectangle of an image, and an image may be in several rows.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Path of the table: .csv, .tsv, .parquet, .json or .jsonl; may be remote."""
        column: str | None = None
        """Column of the paths; null: ``path``, ``file``, ``image``, ..., or the only column. The
        columns of a csv or tsv file without a header are called 0, 1, ...; null is then 0."""
        label_column: str | None = "label"
        """Column of the labels; the default column may be missing. Without a header, the default
        is column 1. Texts are numbered in sorted order. Null: no labels."""
        root: str | None = None
        """Folder that paths are relative to; null: the folder of the table."""
        delimiter: str | None = None
        """Character between columns; null: a tab in .tsv files, otherwise a comma."""
        caption: str | None = None
        """Column of the captions; null: no captions."""
        images: dict[str, str] = field(default_factory=dict)
        """Extra images of each sample: name -> column of their paths."""
        numbers: list[str] = field(default_factory=list)
        """Columns of numbers, each of which is added to the samples under its name."""
        box: list[str] = field(default_factory=list)
        """Columns of the rectangle to cut out: left, top, right, bottom, in pixels; right and
        bottom are exclusive. Empty: the whole image."""

    def __init__(self, config: Config) -> None:
        if config.box and len(config.box) != len(BOX):
            raise UserError(f"data.box={config.box}: four columns are expected: {', '.join(BOX)}")
        file = fetch(config.path)
        if not (is_file(file) or is_folder(file)):
            raise UserError(f"data: no such table: {file}; {nearest_path(file)}")
        self.root = os.path.expanduser(config.root) if config.root else folder_of(config.path)
        if not (is_remote(self.root) or is_folder(self.root)):
            raise UserError(f"data.root: no such folder: {self.root}")
        index = _indexed(file, config, self.root)
        self._take_index(index)
        self.extras = _kinds(config)
        self._extras = {name: _extra_of(index, name) for name in self.extras}
        self._box = [index.arrays[f"box/{side}/values"] for side in BOX if config.box]
        if not is_there(self.path(0)):
            raise UserError(
                f"data: {index.header['first']}: no such image: {self.path(0)}; data.root is the "
                f"folder that its paths start from, now {self.root}"
            )

    def cut(self, index: int, image: np.ndarray) -> np.ndarray:
        """Return the part (H', W', C) of the row's rectangle that is in the image (H, W, C).

        Coordinates are rounded to whole pixels, as by Pillow's crop. Without ``box``, the whole
        image is returned.

        Raises:
            BadImage: If no pixel of the rectangle is in the image.
        """
        if not self._box:
            return image
        left, top, right, bottom = (max(0, round(float(side[index]))) for side in self._box)
        region = image[top:bottom, left:right]
        if not region.size:
            box = ", ".join(f"{side[index]:g}" for side in self._box)
            height, width = image.shape[:2]
            reason = f"no pixel of its box ({box}) is in the image of {width}x{height}"
            raise BadImage(self.path(index), reason)
        return np.ascontiguousarray(region)

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        super().hash_names(add)
        for side in self._box:
            add(np.ascontiguousarray(side, dtype="<f4").tobytes())

    def extra(self, index: int, name: str) -> Any:
        """Return an image of another column, a caption, or a number as float32.

        Raises:
            BadImage: If the cell of an image is empty, or the image cannot be read.
        """
        cell = self._extras[name][index]
        if self.extras[name] != "image":
            return cell
        if not cell:
            raise BadImage(self.path(index), f"its {name} is empty")
        return self.image(self.extra_path(index, name))

    def extra_path(self, index: int, name: str) -> str:
        return self.full_path(self._extras[name][index])


def _kinds(config: TableSource.Config) -> dict[str, ExtraKind]:
    """Return the kind of each extra field, by name."""
    kinds: dict[str, ExtraKind] = {} if config.caption is None else {"caption": "text"}
    return kinds | dict.fromkeys(config.images, "image") | dict.fromkeys(config.numbers, "array")


def _extra_columns(config: TableSource.Config) -> dict[str, tuple[str, str]]:
    """Return (config key, column) of each extra field and of each side of the box, by name."""
    named = {} if config.caption is None else {"caption": ("caption", config.caption)}
    images = {name: (f"images.{name}", column) for name, column in config.images.items()}
    numbers = {column: ("numbers", column) for column in config.numbers}
    sides = {f"box/{side}": ("box", column) for side, column in zip(BOX, config.box, strict=False)}
    return named | images | numbers | sides


def _extra_of(index: Index, name: str) -> Any:
    """Return all values of an extra field: an array of numbers, or a table of texts."""
    prefix = f"{name}/"
    named = [(key, array) for key, array in index.arrays.items() if key.startswith(prefix)]
    parts = {key.removeprefix(prefix): array for key, array in named}
    return parts["values"] if "values" in parts else PathTable(parts)


def _indexed(file: Path, config: TableSource.Config, root: str) -> Index:
    """Return the content of the table, from its index if the file has not changed."""
    asked = (config.column, config.label_column, config.delimiter, os.path.realpath(root))
    text = json.dumps([*asked, *_extra_columns(config).items()])
    kept = store.index_file("table", str(file), text)
    return store.cached(kept, lambda: _state(file), lambda: _read(file, config, root))


def _state(file: Path) -> list[list[int]]:
    """Return size and modification time of the file, or of all files of a parquet folder."""
    parts = sorted(path for path in file.rglob("*") if path.is_file()) if file.is_dir() else [file]
    return [[status.st_size, status.st_mtime_ns] for status in map(os.stat, parts)]


def _read(file: Path, config: TableSource.Config, root: str) -> Index:
    table = _READERS.get(file.suffix.lower(), _read_text)(file, config, root)
    if not len(table.paths):
        raise UserError(f"data: no images: {file} has no rows")
    names = [os.fsencode(path) for path in _checked(table, file)]
    arrays = arrays_of_paths(names)
    header: dict[str, Any] = {"first": _place(file, table, 0)}
    if table.labels is not None:
        arrays["labels"], header["classes"] = number_labels(table.labels)
    keys = _extra_columns(config)
    for name, values in table.extras.items():
        if _kinds(config).get(name, "array") == "array":
            numbers = _numbers(values, keys[name], table, file)
            arrays[f"{name}/values"] = np.fromiter(numbers, np.float32)
        else:
            words = arrays_of_paths([os.fsencode(str(value or "")) for value in values])
            arrays |= {f"{name}/{part}": array for part, array in words.items()}
    if config.box:
        _check_boxes([arrays[f"box/{side}/values"] for side in BOX], table, file)
    header["num_folders"] = len({name.rpartition(b"/")[0] for name in names})
    return Index(header, arrays)


def _checked(table: Table, file: Path) -> Iterable[str]:
    for number, path in enumerate(table.paths):
        if not isinstance(path, str) or not path:
            problem = "no path" if path is None or path == "" else f"{path!r} is not a path"
            raise UserError(f"data: {_place(file, table, number)}: {problem}")
        yield path


def _numbers(
    values: Sequence[Any], column: tuple[str, str], table: Table, file: Path
) -> Iterable[float]:
    """Yield the numbers of a column, given by config key and name; raises UserError."""
    key, name = column
    for number, value in enumerate(values):
        try:
            yield float(value)
        except (TypeError, ValueError):
            line = _place(file, table, number)
            raise UserError(f"data.{key}: {line}: {name} is {value!r}, no number") from None


def _check_boxes(sides: Sequence[np.ndarray], table: Table, file: Path) -> None:
    """Raise UserError for the first rectangle with a side below 1 pixel or an infinite one."""
    left, top, right, bottom = sides
    fine = (right >= left + 1) & (bottom >= top + 1) & np.isfinite(right + bottom)
    if not fine.all():
        row = int(fine.argmin())
        box = ", ".join(f"{side[row]:g}" for side in sides)
        raise UserError(
            f"data.box: {_place(file, table, row)}: ({box}) is no rectangle; left, top, right and "
            "bottom in pixels are expected, right and bottom larger by at least 1"
        )


def _place(file: Path, table: Table, row: int) -> str:
    return f"{file}:{table.lines[row]}" if table.lines else f"{file} row {row}"


def _columns(config: TableSource.Config, names: list[str], file: Path) -> tuple[str, str | None]:
    """Return the columns of paths and labels; raises UserError if a column is missing."""
    column = config.column
    if column is None:
        lower = {name.lower(): name for name in reversed(names)}
        column = next((lower[name] for name in PATH_COLUMNS if name in lower), None)
        column = names[0] if column is None and len(names) == 1 else column
        if column is None:
            listed = ", ".join(names)
            raise UserError(f"data.column: which column of {file} holds the paths? one of {listed}")
    wanted = [("column", column)]
    if config.label_column not in (None, _LABELS):
        wanted.append(("label_column", config.label_column))
    for key, name in [*wanted, *_extra_columns(config).values()]:
        check_known(name, names, f"data.{key}: {file} has no column {name!r}")
    label = config.label_column if config.label_column in names else None
    if config.label_column is not None and label is None:
        used = {column, *(name for _, name in _extra_columns(config).values())}
        others = [name for name in names if name not in used]
        refuse_misspelled(config.label_column, others, "data.label_column", str(file))
    return column, label


def _read_text(file: Path, config: TableSource.Config, root: str) -> Table:
    names, rows = _rows_of_text(file, config, root)
    if names[0] == "0" and config.column is None:  # no header: the second column is the label
        used = [column for _, column in _extra_columns(config).values()]
        second = "1" if len(names) > 1 and "1" not in used else None
        label = second if config.label_column == _LABELS else config.label_column
        config = replace(config, column="0", label_column=label)

    def cells(column: str) -> list[str]:
        position = names.index(column)
        return [row[position] for _, row in rows]

    return _table(file, config, names, cells, [number for number, _ in rows])


def _rows_of_text(
    file: Path, config: TableSource.Config, root: str
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the names of the columns, and the rows with their line numbers; raises UserError."""
    delimiter = config.delimiter or ("\t" if file.suffix.lower() == ".tsv" else ",")
    if len(delimiter) != 1:
        raise UserError(f"data.delimiter={delimiter!r}: one character is expected")
    problem = f"data: {file} is not a table with {delimiter!r} between its columns"
    with (
        explained(problem, csv.Error, OSError),
        open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines,
    ):
        reader = csv.reader(lines, delimiter=delimiter)
        rows = [(reader.line_num, row) for row in reader if any(row)]
    if not rows:
        raise UserError(f"data: no images: {file} is empty")
    names = rows[0][1]
    if _has_header(names, config, root):
        rows = rows[1:]
    else:  # columns are named by their number
        names = [str(number) for number in range(len(names))]
    if len(set(names)) < len(names):
        raise UserError(f"data: {file}: two columns have the same name: {', '.join(names)}")
    for number, row in rows:
        if len(row) != len(names):
            raise UserError(f"data: {file}:{number}: {len(row)} columns, expected {len(names)}")
    return names, rows


def _table(
    file: Path,
    config: TableSource.Config,
    names: list[str],
    cells: Callable[[str], list[Any]],
    lines: list[int] | None = None,
) -> Table:
    """Return the columns that the config asks for.

    Args:
        file: The table.
        config: Config of the source.
        names: Names of all columns.
        cells: Returns the cells of a column by its name.
        lines: Line of each row, if the file has lines.
    """
    column, label = _columns(config, names, file)
    extras = {name: cells(of) for name, (_, of) in _extra_columns(config).items()}
    return Table(cells(column), None if label is None else cells(label), extras, lines)


def _has_header(first: list[str], config: TableSource.Config, root: str) -> bool:
    """Return whether the first row has column names.

    Without ``config.column``, it has none if its first cell is the path of an existing file.
    Otherwise it has none if ``config.column`` is a number that is not in the row.
    """
    if config.column is not None and config.column not in first:
        return not config.column.isdecimal()  # a number is a column of a table without header
    return config.column is not None or not os.path.isfile(os.path.join(root, first[0]))


def _read_parquet(file: Path, config: TableSource.Config, root: str) -> Table:
    require("pyarrow", "data", "parquet files")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with explained(f"data: {file} is not a parquet file, or is damaged"):
        dataset = parquet.ParquetDataset(file)
        names = [str(name) for name in dataset.schema.names]
        column, _ = _columns(config, names, file)
    kind = dataset.schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind  # pandas' categories
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(
            f"data.column: column {column!r} of {file} holds {kind}; paths are expected (images "
            "inside of parquet files: open them with Hugging Face datasets and save_to_disk)"
        )
    with explained(f"data: {file} is damaged"):
        return _table(file, config, names, lambda of: dataset.read([of]).column(of).to_pylist())


def _read_json(file: Path, config: TableSource.Config, root: str) -> Table:
    """Read a list of objects, or one object per line (.jsonl)."""
    is_list = file.suffix.lower() == ".json"
    expected = "a list of objects" if is_list else "an object a line"
    with explained(f"data: {file} is not {expected}"):
        text = file.read_text(encoding="utf-8-sig")
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = json.loads(text) if is_list else [json.loads(line) for _, line in lines]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"data: {file} is not {expected}")
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    if not names:
        raise UserError(f"data: no images: {file} has no rows")
    numbers = None if is_list else [number for number, _ in lines]
    return _table(file, config, names, lambda of: [row.get(of) for row in rows], numbers)


_READERS = {
    **dict.fromkeys((".parquet", ".pq"), _read_parquet),
    **dict.fromkeys((".json", ".jsonl"), _read_json),
}
