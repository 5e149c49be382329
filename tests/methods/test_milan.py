"""MILAN against the figures of mmselfsup, and what its masks, decoder and targets are."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models import VisionTransformer

import tiny
from figures import draw
from minitask import loss_of, predicted
from selftask.api.learner import Learner
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.milan import MILAN, PromptingDecoder, sampled_order
from selftask.models.backbones.vit import ViTMicro
from selftask.models.distillation.attention_teacher import AttentionTeacher
from selftask.models.features.extract import extract
from selftask.models.predictors.patch_predictor import sincos_positions

# open-mmlab/mmselfsup for seeds 0 and 500: loss, gradient of the predictions
FIGURES = [
    (1.9908272425998814, 0.08631475722537157),
    (1.9869433194246335, 0.09540753716862153),
]


def _milan() -> MILAN:
    return MILAN(MILAN.Config(teacher=FrozenModule(model="-")))


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_published_code(case: int) -> None:
    seed = 500 * case
    prediction, target = draw(seed + 4, 8, 9, 8).requires_grad_(), draw(seed + 5, 8, 9, 8)
    loss = loss_of(_milan(), predicted(prediction), targets=target)
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert (loss.item(), gradient.norm().item()) == pytest.approx(FIGURES[case], rel=1e-9)


def test_loss_is_the_squared_distance_of_unit_vectors() -> None:
    """And none of the same features times any positive number."""
    prediction, target = draw(1, 2, 3, 4), draw(2, 2, 3, 4)
    rows = zip(prediction.flatten(0, 1), target.flatten(0, 1), strict=True)
    distances = [(a / a.norm() - b / b.norm()).square().sum().item() for a, b in rows]
    loss = loss_of(_milan(), predicted(prediction), targets=target)
    assert loss.item() == pytest.approx(sum(distances) / 6, rel=1e-12)
    perfect = loss_of(_milan(), predicted(3 * target), targets=target)
    assert perfect.item() == pytest.approx(0, abs=1e-12)


def test_patches_are_drawn_without_replacement_in_proportion_to_attention() -> None:
    """Each order as often as its probability, within five deviations; weight 0 is always last."""
    weights, number = torch.tensor([0.5, 0.3, 0.2, 0.0]), 40_000
    draws = torch.rand(number, 4, generator=torch.Generator().manual_seed(0))
    orders = sampled_order(draws, weights.expand(number, 4))
    assert (orders[:, 3] == 3).all()
    for order in permutations(range(3)):
        remaining, probability = 1.0, 1.0
        for patch in order:
            probability *= weights[patch].item() / remaining
            remaining -= weights[patch].item()
        share = (orders[:, :3] == torch.tensor(order)).all(dim=1).double().mean().item()
        deviation = (probability * (1 - probability) / number) ** 0.5
        assert share == pytest.approx(probability, abs=5 * deviation)


def test_decoder_is_the_published_one() -> None:
    """Masked patches attend to prompts without norm and to each other; prompts stay as they are."""
    decoder: Any = PromptingDecoder(6, (3, 3), dim=8, depth=2, num_heads=2, num_out=5).double()
    encoded, positions = draw(0, 1, 5, 6), sincos_positions(8, (3, 3)).double()
    keep, predict = torch.tensor([[4, 0, 7, 2]]), torch.tensor([[1, 8, 3, 5, 6]])
    embedded = decoder.embed(encoded)[0]
    prompts = torch.cat([embedded[:1], embedded[1:] + positions[keep[0]]])
    x = decoder.mask_token + positions[predict[0]]
    for block in decoder.blocks:
        normed = block.norm_queries(x)
        query = block.query(normed)
        key, value = block.key_value(torch.cat([prompts, normed])).chunk(2, dim=1)
        heads = []
        for part in (slice(0, 4), slice(4, 8)):
            weights = (query[:, part] @ key[:, part].T / 2).softmax(dim=1)
            heads.append(weights @ value[:, part])
        x = x + block.project(torch.cat(heads, dim=1))
        x = x + block.mlp(block.norm_mlp(x))
    expected = decoder.project(decoder.norm(torch.cat([prompts, x])))
    torch.testing.assert_close(decoder(encoded, keep, predict, (3, 3))[0], expected)


def test_attention_is_the_softmax_of_the_last_block() -> None:
    """Of the class token to patches, averaged over heads; interpolated to the student's grid."""
    import timm

    vit: Any = timm.create_model("test_vit", num_classes=0, img_size=64).double().eval()
    teacher, images = AttentionTeacher(vit, "method.teacher"), draw(0, 2, 3, 64, 64)
    class_token, patches, attention = teacher.on_grid(images, (4, 4))
    features, block = extract(vit, images, layers=[-2]), vit.blocks[-1]
    x = block.norm1(features.hidden[len(vit.blocks) - 2].sequence)
    query, key, _ = block.attn.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    scores = query[:, :, :1] @ key.mT / query.shape[-1] ** 0.5  # (B, H, 1, 1 + N)
    expected = scores.softmax(dim=3)[:, :, 0, 1:].mean(dim=1)
    torch.testing.assert_close(attention, expected.detach())
    torch.testing.assert_close(class_token, features.prefix[:, 0].detach())
    torch.testing.assert_close(patches, features.patches.detach())
    as_map = expected.detach().view(2, 1, 4, 4)
    smaller = F.interpolate(as_map, size=(2, 2), mode="bilinear", antialias=True).flatten(1)
    torch.testing.assert_close(teacher.on_grid(images, (2, 2))[2], smaller)


