"""Hook points around steps and evaluations, priorities from the config, hooks of functions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from run_folders import read_events
from selftask.api.trainer import Trainer
from selftask.config.load import load_config, to_yaml
from selftask.errors import ConfigError, UserError
from selftask.hooks import empty_cache, evaluation
from selftask.hooks.base import function_hook
from selftask.task import Task
from selftask.task.loop import train_loop


def test_a_hook_of_functions(tmp_path: Path) -> None:
    """``before_step`` comes before the batch is read, and once for each step."""
    seen: list[tuple[str, int, Any]] = []

    def before(task: Task) -> None:
        seen.append(("before", task.steps_done, getattr(task, "last_batch", None)))

    def after(task: Task) -> None:
        seen.append(("after", task.steps_done, task.last_batch))

    task = tiny.task("simclr", tmp_path, "run", "train.max_steps=7")
    task.add_hook(function_hook(before_step=before, on_step=after))
    train_loop(task)
    assert [(name, step) for name, step, _ in seen] == [
        (name, step) for done in range(7) for name, step in (("before", done), ("after", done + 1))
    ]
    batches = [batch for *_, batch in seen]
    assert batches[0] is None and batches[2] is batches[1] is not batches[3]


def test_misspelled_functions_and_taken_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no hook point 'on_stp'; did you mean 'on_step'"):
        function_hook(on_stp=print)
    task = tiny.task("simclr", tmp_path)
    with pytest.raises(UserError, match=r"add_hook: <built-in function print> is no hook"):
        task.add_hook(print)
    task.add_hook(function_hook(), "mine")
    for name in ("mine", "metrics"):
        with pytest.raises(UserError, match=f"there is a hook '{name}' already"):
            task.add_hook(function_hook(), name)


def test_priority_from_the_config(tmp_path: Path) -> None:
    """Of a default hook, of one from the config, and of Classy Vision's."""
    words = [
        "hooks.metrics.priority=105",
        "hooks.clip_gradients={max_norm: 1.0, priority: 61}",
        "hooks.guest={name: 'classy:loss_lr_meter_logging', priority: 5}",
        "train.max_steps=1",
    ]
    task = tiny.train("simclr", tmp_path, "run", *words)
    names = [type(hook).__name__ for hook in task.hooks]
    assert names[:2] == ["SimCLR", "LossLrMeterLoggingHook"]
    assert names.index("Health") + 1 == names.index("ClipGradients")
    assert names[-1] == "Metrics"
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(task.config))
    assert load_config(str(path), []).hooks == task.config.hooks


def test_a_step_is_evaluated_and_logged_before_it_is_saved(tmp_path: Path) -> None:
    """Else a run resumed from that checkpoint would lack the row, or evaluate once more.

    The evaluation at the end comes after the last save.
    """
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 430)}"
    words = ["eval={evaluations: {knn: {k: [5]}}, every: 2}", val, "train.max_steps=4"]
    words += ["hooks.precise_bn={batches: 1, batch_size: 2}", "hooks.csv={}"]
    task = tiny.task("simclr", tmp_path, "run", *words, "train.checkpoint_every='2 steps'")
    results: dict[int, list[list[int]]] = {}

    def before_save(task: Task) -> None:
        rows = tiny.rows(tmp_path / "run")
        columns = ("knn_top1", "loss")
        results[task.steps_done] = [[r["step"] for r in rows if name in r] for name in columns]

    task.add_hook(function_hook(before_save=before_save))
    Trainer().train(task)
    assert results == {2: [[0, 2], [1, 2]], 4: [[0, 2], [1, 2, 3, 4]]}
    assert [row["step"] for row in tiny.rows(tmp_path / "run") if "knn_top1" in row] == [0, 2, 4]
    classes = [type(hook).__name__ for hook in task.hooks]
    order = ["PreciseBatchNorm", "EvaluateBackbone", "Metrics", "SaveCheckpoints", "Csv"]
    assert [name for name in classes if name in order] == order


