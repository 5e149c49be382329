"""``events.jsonl``: the story of a run, over all its attempts."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import tiny
from run_folders import read_events
from selftask.api.trainer import Trainer
from selftask.hooks.base import function_hook
from selftask.logs import LOGGER
from selftask.logs.events import add_event
from selftask.run.exit_report import Ending
from selftask.run.failure import Failure
from selftask.run.status import Status
from selftask.task import Task
from selftask.task.loop import Interrupted


def story(folder: Path) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in read_events(folder)]


def test_a_run_that_stops_resumes_fails_and_ends(tmp_path: Path) -> None:
    words = ["train.max_steps=6", "train.checkpoint_every=3", "train.log_every=2"]
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        Trainer().train(tiny.task("simclr", tmp_path, "run", *words, "train.stop_at=2"))
    assert story(run) == [("start", 0), ("checkpoint", 2), ("stop", 2)]

    def warn_then_fail(task: Task) -> None:
        if task.steps_done == 4:
            LOGGER.warning("it is %s", "late")
            raise ZeroDivisionError("on purpose")

    failing = tiny.task("simclr", tmp_path, "run", *words)
    failing.add_hook(function_hook(before_step=warn_then_fail))
    with pytest.raises(ZeroDivisionError):
        Trainer().train(failing)
    expected = [("start", 0), ("resume", 2), ("checkpoint", 3), ("warning", 4), ("failure", 4)]
    assert story(run)[3:8] == expected
    Trainer().train(tiny.task("simclr", tmp_path, "run", *words))
    assert story(run)[8:] == [("start", 0), ("resume", 3), ("checkpoint", 6), ("finish", 6)]

    events = read_events(run)
    assert events[2]["text"].startswith("RUN interrupted by train.stop_at=2 at step 2; ")
    assert events[6]["text"] == "it is late"
    assert events[7]["data"]["error"].endswith(": ZeroDivisionError: on purpose")
    times = [datetime.fromisoformat(event["time"]) for event in events]
    assert times == sorted(times)


def test_a_run_that_begins_anew_has_no_events_of_the_one_before(tmp_path: Path) -> None:
    for more in ("train.max_steps=2", "resume=never"):
        Trainer().train(tiny.task("simclr", tmp_path, "run", "train.max_steps=1", more))
    assert story(tmp_path / "run") == [("start", 0), ("checkpoint", 1), ("finish", 1)]


def test_another_rank_tells_of_a_dead_rank_0(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run")
    task.out.mkdir()
    task.world = replace(task.world, rank=1, size=2)
    failure = Failure(0, "rank 0 is gone", lost=True)
    failure.rank0_hears = False
    Ending(task, Status(task.config)).report(failure)
    (event,) = read_events(task.out)
    assert event["event"] == "failure"
    assert event["text"] == "RUN FAILED at step 0 on rank 0: rank 0 is gone"
    assert event["data"] == {"rank": 0, "error": "rank 0 is gone", "lost": True}
    assert (task.out / "log.txt").read_text().endswith(f" {event['text']}\n")


def test_evaluations_are_events(tmp_path: Path) -> None:
    val = tiny.digits_file(tmp_path, "val.npz", 400, 430)
    words = ["eval.evaluations={knn: {k: [5]}}", f"data.val={val}", "train.max_steps=1"]
    Trainer().train(tiny.task("simclr", tmp_path, "run", *words))
    rows = [row for row in tiny.rows(tmp_path / "run") if "knn_top1" in row]
    events = [e["data"] for e in read_events(tmp_path / "run") if e["event"] == "evaluation"]
    assert [event["knn_top1"] for event in events] == [row["knn_top1"] for row in rows]


def test_an_event_that_cannot_be_written(tmp_path: Path, capsys: Any) -> None:
    add_event(tmp_path / "gone", "stop", "text")
    assert "events.jsonl: No such file or directory" in capsys.readouterr().err


def test_a_line_cut_off_is_skipped(tmp_path: Path) -> None:
    add_event(tmp_path, "one", "text", step=1, value=float("nan"))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": \n')
    add_event(tmp_path, "two", "text", nested={"a": 1})
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == ["one", "two"]
    assert events[0]["data"] == {"value": None} and events[1]["data"] == {"nested": {"a": 1}}
