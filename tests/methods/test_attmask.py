"""AttMask, an option of iBOT: its masks against the authors' code and by their definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tiny
from figures import draw
from minitask import MiniTask, largest_difference
from ranks import run_ranks
from selftask.errors import UserError
from selftask.models.backbones.vit import ViTMicro
from selftask.models.features.class_attention import ClassAttention
from selftask.models.masks import AttentionMask, in_image

# gkakogeorgiou/attmask for seeds 0 and 500: sum of the indices of the four patches of the highest
# and of the lowest attention of six images
FIGURES = [(171, 187), (192, 173)]


@pytest.mark.parametrize("case", [0, 1])
def test_masks_are_those_of_the_authors_code(case: int) -> None:
    attention = draw(500 * case + 12, 6, 16)
    counts = torch.full((6,), int(16 * 0.3))
    mask = AttentionMask((4, 4), hints=False).from_draws(torch.zeros(6, 0), counts)
    sums = [in_image(mask, values).nonzero()[:, 1].sum() for values in (attention, -attention)]
    assert sums == list(FIGURES[case])


def test_hints_are_a_tenth_of_the_mask_among_the_highest_tenth() -> None:
    """Each patch of the tenth is one equally often, within five deviations."""
    sampler, number = AttentionMask((8, 8), hints=True), 6000
    assert sampler.num_draws == 6
    counts = torch.tensor([0, 9, 20, 32]).repeat_interleave(number)
    draws = torch.rand(4 * number, 6, generator=torch.Generator().manual_seed(0))
    masks = sampler.from_draws(draws, counts).unflatten(0, (4, number))
    for mask, count, hints in zip(masks, (0, 9, 20, 32), (0, 0, 2, 3), strict=True):
        assert (mask.sum(dim=1) == count - hints).all()
        assert (mask[:, 6:] == (torch.arange(6, 64) < count)).all()
        share = (~mask[:, :6]).double().mean(dim=0) if count else torch.zeros(6)
        deviation = (hints / 6 * (1 - hints / 6) / number) ** 0.5
        torch.testing.assert_close(
            share.double(), torch.full((6,), hints / 6).double(), rtol=0, atol=5 * deviation
        )


def _task(masks: str = "high") -> MiniTask:
    """Views of 32 pixels, and a local one of 16."""
    sizes = {"out_dim": 5, "hidden_dim": 7, "bottleneck": 4, "momentum": 0.5}
    config = {**sizes, "mask_ratio": [0.2, 0.5], "attention_masks": masks}
    task = MiniTask("ibot", config, backbone=ViTMicro(depth=2).build, lr=0.05)
    shapes = [(24, 3, size, size) for size in (32, 32, 16)]
    task.views = [draw(number, *shape) for number, shape in enumerate(shapes)]
    return task


def _attention(task: MiniTask, images: torch.Tensor) -> torch.Tensor:
    """The teacher's attention of the class token to patches, from keys and queries."""
    backbone: Any = task.loss.teacher.network.backbone
    block, inputs = backbone.blocks[-1], []
    handle = block.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    backbone(images)
    handle.remove()
    query, key, _ = block.attn.qkv(block.norm1(inputs[0])).unflatten(2, (3, 3, 32)).unbind(2)
    scores = torch.einsum("bhd,bnhd->bhn", query[:, 0], key) / 32**0.5
    return scores.softmax(dim=2)[:, :, 1:].mean(dim=1).detach()


@pytest.mark.parametrize("masks", ["high", "hint"])
def test_the_patches_of_the_highest_attention_of_the_teacher_are_masked(masks: str) -> None:
    """Not that of the network, from which the teacher differs after an update."""
    task = _task(masks).run(1)
    batch = task.forward(torch.arange(8))
    mask = batch["masks"].mask
    attention = _attention(task, torch.cat(batch.all_views[:2]))
    ranks = attention.argsort(dim=1, descending=True).argsort(dim=1)
    counts = mask.sum(dim=1)
    assert 0 < (counts > 0).sum() < len(mask)
    assert len(counts.unique()) > 4
    for row, count, of_patch in zip(mask, counts.tolist(), ranks, strict=True):
        hidden = of_patch[row].sort().values
        if masks == "high" or not count:
            assert hidden.tolist() == list(range(count))
        else:
            before = int(hidden[-1]) + 1
            assert before - count == before // 10
            assert set(range(6, before)) <= set(hidden.tolist())
    assert torch.equal(batch.input.masks.mask, mask)
    assert torch.equal(batch["masks"].indices, mask.flatten().nonzero()[:, 0])
    weights = torch.cat([torch.full((n,), 1 / n) for n in counts.tolist() if n])
    torch.testing.assert_close(batch["masks"].weights, weights)


def test_targets_are_the_teachers_at_the_masked_patches() -> None:
    """The teacher, computed before the network, is that of this step."""
    task = _task().run(1)
    batch = task.forward(torch.arange(8))
    teacher: Any = task.loss.teacher.network
    patches = teacher.extract(torch.cat(batch.all_views[:2])).patches[batch["masks"].mask]
    temperature = task.loss.patch_temperature_at(task.where)
    scores = teacher.head(patches) - task.loss.centers[1]
    expected = F.softmax(scores / temperature, dim=1)
    torch.testing.assert_close(batch["patch_targets"], expected.detach())


def test_two_ranks_mask_as_one() -> None:
    alone = _two_updates(0)
    for of_rank in run_ranks(_two_updates, 2):
        assert largest_difference(of_rank, alone) < 1e-9


def _two_updates(rank: int) -> dict[str, Any]:
    return _task("hint").run(2).state()


def test_a_resumed_run_masks_as_one_that_was_not_stopped() -> None:
    whole = _task("hint").run(3).state()
    parts = _task("hint").resume(_task("hint").run(2).state()).run(1).state()
    for key in ("network", "method"):
        assert largest_difference(parts[key], whole[key]) == 0


def test_a_backbone_without_class_token_is_refused(tmp_path: Path) -> None:
    options = ["backbone.class_token=false", "method.attention_masks=high"]
    task = tiny.task("ibot", tmp_path, "run", *options)
    message = r"method\.attention_masks: a VisionTransformer has no class token"
    with pytest.raises(UserError, match=message):
        task.prepare()


def test_reading_the_attention_does_not_change_the_features() -> None:
    """Beyond the rounding of another kernel."""
    vit, images = ViTMicro(depth=2).build().double(), draw(0, 2, 3, 32, 32)
    before = vit(images)
    attention = ClassAttention(vit, "key")
    torch.testing.assert_close(vit(images), before, rtol=0, atol=1e-12)
    weights = attention.take()
    assert weights.shape == (2, 64)
    assert not weights.requires_grad
    assert (weights.sum(dim=1) < 1).all()  # the rest is the attention to itself
