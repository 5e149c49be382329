"""Hugging Face data sets that are saved to disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from selftask.data.reading.class_numbers import number_labels
from selftask.data.reading.files import now_reading
from selftask.data.reading.handles import PerProcess
from selftask.data.reading.image import decode, image_of, read_image
from selftask.data.source import Source
from selftask.errors import BadImage, UserError, check_known, explained, nearest, require
from selftask.files.paths import is_file
from selftask.registry import register_source

_LABELS = ("label", "labels")  # default columns of labels


@register_source("huggingface")
class HuggingFace(Source):
    """Data set written by Hugging Face's ``save_to_disk``; nothing is downloaded."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Folder written by ``save_to_disk``."""
        split: str | None = None
        """Split to read if the folder has several; null: ``train``, or the only split."""
        images: str | None = None
        """Column of the images; null: the only column of type Image, or ``image``."""
        labels: str | None = None
        """Column of the labels: whole numbers, true and false, or texts, which are numbered in
        sorted order; null: ``label`` or ``labels`` if it holds these."""
        caption: str | None = None
        """Column of the captions; null: no captions."""

    def __init__(self, config: Config) -> None:
        require("datasets", "datasets", "Hugging Face's data sets")
        self.folder = _split_folder(os.path.expanduser(config.path), config.split)
        dataset = _open(self.folder, None)
        self.column = _image_column(dataset, config.images, self.folder)
        self._opened = PerProcess(partial(_open, self.folder, self.column))
        self.size = len(dataset)
        if not self.size:
            raise UserError(f"data: no images: {self.folder} has no rows")
        labels = _labels(dataset, config.labels, self.folder)
        if labels is not None:
            self.labels, self._classes = number_labels(labels)
        self.caption = config.caption
        if config.caption is not None:
            _check_texts(dataset, config.caption, self.folder)
            self.extras = {"caption": "text"}
        self._opened_texts = PerProcess(partial(_open_texts, self.folder, config.caption))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if not 0 <= index < self.size:
            raise IndexError(f"image {index} of {self.size}")
        name = self.path(index)
        now_reading(name)
        return self._image(self._opened()[index][self.column], name), self.label_of(index)

    def extra(self, index: int, name: str) -> str:
        """Return the caption of a row; an empty string if it has none."""
        return self._opened_texts()[index][self.caption] or ""

    def _image(self, item: Any, name: str) -> np.ndarray:
        if item is None:
            raise BadImage(name, "there is no image in this row")
        if not isinstance(item, dict):
            return image_of(np.asarray(item), name)
        if item["bytes"] is not None:
            return decode(item["bytes"], name)
        if item["path"] is None:
            raise BadImage(name, "there is no image in this row")
        try:
            return read_image(item["path"])
        except BadImage as error:
            raise BadImage(name, f"{item['path']}: {error.reason}") from error

    def path(self, index: int) -> str:
        """Return a name such as ``beans/train[17]``."""
        return f"{self.folder}[{index}]"

    def describe(self) -> str:
        """Return a line such as ``1034 images, 3 classes``."""
        return f"{self.size} images, {self.describe_labels()}"

    def files(self) -> list[str]:
        """Return the files of the split, which ``data.stage_to`` can copy."""
        return [str(path) for path in sorted(Path(self.folder).iterdir()) if path.is_file()]

    def use_copies(self, copy_of: Callable[[str], str]) -> None:
        """Read from the copy of the folder, ``copy_of(folder)``, from now on."""
        self._opened_texts = PerProcess(partial(_open_texts, copy_of(self.folder), self.caption))
        self._opened = PerProcess(partial(_open, copy_of(self.folder), self.column))


def _split_folder(folder: str, split: str | None) -> str:
    """Return the folder of a split; raises UserError if it is missing or the choice is unclear."""
    if is_file(os.path.join(folder, "state.json")):
        if split is not None:
            raise UserError(f"data.split={split}: {folder} holds one data set, without splits")
        return folder
    if not is_file(os.path.join(folder, "dataset_dict.json")):
        problem = "was not written by save_to_disk" if os.path.isdir(folder) else "is not there"
        raise UserError(f"data.path: {folder} {problem} (a data set of Hugging Face's is expected)")
    prefix = os.path.join(folder, "")
    splits = [name for name in os.listdir(folder) if os.path.isfile(f"{prefix}{name}/state.json")]
    chosen = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
    if chosen not in splits:
        raise UserError(
            f"data.split={split or 'none'}: {folder} has other splits; "
            f"{nearest(split or '', splits)}"
        )
    return prefix + str(chosen)


def _open(folder: str, image_column: str | None) -> Any:
    """Memory-map a data set; with ``image_column`` only this column, whose images stay encoded."""
    import datasets

    with explained(f"data.path: {folder} cannot be opened", OSError, ValueError, KeyError):
        dataset = datasets.load_from_disk(folder)
    if image_column is None:
        return dataset.with_format(None)
    dataset = dataset.select_columns([image_column])
    if not isinstance(dataset.features[image_column], datasets.Image):
        return dataset.with_format("numpy", dtype=_number_type(dataset.features[image_column]))
    dataset = dataset.with_format(None)
    return dataset.cast_column(image_column, datasets.Image(decode=False))


def _open_texts(folder: str, column: str | None) -> Any:
    """Memory-map only one column of texts."""
    return _open(folder, None).select_columns([column])


def _check_texts(dataset: Any, column: str, folder: str) -> None:
    """Raise UserError if the column is missing or does not contain texts."""
    names = list(dataset.features)
    check_known(column, names, f"data.caption: {folder} has no column {column!r}")
    kind = getattr(dataset.features[column], "dtype", "no texts")
    if "string" not in kind:
        raise UserError(f"data.caption: column {column!r} of {folder} holds {kind}, not texts")


def _number_type(feature: Any) -> str:
    """Return the dtype of a feature of arrays or nested lists; datasets would return int64."""
    while not hasattr(feature, "dtype") or feature.dtype == "list":
        feature = feature.feature
    return str(feature.dtype)


def _image_column(dataset: Any, wanted: str | None, folder: str) -> str:
    import datasets

    names = list(dataset.features)
    if wanted is not None and wanted not in names:
        raise UserError(f"data.images: {folder} has no column {wanted!r}; {nearest(wanted, names)}")
    images = [n for n in names if isinstance(dataset.features[n], datasets.Image)]
    images = images if len(images) == 1 else [n for n in names if n == "image"]
    column = wanted or (images[0] if images else None)
    if column is None:
        raise UserError(f"data.images: which column of {folder}? one of {', '.join(names)}")
    return column


def _labels(dataset: Any, wanted: str | None, folder: str) -> list[str | int | None] | None:
    """Return the labels; None if there is no column, or if the default column has no classes.

    Raises UserError if a column that the user names is missing or has no classes.
    """
    names = list(dataset.features)
    if wanted is not None and wanted not in names:
        raise UserError(f"data.labels: {folder} has no column {wanted!r}; {nearest(wanted, names)}")
    column = wanted or next((name for name in _LABELS if name in names), None)
    if column is None:
        return None
    kind = getattr(dataset.features[column], "dtype", "")
    if "int" not in kind and "string" not in kind and "bool" not in kind:
        if wanted is None:
            return None  # for example boxes or masks, not classes
        raise UserError(f"data.labels: column {column!r} of {folder} holds {kind or 'no numbers'}")
    values = dataset.select_columns([column]).with_format("arrow")[:].column(column)
    return [int(v) if isinstance(v, bool) else v for v in values.to_pylist()]
