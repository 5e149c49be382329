"""Checks of ``acceptance.py`` that compare a device with a CPU, or with itself."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tiny
from gpu.rows import Result, Setting, first_line
from selftask.distributed.accelerator import names
from selftask.parallel.sync_batch_norm import Ranks, synchronize_batch_norm
from selftask.registry import OPTIMIZERS
from selftask.task.loop import iterate_steps

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "augmented": 1e-2}  # relative, of losses
LIMIT_OF_GRADIENTS = 1e-4
MOVED = 1e-5  # of a weight, in each step of a run that shows how training amplifies differences
AMPLIFIED = 20  # times the difference of that run; of bfloat16 on a CPU, 3 times
AMPLIFIED_HALF = 3
EXACT = ("train.cudnn_tf32=false", "train.cudnn_benchmark=false")  # always the same kernels
QUIET = ("hooks.progress=null", "train.log_every=1000")


def check_environment(setting: Setting) -> Iterator[Result]:
    yield Result("environment", "torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in names():
        yield Result("environment", "device", name)
    if setting.device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        yield Result("environment", "bfloat16", "native" if native else "emulated")


def of_each_method(
    check: Callable[[Setting, str], Iterator[Result]],
) -> Callable[[Setting], Iterator[Result]]:
    """Decorate a check of one method to check all; an exception ends only that method."""

    def check_all(setting: Setting) -> Iterator[Result]:
        for method in setting.methods:
            try:
                for result in check(setting, method):
                    yield replace(result, of_method=True)
            except Exception as error:  # noqa: BLE001 - shown in the table, as a failure
                traceback.print_exception(error)
                name = check.__name__.removeprefix("check_")
                yield Result.stopped(name, method, error, of_method=True)

    return check_all


@of_each_method
def check_waits(setting: Setting, method: str) -> Iterator[Result]:
    """The first step of a run may wait, for example to create constants."""
    words = (*QUIET, "train.epochs=1", setting.on_device)
    steps = iterate_steps(tiny.task(method, setting.folder, f"waits-{method}", *words))
    next(steps)
    problem = ""
    try:
        for _ in range(tiny.STEPS_PER_EPOCH - 2):
            with setting.without_waits():
                next(steps)
    except RuntimeError as error:
        problem = f"{str(error).splitlines()[0]} ({_line_of(error)})"
    steps.close()
    yield Result("waits", method, problem or "none", "none", not problem)


def _line_of(error: Exception) -> str:
    """Return file and line of the innermost frame in this repository."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(f"{ROOT}{os.sep}")]
    return f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno}" if own else "unknown"


def losses(
    setting: Setting, method: str, name: str, *words: str, moved: bool = False
) -> list[float]:
    """Return the loss of each step of a tiny run; ``moved``: each step also moves its weights."""
    chosen = ("hooks.progress=null", "train.epochs=4", *words)
    task = tiny.task(method, setting.folder, f"{name}-{method}", *chosen)
    kept, draws = [], torch.Generator().manual_seed(0)
    for _ in iterate_steps(task):
        kept.append(task.last_batch.loss)
        if moved:
            _move(task.model, draws)
    return [float(loss) for loss in kept]


@torch.no_grad()
def _move(model: torch.nn.Module, draws: torch.Generator) -> None:
    """Move each weight by at most ``MOVED`` of itself."""
    for weight in model.parameters():
        weight.mul_(1 + MOVED * (2 * torch.rand(weight.shape, generator=draws) - 1))


def difference(values: list[float], expected: list[float]) -> float:
    """Return the largest difference, relative to the mean of the expected magnitudes.

    Not to each value: the loss of SimSiam, for example, is zero between two steps.
    """
    scale = sum(map(abs, expected)) / len(expected)
    return max(abs(a - b) for a, b in zip(values, expected, strict=True)) / max(scale, 1e-12)


@of_each_method
def check_gradients(setting: Setting, method: str) -> Iterator[Result]:
    """Of the first step, in float32: the length of the difference beside that on a CPU.

    The better of two seeds: a ReLU whose input is zero within rounding changes a gradient by 1e-2.
    """
    error = 1.0
    for seed in (0, 1):
        words = ("train.precision=float32", f"train.seed={seed}", *EXACT)
        expected = gradients(setting, method, f"cpu-{seed}", *words, "train.device=cpu")
        values = gradients(setting, method, f"device-{seed}", *words, setting.on_device)
        error = min(error, float((values - expected).norm() / expected.norm()))
        if error <= LIMIT_OF_GRADIENTS:
            break
    most, passed = f"at most {LIMIT_OF_GRADIENTS:.0e}", error <= LIMIT_OF_GRADIENTS
    yield Result("gradients", method, f"{error:.1e}", most, passed)


def gradients(setting: Setting, method: str, name: str, *words: str) -> torch.Tensor:
    """Return all gradients of the first step of a tiny run, float64 on the CPU."""
    out = f"gradients-{name}-{method}"
    task = tiny.task(method, setting.folder, out, "hooks.progress=null", *words)
    steps = iterate_steps(task)
    next(steps)
    grads = [p.grad for p in task.model.parameters() if p.grad is not None]
    values = torch.cat([grad.detach().cpu().double().flatten() for grad in grads])
    steps.close()
    return values


