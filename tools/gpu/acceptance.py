"""The first hour on a GPU: does selftask compute there what it computes on a CPU, and how fast?

    python tools/gpu/acceptance.py                   about 20 minutes, prints a table
    python tools/gpu/acceptance.py --out docs/gpu.md writes it, too
    python tools/gpu/acceptance.py --checks losses,resume --methods simclr,dino

Checks, each in its own time; an exception is a failure, shown in the table:

* ``environment``: versions, devices and what they support; never fails.
* ``waits``: steps between two log lines, with ``torch.cuda.set_sync_debug_mode("error")``.
* ``losses``: 20 steps on a CPU and on the GPU. In float32 (no TF32) they may differ by 1e-4 of the
  mean loss: kernels sum in another order, and optimizers amplify that a little in each step. In
  bfloat16, whose numbers have 8 bits, by 2e-2; CUDA's autocast runs softmax and norms in float32.
* ``resume``: stopped at step 7 and resumed, with ``train.deterministic=true``: the same bits.
* ``races``: the losses of all methods in a process with ``CUDA_LAUNCH_BLOCKING=1``: the same bits.
  A kernel that reads what another stream has not yet written would differ.
* ``optimizers``: three updates on a CPU and on the GPU: 1e-5.
* ``batch_norm``: synchronized BatchNorm by torch's kernels, beside float64 on a CPU: 1e-5.
* ``speed``: images a second of one GPU whose images are there already (nothing is expected of it
  yet), and the peak of torch's allocator beside the estimate of ``selftask plan``: 0.8 to 1.25.
* ``loader``: the same recipes with the loader, and with images kept on the GPU, beside these:
  at least 0.9, or the loader starves the GPU.
* ``bare_loop``: supervised steps beside forward, backward and SGD alone: at least 0.95.
* ``precision``: float32, TF32, bfloat16, float16; none may be slower than float32.
* ``compile``: losses of a compiled network: 2e-2.
* ``ranks``: with several GPUs, each kind of reduction with synchronized BatchNorm beside one GPU,
  in float32 (no TF32): 1e-4 over the first 10 steps; later ones amplify any difference. And a
  killed rank: the others end with an error.

Exit code 1 if a check failed; ``--out`` is written after each check, so that a time limit leaves
what is done. cuBLAS reads ``CUBLAS_WORKSPACE_CONFIG`` when it starts: the script sets it at its
beginning, for the checks with ``train.deterministic``. Runs are tiny: 80 digits, 32 pixels, 16 a
step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ssl"), str(ROOT / "tests"), str(ROOT / "tools")]

import tiny  # noqa: E402
from gpu import throughput  # noqa: E402
from gpu.rows import Result, Setting  # noqa: E402
from selftask.distributed.accelerator import empty_cache, names  # noqa: E402
from selftask.parallel.sync_batch_norm import Ranks, synchronize_batch_norm  # noqa: E402
from selftask.registry import METHODS, OPTIMIZERS  # noqa: E402
from selftask.task.loop import iterate_steps  # noqa: E402

LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}  # relative difference of losses
STEPS_OF_RANKS = 10
LONGEST_END = 180  # seconds, of which NCCL's watchdog may take a minute
EXACT = ("train.cudnn_tf32=false", "train.cudnn_benchmark=false")  # always the same kernels
QUIET = ("hooks.progress=null", "train.log_every=1000")


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


def of_each_method(
    check: Callable[[Setting, str], Iterator[Result]],
) -> Callable[[Setting], Iterator[Result]]:
    """Decorate a check of one method to check all; an exception ends only that method."""

    def check_all(setting: Setting) -> Iterator[Result]:
        for method in setting.methods:
            try:
                yield from check(setting, method)
            except Exception as error:  # noqa: BLE001 - shown in the table, as a failure
                yield stopped(check.__name__.removeprefix("check_"), method, error)

    return check_all


def stopped(check: str, case: str, error: Exception) -> Result:
    """Return the row of an exception."""
    return Result(check, case, _first_line(error), "no exception", passed=False)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


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
        problem = str(error).splitlines()[0]
    steps.close()
    yield Result("waits", method, problem or "none", "none", not problem)


def losses(setting: Setting, method: str, name: str, *words: str) -> list[float]:
    """Return the loss of each step of a tiny run."""
    chosen = ("hooks.progress=null", "train.epochs=4", *words)
    task = tiny.task(method, setting.folder, f"{name}-{method}", *chosen)
    kept = []
    for _ in iterate_steps(task):
        kept.append(task.last_batch.loss)
    return [float(loss) for loss in kept]


def difference(values: list[float], expected: list[float]) -> float:
    """Return the largest difference, relative to the mean of the expected magnitudes.

    Not to each value: the loss of SimSiam, for example, is zero between two steps.
    """
    scale = sum(map(abs, expected)) / len(expected)
    return max(abs(a - b) for a, b in zip(values, expected, strict=True)) / max(scale, 1e-12)


@of_each_method
def check_losses(setting: Setting, method: str) -> Iterator[Result]:
    for precision, limit in LIMITS.items():
        words = (f"train.precision={precision}", *EXACT)
        expected = losses(setting, method, f"cpu-{precision}", *words, "train.device=cpu")
        values = losses(setting, method, f"device-{precision}", *words, setting.on_device)
        error = difference(values, expected)
        case = f"{method}, {precision}"
        yield Result("losses", case, f"{error:.1e}", f"at most {limit:.0e}", error <= limit)


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
        yield Result("races", method, figure, "same bits", same)


def print_losses(setting: Setting) -> dict[str, Any]:
    """Return the losses of each method, or the error that stopped it."""
    printed: dict[str, Any] = {}
    for method in setting.methods:
        try:
            words = ("train.deterministic=true", setting.on_device)
            printed[method] = losses(setting, method, "losses", *words)
        except Exception as error:  # noqa: BLE001 - shown in the table, as a failure
            printed[method] = _first_line(error)
    return printed


def losses_in_process(methods: list[str], blocking: str) -> dict[str, Any]:
    """Return ``print_losses`` of a process with ``CUDA_LAUNCH_BLOCKING``."""
    words = [sys.executable, __file__, "--print-losses", "--methods", ",".join(methods)]
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": blocking}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"CUDA_LAUNCH_BLOCKING={blocking}: {_last_line(done.stderr)}")
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


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


def check_ranks(setting: Setting) -> Iterator[Result]:
    if setting.ranks < 2:
        yield Result("ranks", "several GPUs", "only one device here")
        return
    expected = _losses_of_ranks(setting, 1, "manual")
    for reduce in ("manual", "ddp", "fsdp"):
        error = difference(_losses_of_ranks(setting, 2, reduce), expected)
        yield Result("ranks", reduce, f"{error:.1e}", "at most 1e-04", error <= 1e-4)
    yield _killed_rank(setting)


def _losses_of_ranks(setting: Setting, processes: int, reduce: str) -> list[float]:
    """Return the losses of the first steps of a run in float32, without TF32."""
    words = (f"launch.processes={processes}", f"parallel.reduce={reduce}")
    out = f"ranks-{reduce}-{processes}"
    more = (
        *words,
        *EXACT,
        "train.precision=float32",
        "parallel.sync_batch_norm=all",
        setting.on_device,
    )
    done = setting.run_command("simclr", setting.folder, out, *more)
    if done.returncode:
        raise RuntimeError(_last_line(done.stderr))
    rows = tiny.rows(setting.folder / out)
    return [row["loss"] for row in rows if "loss" in row][:STEPS_OF_RANKS]


def run_command(
    method: str, folder: Path, out: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """Train in processes of their own."""
    return tiny.run(tiny.command(method, folder, out, *more), folder)


def _killed_rank(setting: Setting) -> Result:
    """The other ranks must end with an error, not wait for the killed one."""
    fault = "hooks.fault_injection={at: 3, rank: 1, kind: kill}"
    words = ("launch.processes=2", setting.on_device, fault)
    begun = time.monotonic()
    done = setting.run_command("simclr", setting.folder, "killed", *words)
    seconds = time.monotonic() - begun
    passed = done.returncode != 0 and seconds < LONGEST_END
    expected = f"ends within {LONGEST_END} s with an error"
    return Result("ranks", "killed", f"exit {done.returncode} in {seconds:.0f} s", expected, passed)


CHECKS: dict[str, Callable[[Setting], Iterator[Result]]] = {
    name.removeprefix("check_"): check
    for name, check in [*globals().items(), *vars(throughput).items()]
    if name.startswith("check_")
}


def run(setting: Setting, checks: list[str], out: Path | None = None) -> list[Result]:
    """Run the checks, each case to its first exception; print each result, and write ``out``."""
    results = []
    for name in checks:
        begun = time.monotonic()
        gc.collect()  # tasks of the last check hold memory of the device
        empty_cache(torch.device(setting.device))
        try:
            for result in CHECKS[name](setting):
                results.append(result)
                print(line(result), flush=True)
        except Exception as error:  # noqa: BLE001 - shown in the table, as a failure
            results.append(stopped(name, "stopped", error))
            print(line(results[-1]), flush=True)
        print(f"  ({name}: {time.monotonic() - begun:.0f} s)", flush=True)
        if out:
            out.write_text(page(results), encoding="utf-8")
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
    parser.add_argument("--print-losses", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; `selftask env` shows what it sees")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            device="cuda",
            methods=options.methods.split(","),
            folder=Path(folder),
            without_waits=cuda_without_waits,
            printed_losses=losses_in_process,
            run_command=run_command,
            ranks=min(2, torch.cuda.device_count()),
        )
        if options.print_losses:
            print(json.dumps(print_losses(setting)))
            return 0
        results = run(setting, options.checks.split(","), options.out)
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
