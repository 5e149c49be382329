"""The first hour on a GPU: does selftask compute there what it computes on a CPU, and how fast?

    python tools/gpu/acceptance.py                   about 20 minutes, prints a table
    python tools/gpu/acceptance.py --out docs/gpu.md writes it, too
    python tools/gpu/acceptance.py --checks losses,resume --methods simclr,dino

Checks, each in its own time; an exception is a failure, shown in the table:

* ``environment``: versions, devices and what they support; never fails.
* ``waits``: steps between two log lines, with ``torch.cuda.set_sync_debug_mode("error")``.
* ``losses``: 15 steps on a CPU and on the GPU. In float32 (no TF32) they may differ by 1e-4:
  kernels sum in another order, and optimizers amplify that a little in each step. In bfloat16,
  whose numbers have 8 bits, by 2e-2.
* ``resume``: stopped at step 7 and resumed, with ``train.deterministic=true``: the same bits.
* ``races``: the losses in a process with ``CUDA_LAUNCH_BLOCKING=1``: the same bits. A kernel that
  reads what another stream has not yet written would differ.
* ``optimizers``: three updates on a CPU and on the GPU: 1e-5.
* ``batch_norm``: synchronized BatchNorm by torch's kernels, beside float64 on a CPU: 1e-5.
* ``speed``: images a second of one GPU without a loader, which nothing is expected of yet, and the
  peak of torch's allocator beside the estimate of ``selftask plan``: 0.8 to 1.25.
* ``ranks``: with several GPUs, each kind of reduction beside one GPU: 1e-3 after 15 steps.

Exit code 1 if a check failed. Runs of the checks are tiny: 80 digits, 32 pixels, 16 a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ssl"), str(ROOT / "tests")]

import tiny  # noqa: E402
from selftask.config.load import load_config  # noqa: E402
from selftask.distributed.accelerator import (  # noqa: E402
    memory_bytes,
    names,
    reset_memory_peaks,
)
from selftask.parallel.sync_batch_norm import Ranks, synchronize_batch_norm  # noqa: E402
from selftask.plan.assumptions import take_assumptions  # noqa: E402
from selftask.plan.plan import make_plan  # noqa: E402
from selftask.registry import METHODS, OPTIMIZERS  # noqa: E402
from selftask.task.loop import iterate_steps  # noqa: E402

LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}  # relative difference of losses
BIG = ("supervised/resnet50_imagenet", "simclr/resnet50_imagenet", "mae/vit_base_imagenet")
ON_DEVICE = "train.device=auto"
QUIET = ("hooks.progress=null", "train.log_every=1000")


@dataclass(frozen=True)
class Result:
    """A row of the table; ``passed`` is None if nothing is expected."""

    check: str
    case: str
    figure: str
    expected: str = ""
    passed: bool | None = None


@dataclass(frozen=True)
class Setting:
    """Where and what to check."""

    device: str
    methods: list[str]
    folder: Path
    without_waits: Callable[[], AbstractContextManager[Any]]


@contextmanager
def cuda_without_waits() -> Iterator[None]:
    """Context in which an operation that waits for the GPU raises an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_environment(setting: Setting) -> Iterator[Result]:
    yield Result("environment", "torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in names():
        yield Result("environment", "device", name)
    if setting.device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        yield Result("environment", "bfloat16", "native" if native else "emulated")


def check_waits(setting: Setting) -> Iterator[Result]:
    """The first step of a run may wait, for example to create constants."""
    for method in setting.methods:
        words = (*QUIET, "train.epochs=1", ON_DEVICE)
        steps = iterate_steps(tiny.task(method, setting.folder, f"waits-{method}", *words))
        next(steps)
        problem = ""
        try:
            for _ in range(tiny.STEPS_PER_EPOCH - 2):
                with setting.without_waits():
                    next(steps)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        steps.close()
        yield Result("waits", method, problem or "none", "none", not problem)


def losses(setting: Setting, method: str, name: str, *words: str) -> list[float]:
    """Return the loss of each step of a tiny run."""
    chosen = ("hooks.progress=null", *words)
    task = tiny.task(method, setting.folder, f"{name}-{method}", *chosen)
    kept = []
    for _ in iterate_steps(task):
        kept.append(task.last_batch.loss)
    return [float(loss) for loss in kept]


def difference(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    pairs = zip(values, expected, strict=True)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def check_losses(setting: Setting) -> Iterator[Result]:
    for method in setting.methods:
        for precision, limit in LIMITS.items():
            words = (f"train.precision={precision}", "train.cudnn_tf32=false")
            expected = losses(setting, method, f"cpu-{precision}", *words, "train.device=cpu")
            values = losses(setting, method, f"device-{precision}", *words, ON_DEVICE)
            found = difference(values, expected)
            case = f"{method}, {precision}"
            yield Result("losses", case, f"{found:.1e}", f"at most {limit:.0e}", found <= limit)


def check_resume(setting: Setting) -> Iterator[Result]:
    for method in setting.methods:
        words = (ON_DEVICE, "train.deterministic=true")
        quiet = (*words, "hooks.progress=null")
        tiny.train(method, setting.folder, f"whole-{method}", *quiet)
        for stop in ("train.stop_at=7", "train.stop_at=null"):
            tiny.train(method, setting.folder, f"stopped-{method}", *quiet, stop)
        rows = [tiny.rows(setting.folder / f"{name}-{method}") for name in ("whole", "stopped")]
        same = rows[0] == rows[1]
        yield Result("resume", method, "same bits" if same else "differs", "same bits", same)


def check_races(setting: Setting) -> Iterator[Result]:
    for method in setting.methods:
        printed = []
        for blocking in ("0", "1"):
            words = [sys.executable, __file__, "--print-losses", method]
            environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": blocking}
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, check=True
            )
            printed.append(json.loads(done.stdout.splitlines()[-1]))
        same = printed[0] == printed[1]
        yield Result("races", method, "same bits" if same else "differs", "same bits", same)


def check_optimizers(setting: Setting) -> Iterator[Result]:
    for name in OPTIMIZERS.names():
        values = [_updated(name, device) for device in ("cpu", setting.device)]
        error = float((values[0] - values[1]).abs().max() / values[0].abs().max())
        yield Result("optimizers", name, f"{error:.1e}", "at most 1e-05", error <= 1e-5)


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
        values = (y, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var)
        results.append([value.detach().cpu().double() for value in values])
    for case, a, b in zip(("y", "dx", "dw", "db", "mean", "var"), *results, strict=True):
        error = float((a - b).abs().max() / a.abs().max())
        yield Result("batch_norm", case, f"{error:.1e}", "at most 1e-05", error <= 1e-5)


def check_speed(setting: Setting) -> Iterator[Result]:
    """Train steps of random images that are on the device, at 128 images."""
    device = torch.device(setting.device)
    for recipe in BIG:
        words = ["samples=1.28M", "classes=1000", "train.batch_size=128"]
        overrides, assumptions = take_assumptions([*words, ON_DEVICE])
        reset_memory_peaks(device)
        plan = make_plan(load_config(recipe, overrides), assumptions, measured=True)
        yield Result("speed", recipe, f"{plan.given.images_per_s:,.0f} images/s")
        peak = memory_bytes(device).get("allocated_peak", 0)
        ratio = peak / plan.memory.total
        passed = 0.8 <= ratio <= 1.25
        yield Result(
            "speed", f"{recipe}, memory", f"{ratio:.2f} of the plan", "0.8 to 1.25", passed
        )


def check_ranks(setting: Setting) -> Iterator[Result]:
    count = torch.cuda.device_count() if setting.device == "cuda" else 1
    if count < 2:
        yield Result("ranks", "several GPUs", "only one device here")
        return
    for way in ("manual", "ddp", "fsdp"):
        ends = []
        for processes in (1, 2):
            more = (f"launch.processes={processes}", f"parallel.reduce={way}")
            synced = ("parallel.sync_batch_norm=all", ON_DEVICE)
            out = f"ranks-{way}-{processes}"
            done = tiny.run(
                tiny.command("simclr", setting.folder, out, *more, *synced), setting.folder
            )
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            ends.append([row["loss"] for row in tiny.rows(setting.folder / out) if "loss" in row])
        error = difference(ends[1], ends[0])
        yield Result("ranks", way, f"{error:.1e}", "at most 1e-03", error <= 1e-3)


CHECKS: dict[str, Callable[[Setting], Iterator[Result]]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def run(setting: Setting, checks: list[str]) -> list[Result]:
    """Run the checks, each to its first exception; print each result."""
    results = []
    for name in checks:
        begun = time.monotonic()
        try:
            for result in CHECKS[name](setting):
                results.append(result)
                print(line(result), flush=True)
        except Exception as error:  # noqa: BLE001 - shown in the table, as a failure
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            results.append(Result(name, "stopped", text[:160], "no exception", passed=False))
            print(line(results[-1]), flush=True)
        print(f"  ({name}: {time.monotonic() - begun:.0f} s)", flush=True)
    return results


def line(result: Result) -> str:
    """Return a row of the table in Markdown."""
    word = {None: "-", True: "pass", False: "FAIL"}[result.passed]
    cells = (word, result.check, result.case, result.figure, result.expected)
    return "| " + " | ".join(cells) + " |"


def page(results: list[Result]) -> str:
    """Return the page for ``docs/``."""
    failed = sum(result.passed is False for result in results)
    head = ["# On a GPU", "", f"`python tools/gpu/acceptance.py`: {failed} checks failed.", ""]
    table = ["| | check | case | figure | expected |", "|---|---|---|---|---|", *map(line, results)]
    return "\n".join([*head, *table, ""])


def main() -> int:
    """Run the checks that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checks", default=",".join(CHECKS))
    parser.add_argument("--methods", default=",".join(METHODS.names()))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--print-losses", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; `selftask env` shows what it sees")
    with tempfile.TemporaryDirectory() as folder:
        methods = options.methods.split(",")
        setting = Setting("cuda", methods, Path(folder), cuda_without_waits)
        if options.print_losses:
            words = ("train.deterministic=true", ON_DEVICE)
            print(json.dumps(losses(setting, options.print_losses, "losses", *words)))
            return 0
        results = run(setting, options.checks.split(","))
    if options.out:
        options.out.write_text(page(results), encoding="utf-8")
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