@of_each_method
def check_losses(setting: Setting, method: str) -> Iterator[Result]:
    """Of both precisions; float32 with views made on the device, too."""
    words = {"float32": ("train.precision=float32", *EXACT)}
    words["bfloat16"] = ("train.precision=bfloat16", *EXACT)
    words["augmented"] = (*words["float32"], "data.augment_on=device")
    exact = losses(setting, method, "exact", *words["float32"], "train.device=cpu")
    moved = losses(setting, method, "moved", *words["float32"], "train.device=cpu", moved=True)
    rounding = {"float32": difference(moved, exact), "augmented": difference(moved, exact)}
    for way, limit in LIMITS.items():
        expected = exact
        if way != "float32":
            expected = losses(setting, method, f"cpu-{way}", *words[way], "train.device=cpu")
        values = losses(setting, method, f"device-{way}", *words[way], setting.on_device)
        if way == "bfloat16":  # both beside float32: rounding alone moves them apart
            rounding[way] = difference(expected, exact)
            expected = exact
        factor = AMPLIFIED_HALF if way == "bfloat16" else AMPLIFIED
        error, most = difference(values, expected), max(limit, factor * rounding[way])
        figure = f"{error:.1e} of {most:.0e}"
        yield Result(f"losses, {way}", method, figure, f"at most {most:.0e}", error <= most)


@of_each_method
def check_resume(setting: Setting, method: str) -> Iterator[Result]:
    quiet = (setting.on_device, "train.deterministic=true", "hooks.progress=null")
    tiny.train(method, setting.folder, f"whole-{method}", *quiet)
    for stop in ("train.stop_at=7", "train.stop_at=null"):
        tiny.train(method, setting.folder, f"stopped-{method}", *quiet, stop)
    rows = [tiny.rows(setting.folder / f"{name}-{method}") for name in ("whole", "stopped")]
    same = rows[0] == rows[1]
    yield Result("resume", method, "same bits" if same else "differs", "same bits", same)


def check_races(setting: Setting) -> Iterator[Result]:
    """Two processes for all methods: ``CUDA_LAUNCH_BLOCKING`` is read when CUDA starts."""
    printed = [setting.printed_losses(setting.methods, blocking) for blocking in ("0", "1")]
    for method in setting.methods:
        first, second = (losses[method] for losses in printed)
        errors = [value for value in (first, second) if isinstance(value, str)]
        same = not errors and first == second
        figure = "same bits" if same else (errors or ["differs"])[0]
        yield Result("races", method, figure, "same bits", same, of_method=True)


def print_losses(setting: Setting) -> dict[str, Any]:
    """Return the losses of each method, or the error that stopped it."""
    printed: dict[str, Any] = {}
    for method in setting.methods:
        try:
            words = ("train.deterministic=true", setting.on_device)
            printed[method] = losses(setting, method, "losses", *words)
        except Exception as error:  # noqa: BLE001 - shown in the table, as a failure
            printed[method] = first_line(error)
    return printed


def check_optimizers(setting: Setting) -> Iterator[Result]:
    for name in OPTIMIZERS.names():
        values = [_updated(name, device) for device in ("cpu", setting.device)]
        error = float((values[0] - values[1]).abs().max() / values[0].abs().max())
        most = 1e-3 if name == "muon" else 1e-5  # torch's Muon iterates in bfloat16
        yield Result("optimizers", name, f"{error:.1e}", f"at most {most:.0e}", error <= most)


def _updated(name: str, device: str) -> torch.Tensor:
    """Return two matrices after three updates."""
    draws = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 12, generator=draws) for _ in range(2)]
    grads = torch.randn(3, 2, 8, 12, generator=draws)
    parameters = [torch.nn.Parameter(weight.to(device)) for weight in weights]
    optimizer = OPTIMIZERS[name]().build([{"params": parameters, "lr": 0.01, "weight_decay": 0.1}])
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.to(device)
        optimizer.step()
    return torch.stack([parameter.detach().cpu() for parameter in parameters])


def check_batch_norm(setting: Setting) -> Iterator[Result]:
    draws = torch.Generator().manual_seed(0)
    images = 3 + 2 * torch.randn(16, 8, 14, 14, dtype=torch.float64, generator=draws)
    weights = torch.randn(images.shape, dtype=torch.float64, generator=draws)
    results = []
    for device, dtype in (("cpu", torch.float64), (setting.device, torch.float32)):
        norm: Any = torch.nn.BatchNorm2d(8, device=device, dtype=dtype)
        if dtype == torch.float32:
            synchronize_batch_norm(norm, Ranks(None))
        x = images.to(device, dtype).to(memory_format=torch.channels_last).requires_grad_()
        y = norm(x)
        (y * weights.to(device, dtype)).sum().backward()
        values: Any = (
            y,
            x.grad,
            norm.weight.grad,
            norm.bias.grad,
            norm.running_mean,
            norm.running_var,
        )
        results.append([value.detach().cpu().double() for value in values])
    for case, a, b in zip(("y", "dx", "dw", "db", "mean", "var"), *results, strict=True):
        error = float((a - b).abs().max() / a.abs().max())
        yield Result("batch_norm", case, f"{error:.1e}", "at most 1e-05", error <= 1e-5)
