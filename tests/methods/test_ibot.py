"""iBOT against the figures of the authors' code over two steps, and what it adds to DINOv2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from figures import bits, draw
from minitask import MiniTask, TinyTokens
from selftask.batch import Batch, total
from selftask.methods.dinov2 import Masks, Predictions
from selftask.methods.ibot import IBOT
from selftask.models.features.tokens import Features, Tokens
from selftask.models.network import PatchOutput

# bytedance/ibot, main_ibot.py:iBOTLoss, for two steps; there are 16 outputs for images and 20 for
# patches, so that each term is that of a method of its own
CLASS = [
    {"loss": 19.940431857546866, "views": 1.1392549368572875, "local": 2.397006335616654},
    {"loss": 16.193380349998346, "views": 1.0673211260176667, "local": 2.2545309132846483},
]
PATCH = [
    {"loss": 19.20057182635572, "gradient": 2.3578126910474198},
    {"loss": 20.2587609698416, "gradient": 2.279590767371885},
]
CENTERS = [
    (0.038976694907675746, 0.011021111109302364),
    (0.058983992625326484, 0.01702508834995905),
]


class _AtUpdate:
    """What ``on_update`` reads of a task, without a network to average."""

    where = 0.0
    base_model = None


class _WithoutTeacher(IBOT):
    """iBOT whose teacher's scores are drawn."""

    def __init__(self, out_dim: int) -> None:
        super().__init__(IBOT.Config(out_dim=out_dim))
        self.momentum_at = lambda where: 0.0
        self.teacher = type("Nobody", (), {"update": lambda *args, **named: None})()  # type: ignore[assignment]

    def averaged(self, network: Any) -> Any:
        return network


def _masks(step: int) -> Masks:
    mask = torch.cat([bits(step + 5 + v, 4, 3, 3, share=0.4).flatten(1) for v in range(2)])
    weights = (1 / mask.sum(dim=1).double()).repeat_interleave(mask.sum(dim=1))
    return Masks(mask, mask.flatten().nonzero().squeeze(1), weights)


def _loss(method: IBOT, images: Tensor, patches: Tensor, masks: Masks, **targets: Tensor) -> Any:
    """The terms for scores of all patches (8, 9, K), of which the masked ones count."""
    pooled = torch.zeros(8, 4).double()
    features = Features(pooled, Tokens(pooled[:, None], None, pooled[:, :0, None]), {})
    output = PatchOutput(Predictions(images, patches.flatten(0, 1)[masks.indices]), features)
    none = torch.empty(0, dtype=torch.int64)
    added = {"masks": masks, **targets}
    return method(output, Batch(views={}, labels=none, index=none, key=none, added=added))


def test_losses_gradients_and_centers_are_those_of_the_authors_code() -> None:
    of_images, of_patches = _WithoutTeacher(16).double(), _WithoutTeacher(20).double()
    for step in range(2):
        seed, masks = 100 * step, _masks(100 * step)
        teacher = draw(seed + 2, 8, 16, scale=0.3), draw(seed + 3, 8, 9, 20, scale=0.3)
        images = of_images.targets(teacher[0], of_images.centers[0], 0.04)
        scores = teacher[1].flatten(0, 1)
        hidden = of_patches.masked_scores(scores, masks)
        patches = of_patches.targets(hidden, of_patches.centers[1], 0.07)

        views = draw(seed, 8, 16).requires_grad_()
        local = draw(seed + 4, 12, 16).requires_grad_()
        seen = torch.cat([views, local]).unflatten(0, (5, 4))
        zeros = torch.zeros(8, 9, 16).double(), torch.zeros(len(masks.indices), 16).double()
        terms = _loss(
            *(of_images, seen, zeros[0], masks),
            image_targets=images.unflatten(0, (2, 4)),
            patch_targets=zeros[1],
        )
        assert set(terms) == {"dino_local", "dino_global", "ibot"}
        total(terms).backward()
        assert views.grad is not None and local.grad is not None
        norms = {"views": views.grad.norm().item(), "local": local.grad.norm().item()}
        assert {"loss": total(terms).item(), **norms} == pytest.approx(CLASS[step], rel=1e-9)

        student = draw(seed + 1, 8, 9, 20).requires_grad_()
        nothing = torch.zeros(2, 4, 20).double()
        terms = _loss(
            of_patches, nothing, student, masks, image_targets=nothing, patch_targets=patches
        )
        total(terms).backward()
        assert student.grad is not None
        figures = {"loss": terms["ibot"].item(), "gradient": student.grad.norm().item()}
        assert figures == pytest.approx(PATCH[step], rel=1e-9)

        for method, rows in ((of_images, teacher[0]), (of_patches, scores)):
            sums = F.pad(rows.sum(dim=0), (0, 1), value=len(rows))
            method.pending.append(torch.stack([sums, sums]))
            method.on_update(_AtUpdate())  # type: ignore[arg-type]
        norms_of_centers = of_images.centers[0].norm().item(), of_patches.centers[1].norm().item()
        assert norms_of_centers == pytest.approx(CENTERS[step], rel=1e-9)


