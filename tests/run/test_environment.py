"""What a process sets up for itself: memory that it keeps."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import selftask
import tiny
from selftask.api.trainer import Trainer
from selftask.distributed import device
from selftask.distributed.device import keep_freed_memory

TRIM, MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
STEPS = """
import resource
import torch
from selftask.distributed.device import keep_freed_memory

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.ones(5 << 20) for _ in range(6)]  # 20 MiB each
    del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(faults_of_a_step() for _ in range(3)))
keep_freed_memory(torch.device("cpu"))
print(min(faults_of_a_step() for _ in range(10)))  # the first few find their places
"""


def test_freed_memory_is_kept() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("not glibc")
    unset = {key: value for key, value in os.environ.items() if "MALLOC_" not in key}
    unset.pop("GLIBC_TUNABLES", None)
    source = str(Path(selftask.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={**unset, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    assert before >= 3 * 20  # even if pages have 2 MiB
    assert after < 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What mallopt is asked for."""
    asked: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda name, value: asked.append((name, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(device.platform, "libc_ver", lambda: ("glibc", "2.31"))
    for name in ("GLIBC_TUNABLES", *(name for name in os.environ if "MALLOC_" in name)):
        monkeypatch.delenv(name, raising=False)
    return asked


def test_other_settings_of_the_user_do_not_matter(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # another matter
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    keep_freed_memory(torch.device("cpu"))
    assert calls == [(TRIM, 1 << 30), (MMAP, 32 << 20)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_MAX_", "0"),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.mmap_threshold=65536"),
    ],
)
def test_what_the_user_set_stays(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    keep_freed_memory(torch.device("cpu"))
    assert calls == []


def test_nothing_is_kept_where_it_is_of_no_use(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_freed_memory(torch.device("cuda"))
    monkeypatch.setattr(device.platform, "libc_ver", lambda: ("musl", "1.2"))
    keep_freed_memory(torch.device("cpu"))
    assert calls == []


CPUS = {
    "flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile": "amx_bf16",
    "flags\t\t: fpu avx512f avx512_bf16": "avx512_bf16",
    "flags\t\t: fpu avx2 avx512f": None,
    "Features\t: fp asimd bf16 i8mm": "bf16",
    "": None,
}


@pytest.mark.parametrize("line", CPUS)
def test_instructions_for_bfloat16(line: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: bf16 in name only\n{line}\nbugs\t\t:\n")
    assert device.bfloat16_instructions(info) == CPUS[line]
    assert device.bfloat16_instructions(tmp_path / "none") is None


@pytest.mark.parametrize("instructions", ["amx_bf16", None])
def test_a_run_in_float32_says_that_bfloat16_would_be_faster(
    instructions: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selftask.distributed.device.bfloat16_instructions", lambda: instructions)
    lines = {}
    for precision in ("float32", "bfloat16"):
        words = (f"train.precision={precision}", "train.max_steps=1")
        Trainer().train(tiny.task("simclr", tmp_path, precision, *words))
        lines[precision] = (tmp_path / precision / "log.txt").read_text()
    advice = "this CPU has amx_bf16, by which train.precision=bfloat16 took 0.5 to 0.9 times"
    assert (advice in lines["float32"]) == (instructions is not None)
    assert "precision:" not in lines["bfloat16"]
