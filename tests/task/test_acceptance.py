"""`tools/gpu/acceptance.py` on the imagined device: it passes, and sees planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import imagined_device
import tiny
from gpu import acceptance, agreement, commands, throughput
from gpu.rows import Result, Setting, Sizes, Table
from imagined_device import NAME, ImaginedDevice, in_process
from imagined_ranks import run_ranks
from selftask.registry import METHODS

CHECKS = [
    *("environment", "waits", "gradients", "losses", "resume", "optimizers", "batch_norm"),
    *("races", "ranks"),
]


def accepted(folder: Path, checks: list[str], plant: Any) -> list[Result]:
    """Rows of the checks with SimCLR; ``plant`` patches something."""
    with ImaginedDevice() as device, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def without_waits() -> Iterator[None]:
            device.waits.clear()
            yield
            if device.waits:
                raise RuntimeError(device.waits[0])

        if plant is not None:
            plant(patch)
        printed, ranks = losses_with_launches, run_command
        setting = Setting(NAME, ["simclr"], folder, without_waits, printed, ranks, ranks=2)
        table = Table(folder / "page.md")
        acceptance.run(setting, checks, table)
        return table.results


def losses_with_launches(methods: list[str], blocking: str) -> dict[str, Any]:
    """In a process of its own, as the script does."""
    with TemporaryDirectory() as folder, patch_environment("CUDA_LAUNCH_BLOCKING", blocking):
        (printed,) = run_ranks(printed_losses, 1, methods, Path(folder))
    return printed  # type: ignore[no-any-return]


@contextmanager
def patch_environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


def printed_losses(methods: list[str], folder: Path) -> dict[str, Any]:
    with ImaginedDevice():
        setting = Setting(NAME, methods, folder, nullcontext, losses_with_launches, run_command)
        return agreement.print_losses(setting)


def run_command(method: str, folder: Path, out: str, *words: str) -> Any:
    """Train on ranks with imagined devices, instead of ``launch.processes`` on GPUs."""
    count = next(int(word[-1]) for word in words if word.startswith("launch.processes="))
    kept = [word for word in words if not word.startswith("launch.")]
    try:
        run_ranks(trained, count, method, folder, out, kept)
    except (ProcessRaisedException, ProcessExitedException) as error:
        return CompletedProcess([], 1, "", str(error))
    return CompletedProcess([], 0, "", "")


def trained(method: str, folder: Path, out: str, words: list[str]) -> None:
    with ImaginedDevice():
        tiny.train(method, folder, out, *words, "hooks.progress=null")


@pytest.mark.slow
def test_all_checks_pass(tmp_path: Path) -> None:
    results = in_process(accepted, tmp_path, CHECKS, None)
    assert [result.check for result in results if result.passed is False] == []
    passed = {result.check.split(",")[0] for result in results if result.passed}
    assert passed == {*CHECKS} - {"environment"}
    assert {result.case for result in results if result.check == "ranks"} == {
        *("manual", "ddp", "fsdp", "killed")
    }
    page = (tmp_path / "page.md").read_text()
    assert page == Table(results=results).page()
    assert f"0 of {len(results)} rows failed" in page
    assert (
        "| method | waits | gradients | losses, float32 | losses, bfloat16 | losses, augmented |"
        in page
    )
    assert "| simclr | none |" in page and "| pass | optimizers | adamw |" in page


def waiting_loss(patch: pytest.MonkeyPatch) -> None:
    original = METHODS["simclr"].forward

    def forward(self: Any, output: Any, batch: Any) -> Any:
        assert output.sum().item() < 1e9
        return original(self, output, batch)

    patch.setattr(METHODS["simclr"], "forward", forward)


def wrong_kernel(patch: pytest.MonkeyPatch) -> None:
    """Products on the device are wrong in the fourth digit."""
    original = imagined_device._run

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        out = original(func, args, kwargs)
        on_device = isinstance(out, imagined_device.OnDevice)
        if on_device and func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.convolution):
            out.values.mul_(1.001)
        return out

    patch.setattr(imagined_device, "_run", run)


def failing(patch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **more: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    patch.setattr(torch, "rsqrt", stop)


@pytest.mark.parametrize(
    ("plant", "check", "figure"),
    [
        (waiting_loss, "waits", "output.sum().item()"),
        (wrong_kernel, "gradients", "e-0"),
        (failing, "batch_norm", "RuntimeError: CUDA error: an illegal memory access"),
    ],
)
def test_faults_are_seen(plant: Any, check: str, figure: str, tmp_path: Path) -> None:
    results = in_process(accepted, tmp_path, [check], plant)
    failed = [result for result in results if result.passed is False]
    assert failed and all(figure in result.figure for result in failed)


BATCH_FORMS = (
    "[{name: random_resized_crop, size: 32}, horizontal_flip, {name: normalize, stats: half}]"
)
TINY = Sizes(
    recipes=("supervised/digits",),
    batch_size=8,
    images=64,
    height=32,
    steps=2,
    more=("train.threads=1", f"views.main.transforms={BATCH_FORMS}"),
    assumed=("classes=10", "side=32"),
    compiler="eager",
    modes=("null",),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    ["speed", "loader", "bare_loop", "precision", "compile", "compiled_speed", "commands"],
)
def test_what_cannot_be_imagined_runs_on_the_cpu(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of speed are not compared: they are those of a tiny network on a busy machine."""
    ends = ("float32", "float16")  # of the ladder
    monkeypatch.setattr(
        throughput, "PRECISIONS", {name: throughput.PRECISIONS[name] for name in ends}
    )
    monkeypatch.setattr(commands, "EVALUATIONS", {"knn": "knn_top1"})
    setting = Setting(
        "cpu", ["simclr"], tmp_path, nullcontext, losses_with_launches, run_command, sizes=TINY
    )
    table = Table()
    acceptance.run(setting, [check], table)
    assert table.results and all(result.case != "stopped" for result in table.results)
    if check in ("compile", "commands"):
        assert all(result.passed for result in table.results), table.page()
