"""A run that somebody else made, with anything in its files: one row says so, all else is shown."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from run_folders import write_run
from selftask.cli.main import main
from selftask.cli.monitor.runs import lines_of
from selftask.evaluate.image_scores import packed_scores
from selftask.report.overview.table import columns_of, text_table
from selftask.report.record import RunRecord
from selftask.report.run_report import write_run_report
from selftask.report.watch import pages

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
    "git": {
        "folder": "/work",
        "commit": "abc",
        "branch": "main",
        "dirty": True,
        "diff": "git.diff",
    },
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
EVALUATED = {
    "evaluation": "knn",
    "overrides": ["k=5"],
    "options": {"seed": 0},
    "model_digest": "ab" * 32,
    "data_digests": {"data": "cd" * 16},
    "image_scores": {"knn_top1": packed_scores(np.array([0.0, 1.0]))},
    "knn_top1": 0.5,
    "knn_top1_low": 0.1,
    "knn_top1_high": 0.9,
}
CONFIG = {
    "data": {"name": "folder", "path": "x", "num_workers": 2, "cache": "none"},
    "backbone": {"name": "resnet18"},
    "hooks": {"health": {"collapsed": 0.05, "min_rank": 1.5}},
    "launch": {"processes": 2},
    "train": {"max_steps": 20, "batch_size": 8, "precision": "float32"},
}
FILES = ("config.yaml", "environment.json", "status.json", "metrics.jsonl", "events.jsonl")
ALL = (*FILES, "evaluations/step_4.jsonl", "evaluations.jsonl", "checkpoints/kept.json")


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
    for run in (tmp_path / "good", bad):
        (run / "evaluations.jsonl").write_text(json.dumps(EVALUATED) + "\n")
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
    shown.append(pages.overview_page("runs", named))
    shown.append(pages.run_page("bad", RunRecord.read(folder / "bad")))
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
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else [json.loads(text)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_no_value_takes_the_pages_down(name: str, runs: Path) -> None:
    path = runs / "bad" / name
    documents = parse(path)
    for number in {0, len(documents) - 2, len(documents) - 1} & set(range(len(documents))):
        for changed in variants(documents[number]):
            content = [*documents[:number], changed, *documents[number + 1 :]]
            texts = [
                yaml.safe_dump(c) if path.suffix == ".yaml" else json.dumps(c) for c in content
            ]
            path.write_text("\n".join(texts) + "\n", errors="surrogatepass")
            page = show(runs)
            page.encode()
            assert "good" in page, changed


@pytest.mark.parametrize(
    ("name", "key", "odd", "message"),
    [
        ("status.json", "started", "lots", "started: expected a time in seconds since 1970"),
        ("status.json", "step", 10**26, "step: expected a whole number"),
        ("environment.json", "memory_gib", "lots", "memory_gib: expected a number, not 'lots'"),
        ("metrics.jsonl", "step", 10**26, "1 row with a text for a number"),
        ("metrics.jsonl", "step_s", "lots", "1 row with a text for a number"),
    ],
)
def test_a_text_for_a_number_is_said(
    name: str, key: str, odd: Any, message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "bad" / name
    *others, last = parse(path) if path.suffix != ".jsonl" else parse(path)[:-1]
    path.write_text("\n".join(map(json.dumps, [*others, {**last, key: odd}])) + "\n")
    assert main(["report", "bad", "images=false"]) == 0
    page = unescape((runs / "bad/report.html").read_text())
    assert f"{name} cannot be read: {message}" in page
    if name != "environment.json":
        assert main(["runs", "."]) == 0
        assert f"cannot be read: {name}: {message}" in capsys.readouterr().out
    assert message.split(":")[0] in show(runs)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 43)


@pytest.mark.parametrize("make", [pipe, endless, sparse])
@pytest.mark.parametrize("name", [*ALL, "log.txt"])
def test_only_regular_files_of_bounded_size_are_read(
    name: str, make: Callable[[Path], None], runs: Path
) -> None:
    """A named pipe made every page wait for ever, a link to /dev/zero took all memory."""
    (runs / "bad" / name).unlink()
    make(runs / "bad" / name)
    began = time.monotonic()
    page = show(runs)
    assert time.monotonic() - began < 60
    assert "good" in page
    if name in ("status.json", "environment.json"):
        kind = {pipe: "is a named pipe", endless: "is a device", sparse: "is larger than 8 MiB"}
        assert f"{name} cannot be read: {kind[make]}" in page


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000])
@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "events.jsonl", "config.yaml"])
def test_nested_files_are_said(name: str, nested: str, runs: Path) -> None:
    (runs / "bad" / name).write_text(nested + "\n")
    assert "good" in show(runs)


def test_anchors_that_expand_to_billions_of_values(runs: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (runs / "bad/config.yaml").write_text("\n".join(lines))
    assert "config.yaml cannot be read: is no yaml (holds more than 100,000 values" in show(runs)


def test_escape_sequences_do_not_reach_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither from names of folders, nor from states, recipes, columns and log lines."""
    evil = "\x1b]0;owned\x07\x9b2J\u202e\n"
    shutil.move(runs / "bad", runs / f"bad{evil}")
    bad = write_run(runs / f"bad{evil}", evil, log=f"RUN {evil}", config={"recipe": evil})
    (bad / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, evil: 2.0}) + "\n")
    (bad / "slurm").mkdir()
    (bad / "slurm/jobs.json").write_text(json.dumps({str(bad): "12"}))
    for words in (["runs"], ["jobs"], ["report"], ["repro"], ["checkpoints"], ["eval", "knn"]):
        main([*words, str(bad)])
        shown = capsys.readouterr()
        assert "owned" in shown.out + shown.err or words[0] in ("eval", "checkpoints")
        for text in (shown.out, shown.err):
            assert not set("\x1b\x07\x9b\u202e") & set(text), words


def test_a_folder_whose_name_is_not_utf_8(runs: Path, capsysbinary: Any) -> None:
    write_run(Path(os.fsdecode(bytes(runs) + b"/\xff\xfe")))
    assert "good" in show(runs)
    assert main(["runs", "."]) == 0
    write_run_report(RunRecord.read(Path(os.fsdecode(bytes(runs) + b"/\xff\xfe"))))
