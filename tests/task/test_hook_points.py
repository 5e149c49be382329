"""Hooks: at which points they are called, in which order, and what becomes of their errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from spy import CALLS, labeled, points

import tiny
from selftask.batch import Batch
from selftask.errors import UserError
from selftask.hooks.base import Hook
from selftask.hooks.checkpoint import SaveCheckpoints
from selftask.hooks.watching.print_hooks import describe_hooks
from selftask.task import Task, task_state
from selftask.task.loop import train_loop


def test_hook_points_in_order(tmp_path: Path, spy: str) -> None:
    tiny.train("supervised", tmp_path, "run", "train.max_steps=2", *labeled(tmp_path), spy)
    step = [
        *("before_step", "on_forward", "on_loss_and_meter", "on_backward", "on_update"),
        *("on_step", "on_row"),  # the hook `metrics` comes after the spy
    ]
    # the checkpoint hook saves at the end of the phase, after the spy has been there
    train = ["on_start", "on_phase_start", *step * 2, "on_phase_end", "before_save"]
    test = ["on_phase_start", *["on_forward", "on_loss_and_meter", "on_step"] * 2, "on_phase_end"]
    assert points(train=True) == train
    assert points(train=False) == [*test, "on_row", "on_end"]
    for _, point, phase, iteration, grad in CALLS:
        inside = point in ("on_forward", "on_loss_and_meter")
        assert grad is (phase or not inside), "outside, the grad mode is as before"
        assert phase or iteration == 2, "a test phase counts no update"
    assert [call[3] for call in CALLS if call[1] == "on_update"] == [0, 1]
    assert [call[3] for call in CALLS if call[1:3] == ("on_step", True)] == [1, 2]


def test_after_load_comes_before_the_start(
    tmp_path: Path, spy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.train("simclr", tmp_path, "run", spy, "train.stop_at=1")
    assert points(train=True)[-2:] == ["before_save", "on_exception"]
    CALLS.clear()
    met = lambda: CALLS.append(("ranks", "barrier", True, 0, True))  # noqa: E731
    monkeypatch.setattr(task_state, "barrier", met)
    tiny.train("simclr", tmp_path, "run", spy, "train.stop_at=2")
    assert points(train=True)[:3] == ["barrier", "after_load", "on_start"]


def fail(task: Task) -> None:
    raise ZeroDivisionError("on purpose")


def test_priorities_and_exceptions(tmp_path: Path, spy: str) -> None:
    orders = "{late: {name: spy, label: c, order: 60}, early: {name: spy, label: a, order: 10}}"
    equal = ("hooks.middle={name: spy, label: b}", "hooks.next={name: spy, label: B}")
    task = tiny.task("simclr", tmp_path, "run", f"hooks={orders}", *equal, "hooks.health=null")
    task.prepare()
    task.calls["on_backward"].append(fail)
    task.calls["on_exception"].insert(0, fail)
    task.prepare = lambda: None  # type: ignore[method-assign]
    closed: list[Task] = []
    task.close = lambda: closed.append(task)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        train_loop(task)
    assert closed == [task], "after an error, too"
    Task.close(task)
    assert task.hooks[0] is task.loss
    place = next(i for i, hook in enumerate(task.hooks) if isinstance(hook, SaveCheckpoints))
    before, after = task.hooks[1:place], task.hooks[place + 1 :]
    assert {type(hook).__name__ for hook in after} == {"StopOnSignal"}, "all else is saved"
    assert [hook for hook in (*before, *after) if (hook.priority < 90) != (hook in before)] == []
    assert "Health" not in {type(hook).__name__ for hook in task.hooks}
    assert "".join(label for label, point, *_ in CALLS if point == "on_backward") == "abBc"
    labels = "".join(label for label, point, *_ in CALLS if point == "on_exception")
    assert labels == "abBc", "one failing hook must not silence the others"
    assert "on_end" not in points(train=True)
    assert isinstance(task.exception, ZeroDivisionError)


def test_misspelled_point_is_an_error() -> None:
    with pytest.raises(
        TypeError, match=r"Wrong\.on_foward is not a hook point; there are: on_start"
    ):

        class Wrong(Hook):
            def on_foward(self, task: Task) -> None: ...


def test_the_order_is_printed_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = ("hooks.print_hooks={}", "hooks.clip_gradients={}", "train.max_steps=1")
    with caplog.at_level("INFO", logger="selftask"):
        task = tiny.train("byol", tmp_path, "run", *more)
    assert task.calls["on_update"][0] == task.loss.on_update, "the method is a hook, the first"
    lines = describe_hooks(task.hooks).splitlines()
    assert "on_backward: ClipGradients (20), Health (60)" in lines
    assert "on_update: BYOL, Health (60)" in lines
    assert any(line.startswith("on_step: EvaluateBackbone (65), ") for line in lines)
    assert all(line in caplog.messages for line in lines)


class Wrapper(Hook):
    """Notes when batches pass and gradients are reduced."""

    def __init__(self, name: str, priority: int, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes = name, notes
        self.priority = priority  # type: ignore[misc]

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.notes.append(f"batch {self.name}")
            yield batch

    def wrap_reduction(self, task: Task, reduce: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            reduce()
            self.notes.append(f"reduced {self.name}")

        return noted


def test_hooks_wrap_batches_and_reduction_in_their_order(tmp_path: Path) -> None:
    """Once a step, also after the parts were built again, as after a NaN."""
    notes: list[str] = []
    task = tiny.task("simclr", tmp_path, "run", "hooks.timing={}")
    for name, priority in (("outer", 60), ("inner", 10)):
        task.add_hook(Wrapper(name, priority, notes), name)
    for _ in range(2):
        notes.clear()
        task.prepare()
        task.on_start()
        task.on_phase_start()
        task.step()
        assert notes == ["batch inner", "batch outer", "reduced inner", "reduced outer"]
        task.close()


def test_what_is_logged_in_a_separate_pass_is_in_no_row_of_training(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path)
    task.log("before", 1.0)
    with task.separate_scalars():
        task.log("inside", 2.0)
        task.log("before", 3.0)
    assert task.pop_scalars() == {"before": 1.0}


def test_names_in_a_scope_have_its_prefix(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path)
    task.media = {}
    with task.name_scope("teacher"):
        task.log("norm", 1.0)
        with task.name_scope("head"):
            task.log("norm", 2.0)
            task.log_image("map", torch.zeros(1, 2, 2))
        task.log_histogram("weights", torch.zeros(3))
    with pytest.raises(ZeroDivisionError), task.name_scope("lost"):
        task.log("x", 1 / 0)
    task.log("norm", 3.0)
    assert list(task.media) == ["teacher/head/map", "teacher/weights"]
    assert task.pop_scalars() == {"teacher/norm": 1.0, "teacher/head/norm": 2.0, "norm": 3.0}


def test_the_public_attributes_of_a_task_exist(tmp_path: Path) -> None:
    page = (tiny.ROOT / "docs" / "how-to-own-hook.md").read_text(encoding="utf-8")
    table = page.partition("## Public attributes")[2].partition("\n## ")[0]
    names = re.findall(r"`(\w+)`", table)
    task: Any = tiny.task("simclr", tmp_path)
    task.prepare()
    task.on_start()
    task.on_phase_start()
    task.step()
    assert len(names) > 40
    assert [name for name in names if not hasattr(task, name)] == []
    task.close()


class Stateful(Hook):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"seen": {1, 2}}, r"state_dict of hooks\.mine\.seen is a set: checkpoints hold"),
        (None, r"state_dict of hooks\.mine returned a NoneType: a dict is expected"),
    ],
)
def test_a_state_that_no_checkpoint_holds_is_named_with_its_hook(
    state: Any, message: str, tmp_path: Path
) -> None:
    task = tiny.task("simclr", tmp_path)
    task.add_hook(Stateful(state), "mine")
    task.prepare()
    with pytest.raises(UserError, match=rf"test_hook_points.py:\d+: {message}"):
        task.state_dict()
    task.close()
