"""SALT: its loss as loops, and a run of MAE as its teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from figures import draw
from minitask import loss_of, predicted
from selftask.config.schema import FrozenModule
from selftask.methods.families.masked_patches import Kept
from selftask.methods.salt import SALT
from selftask.models.features.extract import extract


def test_loss_is_the_mean_distance_of_patches_blocks_and_images() -> None:
    """|p - t| as loops over the patches of each block that are no padding."""
    prediction, features = draw(0, 2, 3, 4, 5).requires_grad_(), draw(1, 2, 3, 4, 5)
    sizes = torch.tensor([[4, 2, 3], [1, 4, 2]])  # patches of each block
    padding = torch.arange(4) >= sizes[..., None]
    blocks = []
    for image in range(2):
        for block in range(3):
            size = int(sizes[image, block])
            pairs = zip(
                prediction[image, block, :size].flatten().tolist(),
                features[image, block, :size].flatten().tolist(),
                strict=True,
            )
            blocks.append(sum(abs(p - t) for p, t in pairs) / (5 * size))
    method = SALT(SALT.Config(teacher=FrozenModule(model="-")))
    added = {"features": features, "mask": Kept(*[None] * 3, padding)}
    loss = loss_of(method, predicted(prediction), **added)
    assert loss.item() == pytest.approx(sum(blocks) / 6, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert torch.equal(gradient.abs().sum(dim=3) == 0, padding)
    assert loss_of(method, predicted(features), **added) == 0


def test_targets_are_normalized_features_of_the_first_stage(tmp_path: Path) -> None:
    """Of whole images, at the patches of the blocks; training does not change the teacher."""
    first = tiny.train("mae", tmp_path, "first")
    backbone = first.base_model.backbone
    task = tiny.task("salt", tmp_path, "second", f"method.teacher={tmp_path / 'first'}")
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step(), task.step()
    batch = task.last_batch
    with torch.no_grad():
        patches = extract(backbone.eval(), batch.all_views[0]).patches  # (B, N, D)
    for image, blocks in enumerate(batch["mask"].predict):
        for block, numbers in enumerate(blocks):
            features = patches[image, numbers]
            variance, mean = torch.var_mean(features, dim=1, keepdim=True, correction=0)
            expected = (features - mean) / (variance + 1e-5).sqrt()
            torch.testing.assert_close(batch["features"][image, block], expected)
    teacher = task.loss.teacher.network.backbone.state_dict()
    assert tiny.differences(teacher, backbone.state_dict()) == []
    task.close()