def test_targets_are_features_of_the_whole_image_in_the_order_of_predictions(
    tmp_path: Path,
) -> None:
    task = tiny.task("milan", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, mask = task.last_batch, task.last_batch["mask"]
    class_token, patches, attention = task.loss.teacher.on_grid(batch.all_views[0], (8, 8))
    order = torch.cat([mask.keep, mask.predict[:, 0]], dim=1)
    assert mask.keep.shape[1] == 16 and len(attention[0].unique()) > 1
    assert torch.equal(order.sort(dim=1).values[0], torch.arange(64))
    assert batch.output.prediction.shape == batch["targets"].shape
    torch.testing.assert_close(batch["targets"][:, 0], class_token)
    for image, numbers in enumerate(order):
        torch.testing.assert_close(batch["targets"][image, 1:], patches[image, numbers])
    task.close()


def test_patches_to_which_the_teacher_attends_are_kept(tmp_path: Path) -> None:
    """Attention to a quarter of the patches alone leaves no choice."""
    task = tiny.task("milan", tmp_path)
    task.prepare()
    on_grid = task.loss.teacher.on_grid

    def to_first_rows(images: Tensor, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        class_token, patches, attention = on_grid(images, grid)
        return class_token, patches, attention * (torch.arange(64) < 16)

    task.loss.teacher.on_grid = to_first_rows
    task.on_start(), task.on_phase_start(), task.step()
    keep = task.last_batch["mask"].keep
    assert torch.equal(keep.sort(dim=1).values, torch.arange(16).expand(len(keep), 16))
    task.close()


def test_a_learner_trains_the_student_alone() -> None:
    teacher = FrozenModule(model="timm:test_vit", weights="none")
    options: dict[str, Any] = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}
    vit = ViTMicro(depth=1).build()
    learner: Any = Learner("milan", vit, steps=1, batch_size=2, teacher=teacher, **options)
    learner(draw(0, 2, 3, 32, 32).float()).backward()
    assert all(p.grad is not None for p in learner.network.parameters() if p.requires_grad)
    assert all(p.grad is None for p in learner.method.teacher.parameters())


@pytest.mark.parametrize("args", ["", "{global_pool: avg, class_token: false, num_classes: 0}"])
def test_a_teacher_without_class_token_is_refused(args: str, tmp_path: Path) -> None:
    model = "timm.models:VisionTransformer" if args else "timm.models:SwinTransformer"
    options = args or "{img_size: 32, patch_size: 2, window_size: 2, num_classes: 0}"
    teacher = f"method.teacher={{model: '{model}', weights: null, args: {options}}}"
    task = tiny.task("milan", tmp_path, "run", teacher)
    with pytest.raises(UserError, match=r"method\.teacher: a \w+Transformer has no class token"):
        task.prepare()


def test_a_teacher_that_hides_its_attention_is_refused() -> None:
    """torchvision's, which has a class token."""
    vit = VisionTransformer(32, 16, 1, 2, 8, 16)
    with pytest.raises(UserError, match="has no class token whose attention can be read"):
        AttentionTeacher(vit, "method.teacher")
