"""Meters of classes that a method makes itself: the rotation of each image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from selftask.api.trainer import Trainer
from selftask.batch import Batch
from selftask.config.compose import recipes
from selftask.config.load import load_config
from selftask.hooks.base import function_hook
from selftask.methods.base import Method
from selftask.registry import METHODS, register_method
from selftask.task import Task


def register() -> None:
    if "rotation_test" in METHODS:
        return

    @register_method("rotation_test")
    class Rotation(Method):
        """Predict by which multiple of 90 degrees an image is rotated."""

        loss_reduction = "samples"
        views = 1

        def build_head(self, embed_dim: int) -> nn.Module:
            return nn.Linear(embed_dim, 4)

        def prepare_batch(self, batch: Batch, task: Task) -> None:
            (images,) = batch.all_views
            batch.input = [torch.rot90(images, turns, (2, 3)) for turns in range(4)]

        def meter_input(
            self, output: Tensor, batch: Batch, head: str | None = None
        ) -> tuple[Tensor, Tensor]:
            turns = torch.arange(4, device=output.device).repeat_interleave(output.shape[1])
            return output.flatten(0, 1), turns  # (4 * B, 4), (4 * B,)

        def forward(self, output: Tensor, batch: Batch) -> Tensor:
            return F.cross_entropy(*self.meter_input(output, batch))


def test_meters_of_training_and_test_count_rotated_images(tmp_path: Path) -> None:
    """Beside a count by hand; the images have no labels."""
    register()
    counts = {True: [0, 0], False: [0, 0]}

    def count(task: Any) -> None:
        predicted = task.last_batch.output.argmax(dim=2)  # (4, B)
        right = (predicted == torch.arange(4)[:, None]).sum()
        if not task.train and task.steps_done < 8:
            return  # an earlier test phase
        counts[task.train][0] += int(right)
        counts[task.train][1] += predicted.numel()

    options = [
        w for w in tiny.overrides("simclr", tmp_path) if not w.startswith(("method", "data.val"))
    ]
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 430)}"
    words = ["method=rotation_test", "views.main={count: 1, transforms: [normalize]}", val]
    words += ["hooks.train_meters={}", "meters.accuracy={topk: [1]}", "train.max_steps=8"]
    words += ["train.log_every=8"]
    base = str(recipes.folder() / "base/digits.yaml")
    task = Task(load_config(base, [*options, *words]))
    task.add_hook(function_hook(on_loss_and_meter=count))
    Trainer().train(task)
    rows = tiny.rows(tmp_path / "run")
    shares = {phase: right / number for phase, (right, number) in counts.items()}
    assert counts[False][1] == 4 * 30
    (trained,) = (row["train_accuracy_top_1"] for row in rows if "train_accuracy_top_1" in row)
    assert trained == pytest.approx(shares[True])
    tested = [row["test_accuracy_top_1"] for row in rows if "test_accuracy_top_1" in row]
    assert tested[-1] == pytest.approx(shares[False])