def test_the_cache_is_emptied_every_few_steps_and_after_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch has five steps; the phases end at the fifth and at the last."""
    emptied: list[int] = []
    words = ("hooks.empty_cache={every: 2}", "train.max_steps=8")
    task = tiny.task("simclr", tmp_path, "run", *words)
    note = lambda device: emptied.append(task.steps_done)  # noqa: E731
    monkeypatch.setattr(empty_cache, "empty_cache", note)
    train_loop(task)
    assert emptied == [2, 4, 5, 6, 8, 8]


def test_a_wrong_priority_is_told_with_its_place() -> None:
    with pytest.raises(
        ConfigError, match=r"hooks\.metrics\.priority='first': expected a whole number"
    ):
        load_config("simclr/digits", ["hooks.metrics.priority=first"])


@pytest.mark.parametrize(("last", "expected"), [(6, (0, 3, 6)), (7, (0, 3, 6, 7))])
def test_evaluations_have_points(last: int, expected: tuple[int, ...], tmp_path: Path) -> None:
    """Every 0.6 epochs of five steps, at the start and, once, at the end."""
    seen: list[tuple[str, int, Any]] = []
    val = tiny.digits_file(tmp_path, "val.npz", 400, 430)
    words = [
        "eval={evaluations: {knn: {k: [5]}}, every: 0.6 epochs}",
        f"data.val={val}",
        f"train.max_steps={last}",
    ]
    task = tiny.task("simclr", tmp_path, "run", *words)
    for point in ("before_evaluation", "after_evaluation"):
        see = {
            point: lambda task, point=point: seen.append(
                (point, task.steps_done, task.last_row.get("knn_top1"))
            )
        }
        task.add_hook(function_hook(**see))
    Trainer().train(task)
    assert [(name, step) for name, step, _ in seen] == [
        (f"{word}_evaluation", step) for step in expected for word in ("before", "after")
    ]
    shown = [row["knn_top1"] for row in tiny.rows(tmp_path / "run") if "knn_top1" in row]
    assert [value for name, _, value in seen if name == "after_evaluation"] == pytest.approx(shown)


def test_evaluations_come_more_often_near_the_end(tmp_path: Path) -> None:
    """Ten steps: every 4, from the seventh on all; from 2 epochs on, which are ten steps, none."""
    seen: list[int] = []
    every = "every: {70%: 1, 0: 4, 2 epochs: 3}"
    words = [
        f"eval={{evaluations: {{knn: {{k: [5]}}}}, {every}}}",
        f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 430)}",
        "train.max_steps=10",
    ]
    task = tiny.task("simclr", tmp_path, "run", *words)
    task.add_hook(function_hook(before_evaluation=lambda task: seen.append(task.steps_done)))
    Trainer().train(task)
    assert seen == [0, 4, 7, 8, 9, 10]


def test_an_evaluation_longer_than_the_warning_of_slurm_is_mentioned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    val = tiny.digits_file(tmp_path, "val.npz", 400, 430)
    words = ["eval={evaluations: {knn: {k: [5]}}, every: 1}", f"data.val={val}"]
    words += ["train.max_steps=2", "launch.slurm.signal_delay_s=60"]
    task = tiny.task("simclr", tmp_path, "run", *words)
    ticks = iter(range(0, 10_000, 100))
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    Trainer().train(task)
    (warning,) = [event for event in read_events(task.out) if event["event"] == "warning"]
    expected = "the evaluation took 100 s, and SLURM ends the job 60 s after its signal: "
    assert warning["text"].startswith(expected)


def test_predicates_of_the_clock(tmp_path: Path) -> None:
    """Against a count by hand: twelve steps, five in an epoch."""
    seen: list[tuple[bool, ...]] = []

    def look(task: Task) -> None:
        clock = task.clock
        ends = clock.ends_epoch, clock.in_last_epoch, clock.done
        seen.append((clock.every(3), clock.every("1 epoch", start=2), *ends))

    task = tiny.task("simclr", tmp_path, "run", "train.max_steps=12")
    task.add_hook(function_hook(on_step=look))
    Trainer().train(task)
    columns = [
        [n for n, flag in enumerate(column, 1) if flag] for column in zip(*seen, strict=True)
    ]
    assert columns == [[3, 6, 9, 12], [7, 12], [5, 10, 12], [11, 12], [12]]


def test_hooks_that_come_or_go_at_a_resume_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of a class have a state each; one of them goes, and another comes."""
    averages = "hooks={fast: {name: ema, decay: 0.1}, slow: {name: ema, decay: 0.9}}"
    first = tiny.train("byol", tmp_path, "run", averages, "train.stop_at=3")
    states = tiny.last_state(first.out)["hooks"]
    assert tiny.differences(states["fast"], states["slow"])
    other = "hooks={slow: {name: ema, decay: 0.9}, new: {name: swa}}"
    task = tiny.task("byol", tmp_path, "run", other)
    with caplog.at_level("INFO", logger="selftask"):
        task.prepare()
    assert not tiny.differences(task.named_hooks["slow"].state_dict(), states["slow"])
    messages = {(r.levelname, r.getMessage()) for r in caplog.records if "hooks." in r.getMessage()}
    unused = "hooks.fast: its state in the checkpoint is not used: no such hook now"
    anew = "hooks.new: the checkpoint has no state of it; it starts anew"
    assert {("WARNING", unused), ("INFO", anew)} <= messages
    task.close()


def test_the_exception_is_there(tmp_path: Path) -> None:
    seen = []

    def fail(task: Task) -> None:
        raise ZeroDivisionError("on purpose")

    task = tiny.task("simclr", tmp_path)
    task.add_hook(function_hook(on_backward=fail))
    task.add_hook(function_hook(on_exception=lambda task: seen.append(task.exception)))
    with pytest.raises(ZeroDivisionError) as caught:
        train_loop(task)
    assert seen == [caught.value]


def test_an_interrupted_step_leaves_no_hooks_on_the_backbone(tmp_path: Path) -> None:
    hooks = ("activations={}", "online_probe={layers: [-1]}", "gradient_noise={}")
    task = tiny.task(
        "supervised", tmp_path, "run", *(f"hooks.{hook}" for hook in hooks), "train.log_every=1"
    )
    left: list[int] = []

    def count() -> int:
        modules = task.base_model.backbone.modules()
        of_modules = sum(len(module._forward_hooks) for module in modules)
        weights = task.base_model.backbone.parameters()
        return of_modules + sum(len(weight._backward_hooks or ()) for weight in weights)

    def interrupt(task: Task) -> None:
        left.append(count())
        raise KeyboardInterrupt

    task.add_hook(function_hook(on_forward=interrupt))
    with pytest.raises(KeyboardInterrupt):
        train_loop(task)
    assert left[0] > count() == 0


def test_state_before_the_start(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run", "hooks.plateau={metric: loss}")
    task.prepare()
    assert task.state_dict()["hooks"]["plateau"] == {}
    task.close()


def test_kept_losses_hold_no_other_memory(tmp_path: Path) -> None:
    """F.mse_loss returns a scalar in the memory of all squared differences."""
    kept: list[int] = []

    def look(task: Task) -> None:
        kept.extend(loss.untyped_storage().nbytes() for loss in task.losses)

    task = tiny.task("mae", tmp_path, "run", "train.max_steps=2")
    task.add_hook(function_hook(on_step=look))
    train_loop(task)
    assert set(kept) == {4}
