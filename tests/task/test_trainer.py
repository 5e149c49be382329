"""A run from Python: the same folder, log, status and figures as from the command line."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.api.trainer import Interrupted, Trainer
from selftask.cli.main import main
from selftask.distributed.local_process import raise_limit_of_open_files
from selftask.hooks.base import function_hook
from selftask.logs import read_json
from selftask.report.record_forms import total_steps
from selftask.task import build, task_state
from selftask.task.loop import train_loop

MORE = ("train.epochs=1", "eval.evaluations={knn: {k: [5]}}")


def labeled(folder: Path) -> str:
    return f"data.val={tiny.digits_file(folder, 'val.npz', 400, 430)}"


def names_in(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.name != ".lock"}


def log_of(run: Path) -> list[str]:
    """The lines without their date and time."""
    return [line[20:] for line in (run / "log.txt").read_text().splitlines()]


def test_the_length_of_a_run_is_known_from_its_first_row(tmp_path: Path) -> None:
    """Rounded epochs gave a wrong number of steps: 125,000 of 125,100 in 100 epochs of ImageNet."""
    more = ("train.batch_size=11", "train.epochs=3000", "train.stop_at=1")
    task = tiny.train("simclr", tmp_path, "run", *more)
    assert total_steps(None, 3000, tiny.rows(tmp_path / "run")[0]) == task.length.total_steps


def test_the_folder_is_that_of_the_command(tmp_path: Path) -> None:
    more = (labeled(tmp_path), *MORE)
    assert main(["train", "simclr/digits", *tiny.overrides("simclr", tmp_path, "cli", *more)]) == 0
    Trainer().train(tiny.task("simclr", tmp_path, "python", *more))
    cli, python = tmp_path / "cli", tmp_path / "python"
    assert names_in(python) == names_in(cli)
    assert {"config.yaml", "environment.json", "log.txt", "status.json"} < names_in(python)
    assert tiny.rows(python) == tiny.rows(cli)
    assert [row for row in tiny.rows(python) if "knn_top1" in row]
    texts = [(run / "config.yaml").read_text().replace(run.name, "RUN") for run in (cli, python)]
    assert texts[0] == texts[1]
    assert [len(log_of(run)) for run in (cli, python)] == [len(log_of(cli))] * 2
    assert log_of(python)[-1].startswith("RUN finished: 5 steps")
    assert read_json(python / "status.json")["state"] == "finished"
    assert tiny.differences(*map(tiny.last_state, (cli, python))) == []


def test_interrupted_resumed_and_complete(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        Trainer().train(tiny.task("simclr", tmp_path, "run", "train.stop_at=2", MORE[0]))
    run = tmp_path / "run"
    assert read_json(run / "status.json")["state"] == "interrupted"
    assert log_of(run)[-1].startswith("RUN interrupted by ")
    Trainer().train(tiny.task("simclr", tmp_path, "run", MORE[0]))
    assert read_json(run / "status.json")["state"] == "finished"

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    again = tiny.task("simclr", tmp_path, "run", MORE[0])
    Trainer().train(again)
    assert again.steps_done == 5
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_fails_is_written_down_and_raised(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run", MORE[0])
    task.train_step_function = lambda task: [][task.steps_done]
    with pytest.raises(IndexError, match="out of range"):
        Trainer().train(task)
    assert read_json(tmp_path / "run/status.json")["state"] == "failed"
    last = log_of(tmp_path / "run")[-1]
    assert re.match(r"RUN FAILED at step 1 on rank 0: \S*test_trainer.py:\d+: IndexError", last)


def test_a_model_that_no_machine_has_room_for(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run", MORE[0])
    task.train_step_function = lambda task: torch.empty(10**17)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        Trainer().train(task)
    error = read_json(tmp_path / "run/status.json")["error"]
    assert error.startswith("the machine's memory is full; try a smaller model or train.batch_size")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_float16_on_a_cpu_is_advised_against(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny.overrides("simclr", tmp_path, "run", "train.device=auto", "train.max_steps=1")
    assert main(["train", "simclr/digits", *words, "train.precision=float16"]) == 0
    assert "float16 is slow on a CPU, and its range is small" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("soft", "hard", "expected"), [(256, 9000, 4096), (256, 1000, 1000), (5000, 9000, 5000)]
)
def test_the_limit_of_open_files_is_raised(
    soft: int, hard: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not lowered, and not above the hard limit."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    raise_limit_of_open_files()
    assert limits[-1] == (expected, hard)


def test_a_run_raises_the_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        Trainer().train(tiny.task("simclr", tmp_path, "run", "train.max_steps=1"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(4096, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


PARTS = ("data_module", "base_model", "loss", "optimizer", "grad_scaler", "named_hooks")


def test_parts_are_built_by_prepare_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights to start from come before ranks and optimizer, the checkpoint after all parts."""
    tiny.train("simclr", tmp_path, "run", "train.stop_at=1")
    weights = tmp_path / "weights.pt"
    torch.save(tiny.last_state(tmp_path / "run")["model"], weights)
    order: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return function(*args, **kwargs)

        return call

    for module, names in (
        (build, ("build_backbone", "load_init", "reductions", "build_optimizer", "hooks")),
        (task_state, ("resume", "restore")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    more = ("train.stop_at=2", f"init.backbone={weights}", "resume=auto")
    task = tiny.task("simclr", tmp_path, "run", *more)
    points = ("after_load", "on_start", "on_phase_start")
    task.add_hook(
        function_hook(**{name: lambda _, name=name: order.append(name) for name in points})
    )
    assert not [name for name in PARTS if hasattr(task, name)]
    assert order == []
    with pytest.raises(Interrupted):
        train_loop(task)
    assert [name for name in PARTS if hasattr(task, name)] == list(PARTS)
    built = ["build_backbone", "load_init", "reductions", "build_optimizer", "hooks"]
    assert order == [*built, "resume", "restore", *points]
    assert task.steps_done == 2


def test_a_step_before_its_phase(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path)
    for prepare in (lambda: None, task.prepare):
        prepare()
        with pytest.raises(RuntimeError, match=r"step\(\) before on_phase_start\(\)"):
            task.step()
    task.on_start()
    task.on_phase_start()
    task.step()
    assert task.steps_done == 1
    task.close()
