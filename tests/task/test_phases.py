"""Test the phases of a run and their test phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from validated import LABELED, train

import tiny
from selftask.errors import UserError
from selftask.hooks.base import function_hook
from selftask.task import Task
from selftask.task.loop import train_loop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phases")


def test_test_phases_every_other_epoch_and_half_an_epoch(folder: Path) -> None:
    words = (LABELED, "eval.evaluations={}", "eval.test_every=2", "train.epochs=4.6")
    words += ("train.checkpoint_every='0.5 epoch'", "train.log_every=3", "hooks.clip_gradients={}")
    whole = train("supervised", folder, "every", *words)
    assert whole.steps_done == 23  # 5 in an epoch
    tests = [row for row in tiny.rows(whole.out) if "test_accuracy_top_1" in row]
    assert [row["epoch"] for row in tests] == [2.0, 4.0, 4.6]
    assert not any("grad_norm" in row for row in tests), "it is of training"
    for stop in (7, 10, 20):
        train("supervised", folder, "every_parts", *words, f"train.stop_at={stop}")
    parts = train("supervised", folder, "every_parts", *words)
    assert tiny.rows(whole.out) == tiny.rows(parts.out)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(parts.out)) == []


@pytest.mark.parametrize(
    ("start", "tested", "evaluated"),
    [("3 epochs", [4.0, 4.6], [16, 20, 23]), ("7 steps", [2.0, 4.0, 4.6], [8, 12, 16, 20, 23])],
)
def test_nothing_is_evaluated_before_its_start(
    start: str, tested: list[float], evaluated: list[int], folder: Path
) -> None:
    """Test phases every other epoch of five steps, k-NN every four steps, 23 steps in all."""
    words = (LABELED, "eval={every: 4 steps, evaluations: {knn: {k: [3]}}, test_every: 2}")
    words += ("train.epochs=4.6", f"eval.start={start}")
    name = start.replace(" ", "_")
    whole = train("supervised", folder, name, *words)
    rows = tiny.rows(whole.out)
    assert [row["epoch"] for row in rows if "test_accuracy_top_1" in row] == tested
    assert [row["step"] for row in rows if "knn_top1" in row] == evaluated
    train("supervised", folder, f"{name}_parts", *words, "train.stop_at=17")
    parts = train("supervised", folder, f"{name}_parts", *words)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(parts.out)) == []


def test_phases_have_their_numbers_behind_a_late_start(folder: Path) -> None:
    """Classy's indices of train and test phases, for hooks of Classy."""
    words = (LABELED, "eval.evaluations={}", "train.epochs=5", "eval.start='3 epochs'")
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    task = tiny.task("supervised", folder, "numbers", val, *words)
    seen: list[tuple[bool, int, int]] = []
    note = lambda task: seen.append((task.train, task.train_phase_idx, task.eval_phase_idx))  # noqa: E731
    task.add_hook(function_hook(on_phase_start=note))
    train_loop(task)
    trained = [(True, 0, -1), (True, 1, -1), (True, 2, -1), (False, 2, 0)]
    assert seen == [*trained, (True, 3, 0), (False, 3, 1), (True, 4, 1), (False, 4, 2)]


def test_epochs_are_parts_of_one_stream(tmp_path: Path) -> None:
    """85 images, 16 a batch: 5 steps an epoch, from one reader; the last images are left out."""
    data = f"data={tiny.digits_file(tmp_path, '85.npz', 0, 85)}"
    task = tiny.task("simclr", tmp_path, "run", data, "data.num_workers=1", "train.epochs=2")
    iterators, readers, seen, shown = [], [], [], [set(), set()]

    def note(task: Task) -> None:
        batch = task.last_batch
        readers.append(task.data_module.batches._reader)
        seen.append((task.steps_done, task.clock.epoch, batch.number, batch.epoch))
        shown[batch.epoch].update(batch.index.tolist())

    see = {"on_phase_start": lambda task: iterators.append(task.batches), "on_update": note}
    task.add_hook(function_hook(**see))
    train_loop(task)
    assert seen == [(step, step // 5, step, step // 5) for step in range(10)]
    assert all(reader is readers[0] is not None for reader in readers)
    assert [len(indices) for indices in shown] == [80, 80]
    assert len(iterators) == 2, "each phase has its own, which has come to its end"
    assert [next(batches, None) for batches in iterators] == [None, None]


def watched(folder: Path, out: str, *more: str) -> tuple[Task, list[str]]:
    """Train, and list the points of phases with the step at which they come."""
    calls: list[str] = []
    words = (LABELED, "eval.evaluations={}", "train.epochs=2.2", *more)
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    task = tiny.task("supervised", folder, out, val, *words)

    def note(point: str) -> Any:
        def call(task: Task) -> None:
            calls.append(f"{task.phase_type} {point} {task.steps_done}")

        return call

    task.add_hook(function_hook(on_phase_start=note("from"), on_phase_end=note("to")))
    tiny.loop(task)
    return task, calls


def test_an_epoch_of_two_phases(folder: Path) -> None:
    """Five steps an epoch: phases of two and three; resumed in any of them, bit for bit."""
    words = ("train.phases_per_epoch=2", "train.checkpoint_every='1 step'")
    whole, calls = watched(folder, "halves", *words)
    ends = [2, 5, 7, 10, 11]
    train = [call for call in calls if call.startswith("train")]
    starts = [0, *ends[:-1]]
    expected = [(f"train from {a}", f"train to {b}") for a, b in zip(starts, ends, strict=True)]
    assert train == [call for pair in expected for call in pair]
    assert [call for call in calls if call.startswith("test to")] == [f"test to {e}" for e in ends]
    rows = [row for row in tiny.rows(whole.out) if "test_accuracy_top_1" in row]
    assert [row["epoch"] for row in rows] == [0.4, 1.0, 1.4, 2.0, 2.2]
    for stop in (1, 2, 6, 7, 10):
        watched(folder, "halves_parts", *words, f"train.stop_at={stop}")
    parts, _ = watched(folder, "halves_parts", *words)
    assert tiny.rows(whole.out) == tiny.rows(parts.out)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(parts.out)) == []

    plain, calls = watched(folder, "epochs", "train.checkpoint_every='1 step'")
    assert [call for call in calls if call.startswith("train to")] == [
        f"train to {end}" for end in (5, 10, 11)
    ]
    states = [tiny.last_state(task.out) for task in (whole, plain)]
    for part in ("model", "method", "optimizer"):
        assert tiny.differences({part: states[0][part]}, {part: states[1][part]}) == []


def test_test_phases_after_so_many_train_phases(folder: Path) -> None:
    words = ("train.phases_per_epoch=2", "eval.test_every=3", "train.step=accumulate")
    task, _ = watched(folder, "thirds", *words, "train.accumulate=2")  # three steps an epoch
    tests = [row["step"] for row in tiny.rows(task.out) if "test_accuracy_top_1" in row]
    assert tests == [4, 7]  # phases of one and two steps; 2.2 epochs are seven steps
    with pytest.raises(UserError, match="phases_per_epoch=6: an epoch has 5 steps, and a phase"):
        watched(folder, "sixths", "train.phases_per_epoch=6")
