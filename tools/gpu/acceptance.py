"""The first hour on a GPU: does selftask compute there what it computes on a CPU, and how fast?

    python tools/gpu/acceptance.py                   about 20 minutes, prints a table
    python tools/gpu/acceptance.py --out docs/gpu.md writes it, too
    python tools/gpu/acceptance.py --checks losses,resume --methods simclr,dino

Checks, each in its own time; an exception is a failure, shown in the table:

* ``environment``: versions, devices and what they support; never fails.
* ``waits``: steps between two log lines, with ``torch.cuda.set_sync_debug_mode("error")``.
* ``losses``: 20 steps on a CPU and on the GPU. In float32 (no TF32) they may differ by 1e-4:
  kernels sum in another order, and optimizers amplify that a little in each step. In bfloat16,
  whose numbers have 8 bits, by 2e-2.
* ``resume``: stopped at step 7 and resumed, with ``train.deterministic=true``: the same bits.
* ``races``: the losses in a process with ``CUDA_LAUNCH_BLOCKING=1``: the same bits. A kernel that
  reads what another stream has not yet written would differ.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ssl"), str(ROOT / "tests"), str(ROOT / "tools")]

import tiny  # noqa: E402
from gpu import throughput  # noqa: E402
from gpu.rows import Result, Setting  # noqa: E402
from selftask.distributed.accelerator import names  # noqa: E402
from selftask.parallel.sync_batch_norm import Ranks, synchronize_batch_norm  # noqa: E402
from selftask.registry import METHODS, OPTIMIZERS  # noqa: E402
from selftask.task.loop import iterate_steps  # noqa: E402

LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}  # relative difference of losses
STEPS_OF_RANKS = 10
LONGEST_END = 180  # seconds, of which NCCL's watchdog may take a minute
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


def check_waits(setting: Setting) -> Iterator[Result]:
    """The first step of a run may wait, for example to create constants."""
    for method in setting.methods:
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
    """Return the largest relative difference."""
    pairs = zip(values, expected, strict=True)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def check_losses(setting: Setting) -> Iterator[Result]:
    for method in setting.methods:
        for precision, limit in LIMITS.items():
            words = (f"train.precision={precision}", "train.cudnn_tf32=false")
            expected = losses(setting, method, f"cpu-{precision}", *words, "train.device=cpu")
            values = losses(setting, method, f"device-{precision}", *words, setting.on_device)
            error = difference(values, expected)
            case = f"{method}, {precision}"
            yield Result("losses", case, f"{error:.1e}", f"at most {limit:.0e}", error <= limit)


def check_resume(setting: Setting) -> Iterator[Result]:
    for method in setting.methods:
        words = (setting.on_device, "train.deterministic=true")
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
            words = [sys.executable, __file__, "--device", setting.device, "--print-losses", method]
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
    exact = ("train.precision=float32", "train.cudnn_tf32=false")
    out = f"ranks-{reduce}-{processes}"
    command = tiny.command(
        "simclr",
        setting.folder,
        out,
        *words,
        *exact,
        "parallel.sync_batch_norm=all",
        setting.on_device,
    )
    done = tiny.run(command, setting.folder)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    rows = tiny.rows(setting.folder / out)
    return [row["loss"] for row in rows if "loss" in row][:STEPS_OF_RANKS]


def _killed_rank(setting: Setting) -> Result:
    """The other ranks must end with an error, not wait for the killed one."""
    fault = "hooks.fault_injection={at: 3, rank: 1, kind: kill}"
    words = ("launch.processes=2", setting.on_device, fault)
    begun = time.monotonic()
    done = tiny.run(tiny.command("simclr", setting.folder, "killed", *words), setting.folder)
    seconds = time.monotonic() - begun
    passed = done.returncode != 0 and seconds < LONGEST_END
    expected = f"ends within {LONGEST_END} s with an error"
    return Result("ranks", "killed", f"exit {done.returncode} in {seconds:.0f} s", expected, passed)


CHECKS: dict[str, Callable[[Setting], Iterator[Result]]] = {
    name.removeprefix("check_"): check
    for name, check in [*globals().items(), *vars(throughput).items()]
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
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--print-losses", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; `selftask env` shows what it sees")
    with tempfile.TemporaryDirectory() as folder:
        methods = options.methods.split(",")
        ranks = min(2, torch.cuda.device_count())
        setting = Setting(options.device, methods, Path(folder), cuda_without_waits, ranks)
        if options.print_losses:
            words = ("train.deterministic=true", setting.on_device)
            print(json.dumps(losses(setting, options.print_losses, "losses", *words)))
            return 0
        results = run(setting, options.checks.split(","))
    if options.out:
        options.out.write_text(page(results), encoding="utf-8")
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
