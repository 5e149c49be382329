"""What is left by a stop in a test phase, and by the evaluation after the last step."""

from __future__ import annotations

from pathlib import Path

import tiny
from selftask.hooks.base import function_hook
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop


def test_the_evaluation_after_the_last_step_stops_nothing(tmp_path: Path) -> None:
    """The second evaluation without a gain is the one at the end."""
    words = ("hooks.early_stopping={patience: 2}", "eval.every=2", "train.max_steps=6")
    task = tiny.task("simclr", tmp_path, "run", *words)
    task.evaluate = lambda task: {"knn_top1": 0.5}
    train_loop(task)
    assert (task.steps_done, task.clock.stopped) == (6, None)


def test_a_stop_in_a_test_phase_keeps_the_values_for_the_next_row(tmp_path: Path) -> None:
    words = (
        "meters.accuracy={topk: [1]}",
        "eval.evaluations={}",
        "train.epochs=2",
        "train.log_every=3",
    )
    rare = ("train.log_every=3", "train.checkpoint_every=9")
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 440)}"

    def run(out: str, *, stops: bool) -> None:
        def on_step(task: Task) -> None:
            if task.phase_finished:
                task.log("at_the_end", task.steps_done)
            elif stops and not task.train:
                task.interrupted_by = "a signal"

        task = tiny.task("supervised", tmp_path, out, val, *words, *rare)
        task.add_hook(function_hook(on_step=on_step), "own")
        try:
            train_loop(task)
        except Interrupted:
            assert stops and not task.train

    run("tested", stops=False)
    run("tested_parts", stops=True)
    run("tested_parts", stops=False)
    rows = tiny.rows(tmp_path / "tested")
    assert tiny.rows(tmp_path / "tested_parts") == rows
    assert [row["step"] for row in rows if "at_the_end" in row] == [6, 10]


def test_network_and_method_are_in_the_mode_of_the_phase(tmp_path: Path) -> None:
    """A method may have layers of its own, such as a teacher with BatchNorm."""
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 440)}"
    words = ("meters.accuracy={topk: [1]}", "eval.evaluations={}", "train.epochs=2")
    modes: list[tuple[bool, bool, bool]] = []
    num_losses: list[int] = []

    def on_step(task: Task) -> None:
        modes.append((task.train, task.base_model.training, task.loss.training))
        if task.train:
            num_losses.append(len(task.losses))

    task = tiny.task("supervised", tmp_path, "modes", val, *words)
    task.add_hook(function_hook(on_step=on_step))
    train_loop(task)
    assert modes == 2 * (5 * [(True,) * 3] + 3 * [(False,) * 3])
    assert num_losses == [1, 2, 3, 4, 5] * 2, "losses are those of the phase"


def test_the_last_step_is_logged(tmp_path: Path) -> None:
    logged: list[int] = []

    def on_update(task: Task) -> None:
        if task.should_log:
            logged.append(task.clock.step)

    task = tiny.task("simclr", tmp_path, "logged", "train.max_steps=6", "train.log_every=4")
    task.add_hook(function_hook(on_update=on_update))
    train_loop(task)
    rows = [row["step"] for row in tiny.rows(tmp_path / "logged") if "loss" in row]
    assert logged == rows == [4, 6]
