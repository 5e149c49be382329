"""The verdict on runs: real ones, and rows made up so that one thing is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from selftask.data.loading.data_stall import TOO_MUCH
from selftask.hooks.watching.limits import COLLAPSED, MIN_RANK
from selftask.report.record import RunRecord
from selftask.report.time_spent import run_parts, step_parts
from selftask.report.verdict import Verdict, collapse_limits, data_wait, verdict_of

FINISHED = {"state": "finished", "step": 200}
CHANCE = 6.236


def rows(number: int = 40, every: int = 5, **columns: Any) -> list[dict[str, Any]]:
    """Rows of a run that learns; a column is a value, or a function of progress in [0, 1]."""
    standard = {
        "loss": lambda w: 6.8 - 3 * w,
        "lr": lambda w: 1e-3 * (1 - w),
        "data_wait": 0.02,
        "step_s": 0.1,
        "emb_std": 0.5,
        "effective_rank": 80.0,
    }
    made = []
    for index in range(number):
        w = index / (number - 1)
        row: dict[str, Any] = {"step": every * (index + 1), "epoch": w * 10}
        for name, value in {**standard, **columns}.items():
            if value is not None:
                row[name] = value(w) if callable(value) else value
        if "chance_ratio" not in columns:
            row["chance_ratio"] = row["loss"] / CHANCE
        made.append({name: value for name, value in row.items() if value is not None})
    return made


def judge(rows: Any, events: Any, status: Any, **more: Any) -> Verdict:
    return verdict_of(RunRecord(Path("run"), rows=rows, events=events, status=status, **more))


def evaluated(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"step": step, "epoch": 0.0, "knn_top1": value, "eval_s": 1.0} for step, value in pairs]


def event(kind: str, text: str = "", **data: Any) -> dict[str, Any]:
    return {
        "time": "2026-01-01T00:00:00+00:00",
        "step": 1,
        "event": kind,
        "text": text,
        "data": data,
    }


def test_a_run_that_learns() -> None:
    verdict = judge([*evaluated((0, 0.17)), *rows(), *evaluated((200, 0.7))], [], FINISHED)
    assert (verdict.kind, verdict.learns) == ("good", True)
    assert verdict.headline.startswith("learning: the loss fell from 6.8 to 3.")
    assert "knn_top1 rose to 0.7, from 0.17 at step 0" in verdict.headline
    assert verdict.findings == []


def test_without_chance_the_loss_or_the_evaluation_tells() -> None:
    """A teacher's loss may rise while the network learns."""
    rising = rows(loss=lambda w: 1 + w, chance_ratio=None)
    assert judge(rising, [], FINISHED).learns is False
    both = [*evaluated((0, 0.2)), *rising, *evaluated((200, 0.5))]
    assert judge(both, [], FINISHED).learns is True
    falling = rows(chance_ratio=None, effective_rank=lambda w: 100 - 80 * w)
    verdict = judge([*evaluated((0, 0.37)), *falling, *evaluated((200, 0.35))], [], FINISHED)
    assert verdict.learns is False
    assert verdict.headline.startswith("the features do not improve: knn_top1 fell to 0.35")
    assert "effective_rank 100 at first, now" in verdict.findings[1].text


def test_one_evaluation_tells_nothing_about_the_features() -> None:
    """As of a run that has not come to its second one."""
    falling = rows(chance_ratio=None)
    for pairs in ([(0, 0.17)], [(200, 0.7)]):
        verdict = judge([*evaluated(*pairs), *falling], [], FINISHED)
        assert (verdict.kind, verdict.learns) == ("good", True)
    worse_than_chance = rows(loss=lambda w: 7 - 0.5 * w)
    assert judge([*evaluated((0, 0.17)), *worse_than_chance], [], FINISHED).learns is None


def test_a_small_gain_is_no_standstill() -> None:
    """As of a released model that is adapted; the same line said that it rose."""
    adapted = [*evaluated((0, 0.8)), *rows(chance_ratio=None), *evaluated((200, 0.83))]
    verdict = judge(adapted, [], FINISHED)
    assert verdict.learns is True and "knn_top1 rose to 0.83" in verdict.headline
    still = [*evaluated((0, 0.8)), *rows(chance_ratio=None), *evaluated((200, 0.81))]
    assert judge(still, [], FINISHED).headline.startswith("the features do not improve: knn_top1")
    rising = [*evaluated((0, 0.8)), *rows(loss=1.0, chance_ratio=None), *evaluated((200, 0.83))]
    assert judge(rising, [], FINISHED).learns is False, "of some hundred images, it may be noise"


