"""float16 with loss scaling, and torch's process-wide settings of precision and determinism."""

from __future__ import annotations

import copy
import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from ranks import run_ranks
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import GradScalerConfig
from selftask.distributed.device import precision_advice
from selftask.errors import ConfigError, RunError, StepSkipped
from selftask.optim.loss_scaler import LossScaler
from selftask.task import Task
from selftask.task.loop import train_loop
from selftask.task.numerics import describe_numerics, numerics, settle_precision

HALF = ("train.precision=float16", "hooks.ema={}", "train.grad_scaler.init_scale=1024")


# -- the scaler ------------------------------------------------------------------------------------


class Descent:
    """Plain gradient descent under Classy's contract."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.param_groups = [{"params": [parameter]}]

    def step(self, where: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= parameter.grad


@pytest.mark.parametrize("overflows", [[], [0], [2, 3], [1, 4, 9]])
def test_scales_are_those_of_torch(overflows: list[int]) -> None:
    """Against torch.amp.GradScaler over ten steps, of which some overflow."""
    options = {"init_scale": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.25}
    ours = LossScaler(GradScalerConfig(**options, growth_interval=3), lambda name, value: None)
    theirs = torch.amp.GradScaler("cpu", **options, growth_interval=3)
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    descent, sgd = Descent(weights[0]), torch.optim.SGD([weights[1]], lr=1.0)
    for step in range(10):
        factor = math.inf if step in overflows else 0.125
        for weight, scaler in zip(weights, (ours, theirs), strict=True):
            weight.grad = None
            scaler.scale((weight * factor).sum()).backward()
        try:
            ours.unscale_(descent)
            ours.step(descent, where=0.0)
            ours.update()
        except StepSkipped:
            assert step in overflows
        theirs.step(sgd)
        theirs.update()
        assert ours.state_dict().items() <= theirs.state_dict().items()  # loads a state of torch
        assert torch.equal(*weights)
    assert weights[0][0] == 1.0 - 0.125 * (10 - len(overflows))


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_gradients_of_two_dtypes(bad: int | None) -> None:
    """Both are divided by the scale, and either may overflow."""
    scaler = LossScaler(GradScalerConfig(init_scale=4.0), lambda name, value: None)
    weights = [nn.Parameter(torch.ones(2, dtype=kind)) for kind in (torch.float32, torch.float64)]
    for number, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, math.inf if number == bad else 6.0)
    optimizer = SimpleNamespace(param_groups=[{"params": weights}])
    with nullcontext() if bad is None else pytest.raises(StepSkipped):
        scaler.unscale_(optimizer)
    assert bad is not None or [w.grad.tolist() for w in weights] == [[1.5, 1.5]] * 2


def test_a_fixed_scale() -> None:
    config = GradScalerConfig(init_scale=128.0, growth_factor=1.0, growth_interval=1)
    scaler = LossScaler(config, lambda name, value: None)
    for _ in range(3):
        assert scaler.scale(torch.tensor(0.5)) == 64.0
        scaler.update()
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), math.inf)
    with pytest.raises(StepSkipped):
        scaler.unscale_(Descent(weight))
    scaler.update()
    assert scaler.get_scale() == 64.0, "an overflow lowers it, and it does not rise again"


def test_settings_of_the_scale_are_torchs() -> None:
    ours, theirs = GradScalerConfig(), torch.amp.GradScaler("cpu")
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(ours, name) == getattr(theirs, f"get_{name}")()
    assert ours.init_scale == theirs.get_scale()


def test_gradients_that_no_scale_makes_finite_are_an_error() -> None:
    scaler = LossScaler(GradScalerConfig(), lambda name, value: None)
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), math.nan)
    for _ in range(29):  # 2 ** 16 / 2 ** 30 is less than 1e-4
        with pytest.raises(StepSkipped):
            scaler.unscale_(Descent(weight))
    with pytest.raises(RunError, match=r"use train\.precision=bfloat16 or float32"):
        scaler.unscale_(Descent(weight))


# -- runs in float16 -------------------------------------------------------------------------------


def moved(task: Task) -> dict[str, Any]:
    """A copy of what an update moves; BatchNorm's statistics follow every forward pass."""
    state = copy.deepcopy(task.state_dict())
    return {
        key: without_statistics(state[key]) for key in ("model", "method", "optimizer", "hooks")
    }


