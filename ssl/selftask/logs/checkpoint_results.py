"""Evaluation results of a run's checkpoints, stored in the run folder.

``RUN/evaluations/step_N.jsonl`` has a line for each time that checkpoint N was evaluated: date,
step, names of the evaluations, settings, and metrics. Jobs that evaluate different checkpoints
write different files. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from selftask.files.received import COUNT, TEXTS, is_number
from selftask.logs.drawn_rows import read_ends
from selftask.logs.rows import append_row, utc_now

FOLDER = "evaluations"  # in the run folder
_FACTS = ("date", "step", "evaluations", "settings")
_COUNTS = ("train_images", "test_images", "classes", "chance")  # the same for all checkpoints


@dataclass(frozen=True)
class CheckpointResults:
    """Evaluation results of a run's checkpoints for one set of settings."""

    run: Path
    settings: Sequence[str]  # words of the command line that affect the results

    def missing(self, step: int, evaluations: Iterable[str]) -> list[str]:
        """Return those of ``evaluations`` without a result for the checkpoint of ``step``."""
        done = {name for row in self._rows(step) for name in row.get("evaluations", [])}
        return [name for name in evaluations if name not in done]

    def check_writable(self) -> None:
        """Raise OSError if results cannot be stored; call it before an evaluation."""
        folder = self.run / FOLDER
        TemporaryFile(dir=folder if folder.exists() else self.run).close()

    def add(self, step: int, evaluations: Sequence[str], metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a checkpoint to its file, and create the folder if needed.

        Args:
            step: Step of the checkpoint.
            evaluations: Names of the evaluations.
            metrics: Metrics by name.

        Raises:
            OSError: If the file cannot be written.
        """
        path = self._path(step)
        path.parent.mkdir(exist_ok=True)
        facts: dict[str, Any] = {"date": utc_now(), "step": step}
        facts |= {"evaluations": list(evaluations), "settings": list(self.settings)}
        append_row(path, {**facts, **metrics})

    def table(self) -> dict[int, dict[str, float]]:
        """Return step -> metrics of the checkpoints evaluated with these settings.

        See ``tables`` for repeated evaluations and for values that are left out.

        Raises:
            OSError: If a file cannot be read.
        """
        rows = [row for path in result_files(self.run) for row in read_ends(path).rows]
        return tables(rows).get(tuple(self.settings), {})

    def _path(self, step: int) -> Path:
        return self.run / FOLDER / f"step_{step}.jsonl"

    def _rows(self, step: int) -> list[dict[str, Any]]:
        path = self._path(step)
        rows = read_ends(path).rows if path.exists() else []
        return [row for row in filter(_is_result, rows) if row["settings"] == list(self.settings)]


def result_files(run: Path) -> list[Path]:
    """Return the result files of a run, one for each evaluated checkpoint, sorted by name."""
    paths = (run / FOLDER).glob("step_*.jsonl")
    return sorted(path for path in paths if path.stem.removeprefix("step_").isdecimal())


def tables(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], dict[int, dict[str, float]]]:
    """Return settings -> step -> metrics from the rows of result files, with ascending steps.

    Later values of a metric replace earlier ones. Invalid rows, values that are not finite numbers,
    and the numbers of images and classes are left out.
    """
    by_settings: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}
    for row in sorted(filter(_is_result, rows), key=lambda row: row["step"]):
        metrics = by_settings.setdefault(tuple(row["settings"]), {}).setdefault(row["step"], {})
        metrics |= {n: value for n, value in row.items() if _is_metric(n) and is_number(value)}
    return by_settings


def _is_result(row: Mapping[str, Any]) -> bool:
    """Return True if a row has a valid step, settings and evaluations; files may be received."""
    texts = map(TEXTS.accepts, (row.get("settings"), row.get("evaluations", [])))
    return COUNT.accepts(row.get("step")) and all(texts)


def _is_metric(name: str) -> bool:
    return name not in _FACTS and name.rpartition("/")[2] not in _COUNTS
