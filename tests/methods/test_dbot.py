"""dBOT: its loss as a formula, its targets, and one stage as the teacher of the next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from figures import draw
from minitask import loss_of, predicted
from selftask.config.schema import FrozenModule
from selftask.methods.dbot import DBOT
from selftask.models.distillation.patch_targets import patches_on_grid
from selftask.models.features.extract import extract


def test_loss_is_quadratic_near_the_target_and_linear_elsewhere() -> None:
    """(p - t)^2 / (2 beta) below beta, |p - t| - beta / 2 above, as loops."""
    prediction, target = draw(0, 2, 3, 4, scale=3.0), draw(1, 2, 3, 4)
    terms = []
    for error in (prediction - target).abs().flatten().tolist():
        terms.append(error**2 / 4 if error < 2 else error - 1)
    method = DBOT(DBOT.Config(teacher=FrozenModule(model="-")))
    loss = loss_of(method, predicted(prediction[:, None]), targets=target)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)
    assert loss_of(method, predicted(target[:, None]), targets=target) == 0


def test_targets_are_normalized_features_of_the_whole_image(tmp_path: Path) -> None:
    task = tiny.task("dbot", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, teacher = task.last_batch, task.loss.teacher.network.backbone
    images, predict = batch.all_views[0], batch["mask"].predict[:, 0]
    with torch.no_grad():
        features = extract(teacher, images)
    patches = patches_on_grid(features, task.loss.grid_of(*images.shape[2:]))
    for image, numbers in enumerate(predict):
        masked = patches[image, numbers]
        variance, mean = torch.var_mean(masked, dim=1, keepdim=True, correction=0)
        expected = (masked - mean) / (variance + 1e-5).sqrt()
        torch.testing.assert_close(batch["targets"][image], expected)
    task.close()


def test_a_run_is_the_teacher_of_the_next_stage(tmp_path: Path) -> None:
    first = tiny.train("dbot", tmp_path, "first")
    trained = first.base_model.backbone.state_dict()
    second = tiny.task("dbot", tmp_path, "second", f"method.teacher={tmp_path / 'first'}")
    second.prepare()
    teacher = second.loss.teacher.network.backbone.state_dict()
    assert tiny.differences(teacher, trained) == []
    second.close()
