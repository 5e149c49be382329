"""``selftask eval predictions``: compute metrics of files written by ``selftask test``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selftask.cli.model.evaluate_words import take_fields
from selftask.config.fields import setting
from selftask.errors import UserError, check_known
from selftask.logs import json_row

USAGE = """\
usage: selftask eval predictions FILE [FILE ...] [key=value ...]

FILE is what `selftask test RUN predictions=FILE` wrote: a .csv with the best class of each image,
or a .npz with all scores. Prints one JSON line for each: accuracy, calibration error (ece), and of
scores top-k accuracy and mean average precision, as `selftask test` does.
topk=[1,5]      of scores; default: 1, and 5 if there are as many classes
bins=15         of the calibration error
classes=FILE    also write a table of the classes: images, recall, precision, f1 (CSV)
confusion=FILE  also write the numbers of images by label (rows) and predicted class (columns)"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command; the usage text describes them."""

    topk: list[int] | None = None
    bins: int = setting(15, min=1)
    classes: str | None = None
    confusion: str | None = None


def main(argv: list[str]) -> int:
    """Print a row of metrics for each file, and write the requested tables."""
    options, words = take_fields(argv, Options)
    if not words:
        raise UserError(f"eval predictions needs a FILE\n{USAGE}")
    for key, equals, _ in (word.partition("=") for word in words):
        if equals:
            fields = Options.__dataclass_fields__
            check_known(key, fields, f"eval predictions: there is no {key!r}")
    if len(words) > 1 and (options.classes or options.confusion):
        raise UserError("eval predictions: classes= and confusion= take one FILE, not several")
    from selftask.evaluate.prediction_metrics import class_table, confusion, metrics
    from selftask.evaluate.predictions import read_predictions

    for word in words:
        predictions = read_predictions(Path(word).expanduser())
        row = metrics(predictions, options.topk, options.bins)
        table = class_table(predictions) if options.classes or options.confusion else []
        if options.classes:
            _write(options.classes, list(table[0]), (line.values() for line in table))
        if options.confusion:
            names = [line["name"] for line in table]
            counts = zip(names, confusion(predictions).tolist(), strict=True)
            lines = ([name, *numbers] for name, numbers in counts)
            _write(options.confusion, ["label", *names], lines)
        print(json_row({"file": word, **row}))
    return 0


def _write(path: str, head: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    try:
        with Path(path).expanduser().open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([head, *rows])
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
