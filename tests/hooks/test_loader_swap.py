"""A hook replaces the loader between epochs, and a resumed run ends with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from selftask.config.schema import Component
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import Sources
from selftask.hooks.base import function_hook
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

SMALL = 16  # pixels, until epoch 1


def smaller_at_first(task: Task) -> None:
    """A function of the epoch alone: a resumed run is where the other one was."""
    views = task.config.views
    if task.clock.epoch < 1:
        first = [Component(name="resize", args={"size": SMALL}), *views["main"].transforms]
        views = {"main": replace(views["main"], transforms=first)}
    data = task.data_module
    data.close()
    sources = Sources(data.train_source, data.val_source)
    config = replace(task.config, views=views)
    task.data_module = DataModule(config, sources, task.world, task.device)


def train(folder: Path, out: str, *more: str) -> dict[int, set[int]]:
    """Train for two epochs; return the sizes of views by epoch."""
    words = ["train.epochs=2", "data.num_workers=2", *more]
    task = tiny.task("simclr", folder, out, *words)
    sizes: dict[int, set[int]] = {}

    def note(task: Any) -> None:
        batch = task.last_batch
        sizes.setdefault(batch.epoch, set()).update(view.shape[-1] for view in batch.input)

    task.add_hook(function_hook(on_phase_start=smaller_at_first, on_forward=note), "swap")
    try:
        train_loop(task)
    except Interrupted:
        assert "train.stop_at" in " ".join(more)
    return sizes


@pytest.mark.slow
def test_views_of_the_second_epoch_come_from_the_new_loader(tmp_path: Path) -> None:
    assert train(tmp_path, "whole") == {0: {SMALL}, 1: {32}}
    for stop in (3, 7):  # within each epoch
        out = f"stopped_{stop}"
        train(tmp_path, out, f"train.stop_at={stop}")
        train(tmp_path, out)
        whole, resumed = (tiny.last_state(tmp_path / name) for name in ("whole", out))
        assert tiny.differences(whole, resumed) == []