def without_statistics(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    names = ("running_mean", "running_var", "num_batches_tracked")
    return {k: without_statistics(v) for k, v in state.items() if not str(k).endswith(names)}


def overflow_in_step(task: Task, step: int) -> None:
    """Let the gradient of one step overflow on this rank; its loss is finite."""
    forward = task.loss.forward

    def planted(output: Tensor, batch: Batch) -> Any:
        if task.steps_done + 1 == step:
            output.register_hook(lambda gradient: gradient * 1e38)
        return forward(output, batch)

    task.loss.forward = planted


def skipped_step(rank: int, folder: Path, world: int, *more: str) -> dict[str, Any]:
    """Two steps and one that overflows on the last rank."""
    if world > 1:
        numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    task = tiny.task("moco", folder, f"run{world}", *HALF, *more)
    task.prepare()
    if rank == world - 1:
        overflow_in_step(task, 3)
    task.on_start()
    task.on_phase_start()
    task.step()
    task.step()
    before, where = moved(task), task.where
    good_steps = task.grad_scaler.state_dict()["_growth_tracker"]
    rate = [group["lr"] for group in task.optimizer.param_groups]
    task.step()
    results = {
        "changes": tiny.differences(before, moved(task)),
        "where": task.where - where,
        "lr": [group["lr"] for group in task.optimizer.param_groups] == rate,
        "good_steps": good_steps,
        "skipped": task.clock.skipped,
        "scale": task.grad_scaler.state_dict()["scale"],
        "logged": task.last_row["loss_scale"],
        "half": task.last_batch.output.dtype == torch.float16,
    }
    task.step()
    results["next"] = task.where > where
    task.close()
    return results


SKIPPED = {
    "changes": [],
    "where": 0.0,
    "lr": True,
    "good_steps": 2,
    "skipped": 1,
    "scale": 512.0,
    "logged": 512.0,
    "half": True,
    "next": True,
}


def test_an_overflow_moves_nothing(tmp_path: Path) -> None:
    """Parameters, optimizer, teacher, queue, averaged weights and schedules stay; data go on."""
    assert skipped_step(0, tmp_path, 1) == SKIPPED


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["manual", "ddp", "fsdp"])
def test_an_overflow_on_one_rank_of_two_is_skipped_by_both(reduce: str, tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    results = run_ranks(skipped_step, 2, tmp_path, 2, f"parallel={reduce}")
    assert results == [SKIPPED, SKIPPED]


def test_stopped_and_resumed_in_float16(tmp_path: Path) -> None:
    scaler = "train.grad_scaler={init_scale: 1e9, growth_interval: 3}"  # shrinks, then grows
    tiny.train("moco", tmp_path, "whole", *HALF, scaler)
    for stop in ("train.stop_at=4", "train.stop_at=null"):
        tiny.train("moco", tmp_path, "parts", *HALF, scaler, stop)
    whole, parts = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert 0 < whole["clock"]["skipped"] < whole["clock"]["steps_done"] == tiny.STEPS
    assert not tiny.differences(whole, parts)
    rows = tiny.rows(tmp_path / "whole")
    assert len({row["loss_scale"] for row in rows if "loss_scale" in row}) > 2


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["train.precision=float16", "train.grad_scaler.enabled=false"], torch.float16),
        (["train.precision=bfloat16"], torch.bfloat16),
        ([], torch.float32),
    ],
)
def test_steps_without_a_scaler(words: list[str], dtype: torch.dtype, tmp_path: Path) -> None:
    """The network's output has the type of the run; its weights stay in float32.

    The loss, too, is computed under autocast.
    """
    task = tiny.task("simclr", tmp_path, "run", *words)
    task.prepare()
    assert not task.grad_scaler.is_enabled()
    autocast: list[bool] = []
    see = lambda loss, args: autocast.append(torch.is_autocast_enabled("cpu"))  # noqa: E731
    task.loss.register_forward_pre_hook(see)
    task.on_start()
    task.on_phase_start()
    task.step()
    assert task.last_batch.output.dtype == dtype
    assert autocast == [dtype != torch.float32]
    assert {p.dtype for p in task.base_model.parameters()} == {torch.float32}
    task.close()


# -- process-wide settings -------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cudnn.allow_tf32,
    }


