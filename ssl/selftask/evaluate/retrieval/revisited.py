"""The ground truth files of revisited Oxford and Paris, ``gnd_roxford5k.pkl``."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selftask.errors import UserError
from selftask.models.weights.foreign_pickle import read_tensors


@dataclass(frozen=True)
class Known:
    """What is known of one query: positions in the list of images, and its box."""

    easy: np.ndarray
    hard: np.ndarray
    junk: np.ndarray
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Truth:
    """Content of a file."""

    images: list[str]
    queries: list[str]
    known: list[Known]


def read_truth(path: Path) -> Truth:
    """Read a file without executing anything in it: only lists, numbers and arrays are taken.

    Radenovic et al. (arXiv:1803.11285): a dict with the names of images ``imlist`` and of queries
    ``qimlist``, and ``gnd``, a list of dicts with ``easy``, ``hard``, ``junk`` and ``bbx``.

    Raises:
        UserError: If the file is another one.
    """
    try:
        content, _ = read_tensors(path)
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        ImportError,
        RuntimeError,
        OSError,
    ) as error:
        raise UserError(f"truth={path}: is no pickle that can be read ({error})") from error
    try:
        images, queries = (list(map(str, content[name])) for name in ("imlist", "qimlist"))
        known = [_known(row, len(images)) for row in content["gnd"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"truth={path}: is no ground truth of revisited Oxford or Paris ({error!r})"
        ) from error
    if len(known) != len(queries):
        raise UserError(f"truth={path}: {len(queries)} queries, and {len(known)} entries of gnd")
    return Truth(images, queries, known)


def _known(row: dict[str, Any], num_images: int) -> Known:
    lists = [np.asarray(row[name]).reshape(-1) for name in ("easy", "hard", "junk")]
    for name, positions in zip(("easy", "hard", "junk"), lists, strict=True):
        if len(positions) and not (
            positions.dtype.kind in "iu" and positions.min() >= 0 and positions.max() < num_images
        ):
            raise ValueError(f"{name} holds no positions in imlist")
    left, top, right, bottom = (float(number) for number in row["bbx"])
    easy, hard, junk = (positions.astype(np.int64) for positions in lists)
    return Known(easy, hard, junk, (left, top, right, bottom))