def test_noise_is_no_trend() -> None:
    noisy = rows(loss=lambda w: 6.8 + 0.1 * math.sin(1e4 * w), chance_ratio=None)
    assert "the loss stays at 6." in judge(noisy, [], FINISHED).headline


def test_at_chance() -> None:
    verdict = judge(rows(loss=6.5), [], FINISHED)
    assert (verdict.kind, verdict.learns) == ("bad", False)
    assert verdict.headline.startswith("at chance: the loss stays at 6.5; try another optimizer.lr")
    verdict = judge(rows(loss=lambda w: 7 - 0.5 * w), [], FINISHED)
    assert (verdict.kind, verdict.learns) == ("warning", None)
    assert verdict.headline.startswith("no better than chance so far: the loss fell from 7 to 6.5")
    noise = [*evaluated((0, 0.17)), *rows(loss=lambda w: 7 - 0.5 * w), *evaluated((200, 0.2))]
    assert judge(noise, [], FINISHED).learns is False


def test_slow_but_better_features() -> None:
    slow = [*evaluated((0, 0.17)), *rows(loss=lambda w: 6.75 - 0.4 * w), *evaluated((200, 0.28))]
    verdict = judge(slow, [], FINISHED)
    assert (verdict.kind, verdict.learns) == ("warning", True)
    assert verdict.headline.endswith("but the loss is still 1.02 times chance")


def test_back_at_chance() -> None:
    verdict = judge(rows(loss=lambda w: 6.8 - 8 * w * (1 - w)), [], FINISHED)
    assert verdict.headline.startswith("back at chance: the loss is 1.0")


@pytest.mark.parametrize(
    ("column", "limit"), [("emb_std", COLLAPSED), ("effective_rank", MIN_RANK)]
)
def test_collapse_with_its_step(column: str, limit: float) -> None:
    falling = {column: lambda w: limit * (0.9 if w > 0.5 else 2.0)}
    verdict = judge(rows(**falling), [], FINISHED)
    assert (verdict.kind, verdict.learns) == ("bad", False)
    first = next(row["step"] for row in rows(**falling) if row[column] < limit)
    assert verdict.headline.startswith(f"collapsed at step {first}: ") and first == 105
    recovered = {column: lambda w: limit * (0.9 if 0.2 < w < 0.5 else 2.0)}
    assert judge(rows(**recovered), [], FINISHED).learns is True


def test_the_limits_are_those_of_the_run() -> None:
    config = {"hooks": {"health": {"collapsed": 0.6, "min_rank": 3}}}
    assert collapse_limits(RunRecord(Path("run"), config=config)) == (0.6, 3.0)
    assert judge(rows(), [], FINISHED, config=config).headline.startswith(
        "collapsed from the start"
    )
    for hooks in (None, {"health": None}, {"health": {}}, "broken"):
        record = RunRecord(Path("run"), config={"hooks": hooks})
        assert collapse_limits(record) == (COLLAPSED, MIN_RANK)


def test_nothing_is_trained() -> None:
    assert "the learning rate is 0" in judge(rows(lr=0.0), [], FINISHED).headline
    groups = {"lr": 0.0, "lr/head": 0.1}
    assert judge(rows(**groups), [], FINISHED).learns is True
    warning = event("warning", "step 10: no weight moves", about="weights")
    assert (
        judge(rows(), [warning], FINISHED).headline
        == "nothing is trained: step 10: no weight moves"
    )


def test_waiting_for_data_and_what_to_change() -> None:
    waiting = rows(data_wait=0.34)
    assert data_wait(waiting) == pytest.approx(0.34)
    files = {"data": {"name": "folder", "cache": "none", "num_workers": 2}}
    (finding,) = judge(waiting, [], FINISHED, config=files, environment={"cpus": 2}).findings
    assert finding.text == "waiting for data 34% of the time: set data.cache=ram"
    one = {"data": {"name": "array", "cache": "none", "num_workers": 1}}
    (finding,) = judge(waiting, [], FINISHED, config=one, environment={"cpus": 8}).findings
    assert finding.text.endswith("data.num_workers=1 leaves cores idle (8 cores); try 8")
    assert judge(rows(data_wait=TOO_MUCH - 0.01), [], FINISHED).findings == []


def test_the_first_row_does_not_wait() -> None:
    """Its workers start in it."""
    assert data_wait([{"step": 5, "step_s": 1.0, "data_wait": 0.9}]) is None
    two = [{"step": 5, "step_s": 1.0, "data_wait": w} for w in (0.9,)]
    two += [
        {"step": 10, "step_s": 1.0, "data_wait": 0.0},
        {"step": 25, "step_s": 1.0, "data_wait": 1},
    ]
    assert data_wait(two) == pytest.approx(0.75)