@pytest.mark.parametrize(
    ("options", "inside"),
    [
        (["train.matmul_precision=high"], {"matmul": "high"}),
        (["train.matmul_precision=medium"], {"matmul": "medium"}),
        (["train.cudnn_benchmark=true"], {"benchmark": True}),
        (["train.cudnn_tf32=false"], {"tf32": False}),
        (["train.deterministic=true"], {"deterministic": True}),
        ([], {}),
    ],
)
def test_settings_hold_during_training_only(
    options: list[str], inside: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = settings()
    seen = []
    task = tiny.task("simclr", tmp_path, "run", *options, "train.stop_at=1", "train.epochs=1")
    monkeypatch.setattr(task, "prepare", lambda: seen.append(settings()) or stop())
    with pytest.raises(InterruptedError):
        train_loop(task)
    assert seen == [{**before, **inside}]
    assert settings() == before
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == ("deterministic" in inside)


def stop() -> None:
    raise InterruptedError


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("words", "benchmark", "text"),
    [
        ([], True, "cudnn_benchmark on (auto: shapes repeat)"),
        (["train.deterministic=true"], False, "cudnn_benchmark off (train.deterministic)"),
        (["train.cudnn_benchmark=false"], False, "cudnn_benchmark off"),
        (["train.matmul_precision=high"], True, "products high;"),
        (["train.cudnn_tf32=false"], True, "cuDNN's TF32 off;"),
        ([], True, "cuDNN's TF32 on (torch's default; train.cudnn_tf32=false"),
    ],
)
def test_defaults_on_cuda_are_decided_and_printed(
    words: list[str], benchmark: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    train, before = load_config("simclr/digits", words).train, settings()
    with numerics(train, CUDA):
        assert settings()["benchmark"] == benchmark
    assert settings() == before
    assert text in str(describe_numerics(train, CUDA))
    assert describe_numerics(train, CPU) is None


@pytest.mark.parametrize(
    ("words", "device", "is_native", "expected"),
    [
        ([], "cpu", True, "float32"),
        ([], "cuda", True, "bfloat16"),
        ([], "cuda", False, "float32"),
        (["train.precision=float32"], "cuda", True, "float32"),
        (["train.precision=float16"], "cpu", True, "float16"),
        (["train.step=manual"], "cuda", True, "float32"),
    ],
)
def test_auto_is_bfloat16_on_a_gpu_that_has_it(
    words: list[str],
    device: str,
    is_native: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native)
    config = load_config("simclr/digits", words)
    settled = settle_precision(config, torch.device(device))
    assert settled.train.precision == expected
    is_auto = config.train.precision == "auto"
    assert settled.place("train.precision").startswith("auto: ") == is_auto


@pytest.mark.parametrize(
    ("precision", "is_native", "expected"),
    [
        ("float32", True, "train.precision=bfloat16 uses"),
        ("float32", False, "train.precision=float16 uses"),
        ("bfloat16", False, "emulated on this GPU; train.precision=float16"),
        ("bfloat16", True, None),
        ("float16", False, None),
    ],
)
def test_precision_advice_on_cuda(
    precision: str, is_native: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native)
    advice = precision_advice(precision, CUDA)
    assert advice is None if expected is None else expected in str(advice)


def test_deterministic_refuses_other_operations(tmp_path: Path) -> None:
    config = tiny.config("simclr", tmp_path, "run", "train.deterministic=true")
    with numerics(config.train, CPU), pytest.raises(RuntimeError, match="deterministic"):
        torch.empty(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["train.device=cuda:1"], "give the type only (cuda); each process takes"),
        (["train.device=quantum"], "one of auto, cpu, cuda, mps, xpu"),
        (["train.device=mps", "launch.processes=2"], "set launch.processes=1"),
        (["train.deterministic=true", "train.cudnn_benchmark=true"], "take one of them out"),
        (["train.compile=true"], "one of False, model, step"),
        (["train.compile=step"], "train.step=compiled"),
        (["train.grad_scaler.backoff_factor=1.5"], "must be below 1"),
        (["train.grad_scaler.growth=3"], "did you mean 'train.grad_scaler.growth_factor'"),
    ],
)
def test_refused_before_training(options: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("simclr/digits", options)
    assert text in str(error.value)


def test_a_run_of_another_precision_continues_in_float16(tmp_path: Path) -> None:
    """Its checkpoint has no scale; the first one is that of the config."""
    tiny.train("simclr", tmp_path, "run", "train.epochs=1")
    task = tiny.train("simclr", tmp_path, "run", "train.epochs=2", "train.precision=float16")
    assert task.resumed and task.steps_done == 2 * tiny.STEPS_PER_EPOCH
    assert task.grad_scaler.state_dict()["scale"] > 0
