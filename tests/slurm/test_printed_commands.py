"""Commands in messages work in a shell, also for a folder with spaces."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from selftask.cli.cluster.submit import _print_submitted
from selftask.errors import UserError
from selftask.slurm import queue


def words_in(message: str) -> list[str]:
    """Return the words of the command between backquotes, as a shell splits them."""
    (command,) = re.findall("`(.*?)`", message)
    return shlex.split(command)


def test_the_last_line_of_submit(capsys: pytest.CaptureFixture[str]) -> None:
    _print_submitted("submitted as job 7", Path("my runs/a"))
    assert words_in(capsys.readouterr().out) == ["selftask", "jobs", "my runs/a"]


def test_a_run_that_is_still_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "my run"
    queue.note(out, {out: "7"})
    monkeypatch.setattr(queue, "queue", lambda jobs: dict.fromkeys(jobs, "RUNNING"))
    with pytest.raises(UserError) as error:
        queue.check_idle(out)
    assert words_in(str(error.value)) == ["selftask", "cancel", str(out)]