def test_evaluations_are_no_training() -> None:
    """``step_s`` includes those between steps, so that their time was counted twice."""
    timed = [{"step": 50 * n, "step_s": 2.0, "data_wait": 0.1, "lr": 0.1} for n in (1, 2, 3)]
    by_step = {0: 30.0, 50: 40.0, 100: 60.0, 150: 50.0}  # the first and last outside of steps
    evaluations = [{"step": step, "eval_s": seconds} for step, seconds in by_step.items()]
    first, second, third, last = evaluations
    mixed = [first, second, timed[0], third, timed[1], timed[2], last]
    events = [event("start"), {**event("finish"), "time": "2026-01-01T00:06:30+00:00"}]
    record = RunRecord(Path("run"), rows=mixed, events=events)
    assert record.clock.seconds == [0.0, 60.0, 100.0, 200.0]
    parts = {"training": 200.0, "evaluations": 180.0, "start, stop, pauses": 10.0}
    assert run_parts(record) == pytest.approx(parts)
    assert data_wait(mixed) == pytest.approx(20 / 140)


def test_parts_of_a_step_are_those_of_the_hook_timing() -> None:
    """The time of hooks.online_probe was shown as 100 % of the step, or counted twice."""
    timed = [{"step": 50 * n, "step_s": 0.5, "lr": 0.1, "ms_probe": 3.0} for n in (1, 2, 3)]
    waiting = [{**row, "data_wait": 0.1} for row in timed]
    parts = step_parts(RunRecord(Path("run"), rows=waiting))
    assert parts == pytest.approx({"waiting for data": 0.05, "everything else": 0.45})
    sections = [{**row, "ms_forward": 300.0, "ms_hooks": 200.0} for row in timed]
    parts = step_parts(RunRecord(Path("run"), rows=sections))
    assert parts == pytest.approx({"forward": 0.3, "hooks": 0.2})


def test_headline_reports_how_the_run_ended() -> None:
    failed = {"state": "failed", "step": 7, "rank": 3, "error": "no memory. Try less\ntrace"}
    verdict = judge(rows(), [], failed)
    assert (verdict.kind, verdict.headline) == ("bad", "failed at step 7 on rank 3: no memory")
    assert next(f.text for f in verdict.findings) == "Try less"
    assert any(f.text.startswith("learning: ") for f in verdict.findings)
    stopped = {"state": "interrupted", "step": 7, "by": "SIGTERM"}
    assert judge(rows(), [], stopped).headline == (
        "interrupted at step 7 by SIGTERM; the same command resumes it"
    )
    requeued = {"state": "requeued", "step": 7, "by": "SIGUSR1"}
    assert judge(rows(), [], requeued).headline.endswith("waits in the queue")
    lost = judge(rows(), [], {"state": "running"}, lost="no heartbeat for 9 min")
    assert (lost.kind, lost.headline) == ("bad", "does not run any more: no heartbeat for 9 min")
    hung = judge(rows(), [], {"state": "running"}, lost="no row for 9 min", state="hung")
    assert hung.headline == "hangs: no row for 9 min"


def test_what_else_is_worth_a_line() -> None:
    events = [
        *[event("resume")] * 5,
        event("requeue"),
        event("warning", "a"),
        event("warning", "b"),
    ]
    late = [*evaluated((0, 0.1), (100, 0.6)), *rows(), *evaluated((200, 0.5))]
    texts = [f.text for f in judge(late, events, FINISHED).findings]
    assert texts[0].startswith("knn_top1 was best at step 100 (0.6) and is 0.5 now")
    assert texts[1:] == ["resumed 5 times, requeued 1 time", "2 warnings, the last: b"]
    worse = [*evaluated((0, 0.17)), *rows(), *evaluated((200, 0.1))]
    (finding,) = judge(worse, [], FINISHED).findings
    assert finding.text == "knn_top1 is 0.1, less than before training (0.17)"


@pytest.mark.parametrize(
    "few",
    [
        [],
        rows(2, every=1),
        [{"step": 1}],
        [{"step": 1, "loss": None, "lr": 0.1}],
        evaluated((0, 0.1)),
        [{"step": 1, "loss": 1.0, "lr": 0.1, "data_wait": None, "emb_std": None}] * 60,
    ],
)
def test_too_little_to_say_anything(few: list[dict[str, Any]]) -> None:
    for status in ({}, {"state": "running"}, FINISHED):
        verdict = judge(few, [], status)
        assert verdict.learns is None and verdict.kind == "plain"
