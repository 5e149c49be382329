"""Processes that the kernel kills for want of memory: it counts them, and the run says so."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from selftask.distributed import out_of_memory

GROUPS = Path("/sys/fs/cgroup")
LIMIT = 1600 << 20  # two small ranks have room in it
V2 = ("memory.max", "memory.swap.max", 0)
V1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", LIMIT)  # the second: with swap
GREEDY = """
import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

from selftask.distributed.collectives import rank
from selftask.hooks.base import Hook
from selftask.registry import register_hook


def take_all():
    kept = []
    while True:
        kept.append(bytearray(b"x") * (16 << 20))


@register_hook("greedy")
@dataclass(eq=False, kw_only=True)
class Greedy(Hook):
    def on_forward(self, task):
        if task.steps_done == 2 and rank() == 0:
            take_all()


class Images:
    main = os.getpid()

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == 50 and os.getpid() != self.main:
            take_all()
        return Image.fromarray(np.full((32, 32, 3), index, np.uint8)), 0
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with little memory; whoever writes its pid into ``cgroup.procs`` is in it."""
    is_v1 = (GROUPS / "memory").is_dir()
    made = (GROUPS / "memory" if is_v1 else GROUPS) / f"selftask-test-{os.getpid()}"
    limit, swap, most_swap = V1 if is_v1 else V2
    cannot = "NOT TESTED, no control group can be made here (root of a machine can)"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"{cannot}: {error}")
    try:
        try:
            (made / limit).write_text(str(LIMIT))
            if (made / swap).exists():  # a kernel may not count it
                (made / swap).write_text(str(most_swap))
        except OSError as error:
            pytest.skip(f"{cannot}: {error}")
        yield made
    finally:
        _remove(made)


def _remove(group: Path) -> None:
    """Once the last of its processes is gone, which may take a moment after its parent's end."""
    deadline = time.monotonic() + 60
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "more", "code"),
    [
        ("rank 0 (pid ", ["hooks.greedy={}", "launch.processes=2"], 137),
        ("data: worker process", ["data=greedy:Images", "data.num_workers=1"], 1),
    ],
)
def test_a_real_kill_is_told(
    group: Path, tmp_path: Path, victim: str, more: list[str], code: int
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    command = tiny.command("simclr", tmp_path, "run", "import=[greedy]", *more)
    if "data=greedy:Images" in more:
        command.remove(f"data={tmp_path / 'digits.npz'}")
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    done = tiny.run(["sh", "-c", enter, str(group), *command], tmp_path)
    out = tmp_path / "run"
    last = (done.stdout + done.stderr).rstrip().splitlines()[-1]
    status = tiny.status(out)
    messages = [
        last,
        status["error"],
        (out / "log.txt").read_text().splitlines()[-1],
        (out / "errors/rank0.txt").read_text(),
    ]
    for text in messages:
        assert victim in text, done.stdout + done.stderr
        assert "out of memory, the kernel has killed it" in text
    assert last.startswith("RUN FAILED")
    assert (status["state"], status["rank"]) == ("failed", 0)
    assert done.returncode == code


def write_counts(folder: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"oom_kill_disable 0\noom 9\noom_kill {count}\n")


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/user/job", "user/job/memory.events"),
        ("0::/seen/from/outside", "memory.events"),  # a container: its own group is at the top
        ("9:cpu:/\n4:memory:/user/job\n0::/", "memory/user/job/memory.oom_control"),
        ("4:pids,memory:/seen/from/outside", "memory/memory.oom_control"),
    ],
)
def test_kills_are_looked_up_where_this_process_belongs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, file: str
) -> None:
    (tmp_path / "mine").write_text(groups + "\n")
    monkeypatch.setattr(out_of_memory, "_MINE", tmp_path / "mine")
    monkeypatch.setattr(out_of_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(out_of_memory, "_MACHINE", tmp_path / "vmstat")
    assert out_of_memory.OutOfMemoryKills().explain() == ""  # nobody counts here
    write_counts(tmp_path, {file: 3, "vmstat": 5})
    kills = out_of_memory.OutOfMemoryKills()
    assert kills.explain() == ""
    write_counts(tmp_path, {"vmstat": 6})
    assert "perhaps" in kills.explain()
    write_counts(tmp_path, {file: 4})
    assert kills.explain() == "out of memory, the kernel has killed it"
