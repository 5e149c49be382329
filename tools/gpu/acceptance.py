"""The first hour on a GPU: does selftask compute there what it computes on a CPU, and how fast?

    python tools/gpu/acceptance.py                   checks all methods, prints a table
    python tools/gpu/acceptance.py --out gpu.md      writes it, too
    python tools/gpu/acceptance.py --checks losses,resume --methods simclr,dino
    python tools/gpu/acceptance.py --processes 12    checks of methods, 12 methods at once

Checks, each in its own time; an exception is a failure, shown in the table:

* ``environment``: versions, devices and what they support; never fails.
* ``waits``: steps between two log lines, with ``torch.cuda.set_sync_debug_mode("error")``.
* ``gradients``: of the first step, on a CPU and on the GPU, in float32 (no TF32): 1e-4 of their
  length.
* ``losses``: 20 steps on a CPU and on the GPU. Kernels sum in another order, and training amplifies
  any difference: networks with BatchNorm and 16 images a thousand times and more. So what is
  expected is measured: in float32 1e-4 of the mean loss, or 20 times what a run on the CPU differs
  by whose weights move by 1e-5 of themselves in each step; with ``data.augment_on=device`` at
  least 1e-2, since a pixel may round to the next of its 256 levels. In bfloat16, beside float32 on
  the CPU, 2e-2, or three times what bfloat16 on the CPU differs by.
* ``resume``: stopped at step 7 and resumed, with ``train.deterministic=true``: the same bits.
* ``races``: the losses of all methods in a process with ``CUDA_LAUNCH_BLOCKING=1``: the same bits.
  A kernel that reads what another stream has not yet written would differ.
* ``optimizers``: three updates on a CPU and on the GPU: 1e-5; Muon in bfloat16: 1e-3.
* ``batch_norm``: synchronized BatchNorm by torch's kernels, beside float64 on a CPU: 1e-5.
* ``speed``: images a second of one GPU whose images are there already (nothing is expected of it
  yet), and the peak of torch's allocator beside the estimate of ``selftask plan``: 0.8 to 1.25.
* ``loader``: the same recipes with the loader, and with images kept on the GPU, beside these:
  at least 0.9, or the loader starves the GPU.
* ``bare_loop``: supervised steps beside forward, backward and SGD alone: at least 0.95.
* ``precision``: float32, TF32, bfloat16, float16; none may be slower than float32.
* ``compile``: losses in float32 of a compiled network, with CUDA graphs, too: 2e-2.
* ``compiled_speed``: images a second of compiled networks beside eager ones; nothing is expected.
* ``commands``: evaluations of one run on a CPU and on the GPU: 0.03; features, fine-tuning, export
  and report end without an error.
* ``ranks``: with several GPUs, each kind of reduction with synchronized BatchNorm beside one GPU,
  in float32 (no TF32): 1e-4 over the first 10 steps; later ones amplify any difference. And a
  killed rank: the others end with an error.

Exit code 1 if a check failed; ``--out`` is written after each row, so that a time limit leaves
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
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ssl"), str(ROOT / "tests"), str(ROOT / "tools")]

import tiny  # noqa: E402
from gpu import agreement, commands, throughput  # noqa: E402
from gpu.rows import Result, Setting, Sizes, Table  # noqa: E402
from selftask.distributed.accelerator import empty_cache  # noqa: E402
from selftask.registry import METHODS  # noqa: E402

OF_METHODS = ("waits", "gradients", "losses", "resume", "races")
CHECKS: dict[str, Callable[[Setting], Iterator[Result]]] = {
    name.removeprefix("check_"): check
    for module in (agreement, throughput, commands)
    for name, check in vars(module).items()
    if name.startswith("check_")
}


@contextmanager
def cuda_without_waits() -> Iterator[None]:
    """Context in which an operation that waits for the GPU raises an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def losses_in_process(methods: list[str], blocking: str) -> dict[str, Any]:
    """Return ``print_losses`` of a process with ``CUDA_LAUNCH_BLOCKING``."""
    words = [sys.executable, __file__, "--print-losses", "--methods", ",".join(methods)]
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": blocking}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"CUDA_LAUNCH_BLOCKING={blocking}: {commands.last_line(done.stderr)}")
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def run_command(
    method: str, folder: Path, out: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """Train in processes of their own."""
    return tiny.run(tiny.command(method, folder, out, *more), folder)


def run(setting: Setting, checks: list[str], table: Table) -> None:
    """Add the rows of the checks to ``table``, of each case to its first exception."""
    for name in checks:
        begun = time.monotonic()
        gc.collect()  # tasks of the last check hold memory of the device
        empty_cache(torch.device(setting.device))
        try:
            for result in CHECKS[name](setting):
                table.add(result)
        except Exception as error:  # noqa: BLE001 - shown in the table, as a failure
            traceback.print_exception(error)
            table.add(Result.stopped(name, "stopped", error))
        print(f"  ({name}: {time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)


def run_in_processes(checks: list[str], methods: list[str], count: int, table: Table) -> None:
    """Run checks of each method in ``count`` processes at once, which share CPUs and GPU."""

    def follow(part: list[str]) -> None:
        words = ["--checks", ",".join(checks), "--methods", ",".join(part), "--json"]
        command = [sys.executable, __file__, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    table.add(Result(**json.loads(line)))
        if process.returncode not in (0, 1):
            error = RuntimeError(f"exit {process.returncode}")
            table.add(Result.stopped("process", ", ".join(part), error))

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(follow, (methods[first::count] for first in range(count))))


def main() -> int:
    """Run the checks that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checks", default=",".join(CHECKS))
    parser.add_argument("--methods", default=",".join(METHODS.names()))
    recipes = ",".join(Sizes.recipes)
    parser.add_argument("--recipes", default=recipes, help="for checks of speed and memory")
    parser.add_argument("--processes", type=int, default=1, help="for checks of methods")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--print-losses", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; `selftask env` shows what it sees")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    checks, methods = options.checks.split(","), options.methods.split(",")
    table = Table(options.out, (lambda row: json.dumps(asdict(row))) if options.json else str)
    if options.processes > 1:
        shared = [name for name in checks if name in OF_METHODS]
        checks = [name for name in checks if name not in OF_METHODS]
        run_in_processes(shared, methods, options.processes, table)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            device="cuda",
            methods=methods,
            folder=Path(folder),
            without_waits=cuda_without_waits,
            printed_losses=losses_in_process,
            run_command=run_command,
            ranks=min(2, torch.cuda.device_count()),
            sizes=Sizes(recipes=tuple(options.recipes.split(","))),
        )
        if options.print_losses:
            print(json.dumps(agreement.print_losses(setting)))
            return 0
        run(setting, checks, table)
    return int(table.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
