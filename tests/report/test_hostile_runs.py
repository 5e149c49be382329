"""A run that somebody else made, with anything in its files: one row says so, all else is shown."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from run_folders import row, write_run
from selftask.cli.main import main
from selftask.cli.monitor.runs import lines_of
from selftask.report.overview.table import columns_of, text_table
from selftask.report.record import RunRecord
from selftask.report.run_report import run_sections, write_run_report
from selftask.report.watch import pages
from selftask.report.watch.live_run import changes, live_state

ODD = (
    *("lots", 10**26, -1, 1e308, 5e-324, float("nan"), float("inf"), True, [], {}, [[1], {}]),
    *({"a": {"b": 1}}, "\ud800\x1b[2J\x07", "2020-01-01T00:00:00", "0001-01-01T00:00:00"),
)
ENVIRONMENT = {
    "command": ["/bin/selftask", "train", "simclr"],
    "folder": "/work",
    "host": "host1",
    "cpu": "EPYC",
    "cpus": 8,
    "memory_gib": 31.2,
    "gpus": ["H100", "H100"],
    "python": "3.11.2",
    "packages": {"torch": "2.6.0"},
    "selftask": {"version": "1", "commit": "abc-dirty"},
    "git": {"folder": "/work", "commit": "abc", "branch": "main", "dirty": True, "diff": "git.diff"},
    "origins": {"train": "command line: train.epochs=5"},
}
EVENTS = [
    {"time": "2026-11-22T23:31:34.000+00:00", "step": 0, "event": "start", "text": "began"}
    | {"data": {"world_size": 2, "images": "4000 images"}},
    {"time": "2026-11-22T23:32:34.000+00:00", "step": 3, "event": "warning", "text": "slow"}
    | {"data": {"about": "weights"}},
    {"time": "2026-11-22T23:33:34.000+00:00", "step": 20, "event": "finish", "text": "done"}
    | {"data": {}},
]
RESULTS = {"date": "2026", "step": 4, "evaluations": ["knn"], "settings": ["k=5"], "knn_top1": 0.4}
CONFIG = {
    "data": {"name": "folder", "path": "x", "num_workers": 2, "cache": "none"},
    "backbone": {"name": "resnet18"},
    "hooks": {"health": {"collapsed": 0.05, "min_rank": 1.5}},
    "launch": {"processes": 2},
    "train": {"max_steps": 20, "batch_size": 8, "precision": "float32"},
}
FILES = ("config.yaml", "environment.json", "status.json", "metrics.jsonl", "events.jsonl")
ALL = (*FILES, "evaluations/step_4.jsonl", "checkpoints/kept.json")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good run and a whole one to be broken, ``bad``."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad", "running", config=CONFIG, step=20, rank=0)
    (bad / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (bad / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    (bad / "evaluations").mkdir()
    (bad / "evaluations/step_4.jsonl").write_text(json.dumps(RESULTS) + "\n")
    (bad / "checkpoints").mkdir()
    (bad / "checkpoints/step_000000004.pt").write_bytes(b"x")
    kept = {"metric": "loss", "mode": "min", "best": [[4, 0.5]], "every": [4]}
    (bad / "checkpoints/kept.json").write_text(json.dumps(kept))
    return tmp_path


def show(folder: Path) -> str:
    """All pages and the table of two runs, as one text."""
    lines = lines_of([folder])
    named = {line.folder.name: line for line in lines}
    shown = ["\n".join(text_table(lines, columns_of(lines)))]
    shown += [pages.overview_page("runs", named), json.dumps(pages.table_changes(named))]
    record = RunRecord.read(folder / "bad")
    shown.append(pages.run_page("bad", record))
    shown.append(json.dumps(changes(record, 0, live_state(record)["shape"]), allow_nan=False))
    shown.append(pages.comparison_page({name: folder / name for name in named}))
    return "".join(shown)


def variants(value: Any) -> Iterator[Any]:
    """Copies of nested values, each with one part replaced by something odd."""
    yield from ODD
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in list(parts) if isinstance(value, dict | list) else ():
        for odd in variants(inner) if isinstance(inner, dict | list) else ODD:
            changed = copy.deepcopy(value)
            changed[name] = odd
            yield changed


def parse(path: Path) -> list[Any]:
    text = path.read_text()
    if path.suffix == ".yaml":
        return [yaml.safe_load(text)]
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [
        json.loads(text)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_no_value_takes_the_pages_down(name: str, runs: Path) -> None:
    path = runs / "bad" / name
    documents = parse(path)
    for number in {0, len(documents) - 2, len(documents) - 1} & set(range(len(documents))):
        for changed in variants(documents[number]):
            content = [*documents[:number], changed, *documents[number + 1 :]]
            texts = [yaml.safe_dump(c) if path.suffix == ".yaml" else json.dumps(c) for c in content]
            path.write_text("\n".join(texts) + "\n", errors="surrogatepass")
            page = show(runs)
            page.encode()
            assert "good" in page, changed
