"""The report of real tiny runs: at their end, on request, and without harm if it fails."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main
from selftask.report import at_end, run_report
from selftask.report.record import RunRecord
from selftask.report.verdict import verdict_of


def train(folder: Path, *more: str, out: str = "run") -> int:
    return main(["train", "simclr/digits", *tiny.overrides("simclr", folder, out, *more)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with lr=0 that was stopped, resumed and finished."""
    folder = tmp_path_factory.mktemp("report")
    assert train(folder, "optimizer.lr=0", "train.stop_at=6") == 75
    page = (folder / "run/report.html").read_text()
    assert "interrupted at step 6 by train.stop_at=6" in page
    assert train(folder, "optimizer.lr=0") == 0
    return folder


def test_at_the_end_of_a_run(folder: Path) -> None:
    record = RunRecord.read(folder / "run")
    actual = verdict_of(record)
    assert actual.headline == "nothing is trained: the learning rate is 0; raise optimizer.lr"
    assert any(finding.text == "resumed 1 time" for finding in actual.findings)
    assert (record.state, record.step, record.num_attempts) == ("finished", 15, 2)
    assert record.problems == []
    page = (folder / "run/report.html").read_text()
    for text in (actual.headline, "✓ finished", "step 15 of 15", "optimizer.lr", "backbone.pt"):
        assert text in page
    assert (folder / "run/log.txt").read_text().splitlines()[-1][20:].startswith("RUN finished")


def test_values_of_the_command_line_come_first(folder: Path) -> None:
    page = (folder / "run/report.html").read_text()
    typed = page.index("Set on the command line")
    assert typed < page.index(">optimizer.lr<") < page.index("Defaults (")
    assert "command line: optimizer.lr=0" in page


@pytest.mark.slow
def test_report_prints_the_verdict_and_writes_the_page_to_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "page.html"
    assert main(["report", str(folder / "run"), f"out={other}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run: nothing is trained: the learning rate is 0; raise optimizer.lr",
        str(other),
    ]
    assert 'href="run/checkpoints/step_000000015.pt"' in other.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "report needs a RUN"),
        (["nowhere"], "nowhere: there is no such run"),
        (["{}/run/checkpoints"], "not a run folder"),
        (
            ["{}/run", "out={}/no/such/x.html"],
            "x.html: cannot be written (No such file or directory)",
        ),
    ],
)
def test_missing_runs_and_unwritable_pages_are_refused(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *(word.format(folder) for word in words)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "report: " not in printed.replace("error: report: ", ""), "before features are computed"


def test_a_read_only_folder_is_refused_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("selftask.cli.report.TemporaryFile", refuse)
    monkeypatch.setattr("selftask.cli.report._image_sections", None)
    assert main(["report", str(folder / "run")]) == 2
    assert "report.html: cannot be written (Read-only file system)" in capsys.readouterr().err


def test_a_report_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(run_report, "head_html", broken)
    assert train(tmp_path, "train.max_steps=1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("RUN finished: 1 step ")
    assert lines[-2].startswith("no report of this run (ValueError: no ink); selftask report ")
    assert tiny.status(tmp_path / "run")["state"] == "finished"
    monkeypatch.undo()
    assert train(tmp_path, "train.max_steps=1", "train.report=false", out="off") == 0
    assert not (tmp_path / "off/report.html").exists()


def test_a_report_that_hangs_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    over = threading.Event()
    monkeypatch.setattr(RunRecord, "read", lambda *_: over.wait(30))
    at_end.write_end_page(tmp_path, limit_s=0.05)
    over.set()
    assert "not written within 0.05 s" in caplog.text


def test_failed_runs_get_a_report_page(tmp_path: Path) -> None:
    assert train(tmp_path, "hooks.fault_injection={at: 4}") == 1
    page = (tmp_path / "run/report.html").read_text()
    assert "failed at step" in page and "✗ failed" in page
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
