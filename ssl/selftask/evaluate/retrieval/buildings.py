"""Read ground truth of Oxford and Paris (``gnd_roxford5k.pkl``, ...) and ``gnd_instre.mat``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selftask.errors import UserError, explained
from selftask.models.weights.foreign_pickle import read_tensors


@dataclass(frozen=True)
class Known:
    """Ground truth of one query: its box, and indices into the list of images."""

    easy: np.ndarray  # in the original sets, all positives
    hard: np.ndarray
    junk: np.ndarray
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Truth:
    """Content of a ground-truth file of Oxford or Paris."""

    images: list[str]
    queries: list[str]
    known: list[Known]
    is_revisited: bool  # False for the original sets, without easy and hard


def read_truth(path: Path) -> Truth:
    """Read a ground-truth file of Oxford or Paris, a pickle, without executing anything in it.

    The content, from Radenovic et al. (arXiv:1803.11285), is a dict with the names of images
    (``imlist``) and of queries (``qimlist``), and a list ``gnd`` of dicts with ``easy``, ``hard``,
    ``junk`` and ``bbx``. The original sets (Philbin et al., CVPR 2007 and 2008) have ``ok`` instead
    of ``easy`` and ``hard``.

    Raises:
        UserError: If the file has another format.
    """
    with explained(f"truth={path}: is no pickle that can be read"):
        content, _ = read_tensors(path)
    try:
        images, queries = (list(map(str, content[name])) for name in ("imlist", "qimlist"))
        rows = list(content["gnd"])
        truths = [_known(row, len(images)) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"truth={path}: is no ground truth of Oxford or Paris ({error!r})"
        ) from error
    if len(truths) != len(queries):
        raise UserError(f"truth={path}: {len(queries)} queries, and {len(truths)} entries of gnd")
    return Truth(images, queries, truths, is_revisited=all("ok" not in row for row in rows))


def read_instre(path: Path) -> tuple[list[str], list[str], list[np.ndarray]]:
    """Return the names of queries and images of ``gnd_instre.mat``, and positives of each query.

    The positives (n,) are positions in the list of images, counted from 0.

    Raises:
        UserError: If the file has another format.
    """
    from scipy.io import loadmat  # slow to import
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path)
        queries, images = (
            [str(cell.item()) for cell in content[name].ravel()] for name in ("qimlist", "imlist")
        )
        rows = [{"ok": np.asarray(row[0]) - 1} for row in content["gnd"].ravel()]
        positives = [_positions(row, "ok", len(images)) for row in rows]
    except (MatReadError, NotImplementedError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"truth={path}: is no ground truth of INSTRE ({error!r})") from error
    if len(positives) != len(queries):
        raise UserError(f"truth={path}: {len(queries)} queries, and {len(positives)} of gnd")
    return queries, images, positives


def _known(row: dict[str, Any], num_images: int) -> Known:
    if "ok" in row:
        row = {**row, "easy": row["ok"], "hard": ()}
    easy, hard, junk = (_positions(row, name, num_images) for name in ("easy", "hard", "junk"))
    left, top, right, bottom = (float(number) for number in row["bbx"])
    return Known(easy, hard, junk, (left, top, right, bottom))


def _positions(row: dict[str, Any], name: str, num_images: int) -> np.ndarray:
    """Return positions in the list of images, which MATLAB may store as floats."""
    numbers = np.asarray(row[name]).reshape(-1)
    if numbers.dtype.kind not in "iuf":
        raise ValueError(f"{name} holds no numbers")
    positions = numbers.astype(np.int64)
    inside = (positions == numbers) & (positions >= 0) & (positions < num_images)
    if not inside.all():
        raise ValueError(f"{name} holds no positions in imlist")
    return positions