def _task(**config: Any) -> MiniTask:
    sizes = {"out_dim": 5, "hidden_dim": 7, "bottleneck": 4, "momentum": 0.9}
    task = MiniTask("ibot", {**sizes, **config}, backbone=TinyTokens, sizes=(8, 8))
    draws = torch.Generator().manual_seed(7)
    shapes = [(24, 3, size, size) for size in (9, 9, 6)]
    task.views = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    return task


def test_patch_targets_have_a_temperature_and_a_center_of_all_patches() -> None:
    """Also of those that are not masked, by the one head; targets are of the masked ones."""
    task = _task(teacher_temperature=0.04, patch_teacher_temperature=0.2, mask_ratio=[0.5, 0.5])
    center = 0.1 * draw(1, 2, 5)
    task.loss.centers.copy_(center)
    batch = task.forward(torch.arange(8))
    teacher, masks = task.loss.teacher.network, batch["masks"]
    assert teacher.head is teacher.patch_head
    whole = teacher.backbone.extract(torch.cat(batch.all_views[:2]))
    scores = teacher.head(whole.tokens.patches)  # (16, 9, 5)
    assert 0 < masks.mask.sum() < masks.mask.numel()
    expected = F.softmax((scores[masks.mask] - center[1]) / 0.2, dim=1)
    assert torch.allclose(batch["patch_targets"], expected, rtol=0, atol=1e-12)
    images = F.softmax((teacher.head(whole.pooled) - center[0]) / 0.04, dim=1)
    assert torch.allclose(batch["image_targets"].flatten(0, 1), images, rtol=0, atol=1e-12)
    assert not batch["patch_targets"].requires_grad
    means = torch.stack([teacher.head(whole.pooled).mean(dim=0), scores.mean(dim=(0, 1))])
    assert not torch.allclose(means[1], scores[masks.mask].mean(dim=0))
    task.loss.pending.clear()
    task.loss.centers.zero_()
    task.run(1)
    assert torch.allclose(task.loss.centers, 0.1 * means, rtol=0, atol=1e-12)


def test_equal_scores_have_the_loss_at_chance() -> None:
    """If all views are masked."""
    config = IBOT.Config(out_dim=20, mask_probability=1.0, ibot_weight=0.5)
    method, masks = IBOT(config).double(), _masks(0)
    targets = F.softmax(draw(0, 2, 4, 20), dim=2), F.softmax(draw(1, len(masks.indices), 20), dim=1)
    zeros = torch.zeros(5, 4, 20).double(), torch.zeros(8, 9, 20).double()
    terms = _loss(method, *zeros, masks, image_targets=targets[0], patch_targets=targets[1])
    assert total(terms).item() == pytest.approx(method.chance_loss, rel=1e-12)
    assert method.chance_loss == pytest.approx(1.5 * math.log(20))
    assert IBOT(IBOT.Config(koleo_weight=0.1)).chance_loss is None


def test_perfect_agreement_is_the_entropy_of_the_targets() -> None:
    """The loss cannot be less: equal scores of the student, at its own temperature."""
    method, masks = IBOT(IBOT.Config(out_dim=20)).double(), _masks(0)
    rows, patches = draw(0, 1, 4, 20), draw(1, 8, 9, 20)
    probs = F.softmax(rows / 0.1, dim=2).expand(2, 4, 20)
    hidden = F.softmax(patches.flatten(0, 1)[masks.indices] / 0.1, dim=1)
    terms = _loss(
        *(method, rows.expand(5, 4, 20), patches, masks),
        image_targets=probs,
        patch_targets=hidden,
    )
    entropy = torch.special.entr(probs[0]).sum(dim=1).mean()
    entropy += (torch.special.entr(hidden).sum(dim=1) * masks.weights).sum() / 8
    assert total(terms).item() == pytest.approx(entropy.item(), rel=1e-12)


def test_masks_are_blocks_of_at_least_a_ninth() -> None:
    """Half of the views, a tenth to a half of 196 patches, no block of less than 16 before cuts."""
    key = torch.stack([torch.zeros(300, dtype=torch.long), torch.arange(300)], dim=1)
    mask = IBOT(IBOT.Config()).draw_masks(0, key, (14, 14)).mask
    counts = mask.sum(dim=1)
    masked = counts > 0
    assert 0.43 < masked.float().mean() < 0.57
    assert 19 <= counts[masked].max() <= 98
    sampler = IBOT(IBOT.Config()).mask_sampler((14, 14))
    assert (sampler.min_patches, sampler.max_patches) == (16, 196)


def test_students_of_distillation_get_both_temperatures(tmp_path: Path) -> None:
    words = ["method.teacher_temperature=0.05", "method.patch_teacher_temperature=0.06"]
    task = tiny.train("ibot", tmp_path, "run", "train.epochs=1", *words)
    dim = task.base_model.backbone.embed_dim
    scores = task.loss.load_scores(dim, tiny.last_state(tmp_path / "run"))
    assert (scores.temperature, scores.patches.temperature) == (0.05, 0.06)
    assert torch.equal(scores.patches.center, task.loss.centers[1])
