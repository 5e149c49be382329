"""Processes that the kernel kills for want of memory: it counts them, and the run says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from selftask import memory

GROUPS = Path("/sys/fs/cgroup")
LIMIT = 1600 << 20  # two small ranks have room in it
V2 = {"memory.max": LIMIT, "memory.swap.max": 0}
V1 = {"memory.limit_in_bytes": LIMIT, "memory.memsw.limit_in_bytes": LIMIT}  # the latter: and swap
GREEDY = """
import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

from selftask.collectives import rank
from selftask.hooks.base import Hook
from selftask.registry import register_hook


def take_all():
    kept = []
    while True:
        kept.append(bytearray(b"x") * (16 << 20))


@register_hook("greedy")
@dataclass(eq=False, kw_only=True)
class Greedy(Hook):
    rank: int

    def on_forward(self, task):
        if task.iteration == 2 and rank() == self.rank:
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
    top, limits = (GROUPS / "memory", V1) if (GROUPS / "memory").is_dir() else (GROUPS, V2)
    made = top / "selftask-test"
    try:
        made.mkdir(exist_ok=True)
        for name, value in limits.items():
            if (made / name).exists() or "sw" not in name:  # the kernel may not count swap
                (made / name).write_text(str(value))
    except OSError as error:
        pytest.skip(f"NOT TESTED, no control group can be made here (root can): {error}")
    yield made
    made.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "rank", "victim"),
    [
        (("hooks.greedy={rank: 0}", "launch.processes=2"), 0, "rank 0 is gone"),
        (("hooks.greedy={rank: 1}", "launch.processes=2"), 1, "rank 1 (pid"),
        (("data=greedy:Images", "data.num_workers=1"), 0, "data: worker process"),
    ],
)
def test_a_real_kill_is_told(
    group: Path, tmp_path: Path, more: tuple[str, ...], rank: int, victim: str
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    command = tiny.command("simclr", tmp_path, "run", "import=[greedy]", *more)
    if "data=greedy:Images" in more:
        command.remove(f"data={tmp_path / 'digits.npz'}")
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    done = tiny.run(["sh", "-c", enter, str(group), *command], tmp_path)
    out = tmp_path / "run"
    last = (done.stdout + done.stderr).rstrip().splitlines()[-1]
    told = [
        last,
        tiny.status(out)["error"],
        (out / "log.txt").read_text().splitlines()[-1],
        (out / f"errors/rank{rank}.txt").read_text(),
    ]
    for text in told:
        assert victim in text, done.stdout + done.stderr
        assert "out of memory, the kernel has killed it" in text
    assert last.startswith("RUN FAILED")
    assert (tiny.status(out)["state"], tiny.status(out)["rank"]) == ("failed", rank)
    assert done.returncode == (2 if "worker" in victim else 137)


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
    monkeypatch.setattr(memory, "_MINE", tmp_path / "mine")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "vmstat")
    assert memory.OutOfMemoryKills().explain() == ""  # nobody counts here
    write_counts(tmp_path, {file: 3, "vmstat": 5})
    kills = memory.OutOfMemoryKills()
    assert kills.explain() == ""
    write_counts(tmp_path, {"vmstat": 6})
    assert "perhaps" in kills.explain()
    write_counts(tmp_path, {file: 4})
    assert kills.explain() == "out of memory, the kernel has killed it"
