"""What tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

EXTENSION = '''
import errno
from dataclasses import dataclass
import torch
from selftask.hooks.base import Hook
from selftask.registry import register_hook

@register_hook("trouble")
@dataclass(eq=False, kw_only=True)
class Trouble(Hook):
    """Makes trouble of a kind at a step."""
    kind: str = "raise"
    step: int = 2
    priority = 10
    loss = 0.0

    def on_loss_and_meter(self, task):
        if task.steps_done + 1 == self.step and self.kind == "nan":
            task.last_batch.loss = task.last_batch.loss * torch.nan
        if self.kind == "graph":
            batch = task.last_batch
            batch.local_loss, self.loss = batch.local_loss + self.loss, batch.local_loss

    def on_step(self, task):
        if task.steps_done == self.step and self.kind == "raise":
            raise ZeroDivisionError("trouble on purpose")
        if task.steps_done == self.step and self.kind == "full":
            (task.out / "errors").write_text("no folder: nothing can be written into it")
            raise OSError(errno.ENOSPC, "No space left on device")
        if task.steps_done == self.step and self.kind == "unreachable":
            task.out.rename(task.out.with_name("elsewhere"))
            task.out.symlink_to(task.out)  # every call fails, as if the file server were gone
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_names: None) -> Path:
    (tmp_path / "trouble.py").write_text(EXTENSION)
    monkeypatch.chdir(tmp_path)
    return tmp_path
