"""data2vec against its paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn

from minitask import MiniTask, loss_of, predicted
from selftask.config.config_class import config_class
from selftask.errors import UserError
from selftask.methods.data2vec import Data2Vec, mean_of_layers
from selftask.models.backbones.libraries import Timm
from selftask.registry import METHODS

SMALL: dict[str, Any] = {"min_block": 2, "top_blocks": 2}


def _vit(**args: Any) -> nn.Module:
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 3, "num_heads": 2}
    return VisionTransformer(num_classes=0, **{**sizes, **args})


def _task(backbone: Any = _vit, **config: Any) -> MiniTask:
    return MiniTask("data2vec", {**SMALL, **config}, backbone=backbone, sizes=(8,), lr=0.1)


def test_targets_are_the_normalized_top_blocks_of_the_teacher() -> None:
    """Section 3.3, with the outputs of the blocks for the whole image, seen by hooks."""
    task = _task().run(2)
    batch = task.forward(torch.arange(4))
    seen: list[Tensor] = []
    vit: Any = task.loss.teacher.network.backbone
    handles = [
        block.register_forward_hook(lambda module, inputs, output: seen.append(output))
        for block in vit.blocks
    ]
    vit(batch.all_views[0])
    for handle in handles:
        handle.remove()
    assert len(seen) == 3
    for image in range(4):
        for patch in range(16):
            expected = torch.zeros(12, dtype=torch.float64)
            for output in seen[-2:]:
                x = output[image, 1 + patch]  # behind the class token
                expected += (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() / 2
            assert torch.allclose(batch["targets"][image, patch], expected, rtol=0, atol=1e-12)
    assert not batch["targets"].requires_grad


@pytest.mark.parametrize("beta", [2.0, 0.25])
def test_loss_is_that_of_the_paper(beta: float) -> None:
    """Eq. 4: (y - f)^2 / 2 beta within beta, |y - f| - beta / 2 outside; at masked patches."""
    task = _task(beta=beta)
    batch = task.forward(torch.arange(4))
    output, total = batch.output.prediction.detach() * 3, 0.0
    for image in range(4):
        patches = batch["mask"][image].nonzero().flatten().tolist()
        assert 0 < len(patches) <= 9  # of 16, 60 %
        of_image = 0.0
        for patch in patches:
            for y, f in zip(batch["targets"][image, patch], output[image, patch], strict=True):
                far = abs(float(y - f))
                of_image += far * far / (2 * beta) if far <= beta else far - beta / 2
        total += of_image / len(patches) / 12
    assert task.loss(predicted(output), batch).item() == pytest.approx(total / 4, rel=1e-12)


def test_the_loss_is_torchs_where_masks_are_of_one_size() -> None:
    method = Data2Vec(Data2Vec.Config())
    output, targets = torch.randn(2, 3, 16, 6).unbind()
    mask = torch.arange(16).expand(3, 16) % 2 == 0
    expected = F.smooth_l1_loss(output[mask], targets[mask], beta=2.0)
    actual = loss_of(method, predicted(output), mask=mask, targets=targets)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_student_does_not_see_masked_patches_and_the_teacher_does() -> None:
    task = _task()
    images = task.views[0][:4].clone().requires_grad_()
    batch = task.forward(torch.arange(4), images)
    batch.output.prediction.sum().backward()
    seen = images.grad.abs().unfold(2, 2, 2).unfold(3, 2, 2).sum(dim=(1, 4, 5)).flatten(1) > 0
    assert torch.equal(seen, ~batch["mask"])
    other = images.detach() + batch["mask"].view(4, 1, 4, 1, 4, 1).expand(
        4, 3, 4, 2, 4, 2
    ).double().reshape(4, 3, 8, 8)
    changed = task.forward(torch.arange(4), other)
    assert torch.allclose(changed.output.prediction, batch.output.prediction, rtol=0, atol=1e-12)
    assert not torch.allclose(changed["targets"], batch["targets"], rtol=0, atol=1e-3)


def test_teacher_momentum_rises_linearly_and_stays() -> None:
    """Section 3.1: from tau_0 to tau_e over the first updates, then constant; nine in all."""
    task = _task(
        momentum={"name": "constant", "start": 0.9, "warmup": "33.4%", "warmup_start": 0.5}
    )
    expected = [0.5, 0.5 + 0.4 / 3, 0.5 + 0.8 / 3, 0.9, 0.9]
    for momentum in expected:
        before = [p.clone() for p in task.loss.teacher.parameters()]
        task.run(1)
        student = task.base_model.backbone.parameters()
        for old, new, own in zip(before, task.loss.teacher.parameters(), student, strict=True):
            wanted = momentum * old + (1 - momentum) * own
            assert torch.allclose(new, wanted, rtol=0, atol=1e-12)
            assert not new.requires_grad


def test_layers_are_normalised_one_by_one() -> None:
    layers = [torch.randn(2, 3, 8, dtype=torch.float64) * scale for scale in (1, 100)]
    mean = mean_of_layers(layers)
    expected = sum(F.layer_norm(layer, (8,)) for layer in layers) / 2
    assert torch.allclose(mean, expected)


def test_the_mean_of_layers_is_normalised_once_more_on_request() -> None:
    """The published run of ViT-B (`--post_target_layer_norm`), from the targets without it."""
    tasks = [_task(norm_target=norm) for norm in (False, True)]
    plain, normed = (task.forward(torch.arange(4))["targets"] for task in tasks)
    expected = (plain - plain.mean(dim=2, keepdim=True)) / (
        plain.var(dim=2, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    assert torch.allclose(normed, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(normed, plain, rtol=0, atol=1e-6)


def test_the_teacher_has_no_dropout() -> None:
    """As in the published code, whose teacher is in evaluation mode."""
    task = _task(lambda: _vit(attn_drop_rate=0.5))
    assert task.base_model.backbone.blocks[2].attn.attn_drop.p == 0.5
    assert task.loss.teacher.network.backbone.blocks[2].attn.attn_drop.p == 0.0
    first, second = (task.forward(torch.arange(4))["targets"] for _ in range(2))
    assert torch.equal(first, second)


def test_the_teacher_drops_no_paths() -> None:
    task = _task(lambda: _vit(drop_path_rate=0.5))
    assert task.base_model.backbone.blocks[2].drop_path1.drop_prob == 0.5
    assert task.loss.teacher.network.backbone.blocks[2].drop_path1.drop_prob == 0.0


def test_data2vec_training_lowers_the_loss() -> None:
    losses = _task(momentum=0.99).run(8).losses
    assert losses[-1] < 0.98 * losses[0]
    assert all(math.isfinite(loss) for loss in losses)


def test_impossible_configs_are_told() -> None:
    schema: Any = config_class(METHODS, "data2vec")
    messages = [*schema(top_blocks=4).problems({"backbone": {"name": "vit_tiny", "depth": 3}})]
    assert messages == ["top_blocks: 4; the backbone has 3 blocks"]
    with pytest.raises(UserError, match=r"min_block=10 is more than the 9 patches .* of 4x4"):
        _task(min_block=10)
    swin = Timm(model="swin_tiny_patch4_window7_224", args={"img_size": 32, "window_size": 2})
    with pytest.raises(UserError, match="a SwinTransformer merges the patches"):
        _task(swin.build)
