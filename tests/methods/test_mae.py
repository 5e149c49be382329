"""MAE against its paper, its published arithmetic, lightly and itself on two ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from minitask import MiniTask, predicted
from selftask.batch import Batch
from selftask.config.config_class import config_class
from selftask.errors import UserError
from selftask.methods.mae import MAE, normalize, patchify
from selftask.models.predictors.patch_predictor import sincos_positions
from selftask.registry import METHODS

SMALL: dict[str, Any] = {"decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 2}


def _vit(**args: Any) -> VisionTransformer:
    """16 patches of 2 x 2 pixels."""
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2}
    return VisionTransformer(num_classes=0, **{**sizes, **args})


def _task(**config: Any) -> MiniTask:
    return MiniTask("mae", {**SMALL, **config}, backbone=_vit, sizes=(8,), lr=0.1)


def _forward(task: MiniTask, images: Tensor | None = None) -> tuple[Batch, Tensor]:
    """A batch of four images and what the network paints of it."""
    batch = task.forward(torch.arange(4), images)
    return batch, batch.output.prediction[:, 0]


def _pixels(image: Tensor, patch: int) -> list[float]:
    """Patch number ``patch`` of an 8 x 8 image, pixel by pixel, the channel fastest."""
    row, column = divmod(patch, 4)
    return [
        float(image[channel, 2 * row + y, 2 * column + x])
        for y in range(2)
        for x in range(2)
        for channel in range(3)
    ]


@pytest.mark.parametrize("normalized", [True, False])
def test_loss_is_that_of_the_paper(normalized: bool) -> None:
    """Squared error of the masked patches only, section 3; their own mean 0 and variance 1."""
    task = _task(normalize_pixels=normalized)
    batch, output = _forward(task)
    total, count = 0.0, 0
    for image in range(4):
        for place, patch in enumerate(batch["mask"].predict[:, 0][image].tolist()):
            pixels = _pixels(batch.all_views[0][image], patch)
            if normalized:
                mean = sum(pixels) / 12
                variance = sum((x - mean) ** 2 for x in pixels) / 11
                pixels = [(x - mean) / math.sqrt(variance + 1e-6) for x in pixels]
            painted = output[image, place].tolist()
            total += sum((a - b) ** 2 for a, b in zip(painted, pixels, strict=True)) / 12
            count += 1
    assert count == 4 * 12  # three quarters of 16 patches
    loss = task.loss(predicted(output[:, None]), batch)
    assert loss.item() == pytest.approx(total / count, rel=1e-12)


def test_loss_and_targets_are_those_of_lightly() -> None:
    theirs = pytest.importorskip("lightly.models.utils")
    task = _task()
    batch, output = _forward(task)
    patches = theirs.patchify(batch.all_views[0], patch_size=2)
    target = theirs.normalize_mean_var(
        theirs.get_at_index(patches, batch["mask"].predict[:, 0]), dim=-1
    )
    expected = nn.MSELoss()(output, target)
    loss = task.loss(predicted(output[:, None]), batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_decoder_is_the_published_one() -> None:
    """There, mask tokens fill the whole grid in its order and every patch is painted."""
    task = _task()
    batch, output = _forward(task)
    images, (keep, predict, *_) = batch.input
    vit, decoder = task.base_model.backbone, task.base_model.head
    tokens = vit.patch_embed(images) + vit.pos_embed[:, 1:]
    for image in range(4):
        x = torch.cat([vit.cls_token + vit.pos_embed[:, :1], tokens[image, keep[image]][None]], 1)
        latent = decoder.embed(vit.norm(vit.blocks(x)))[0]  # (1 + K, D)
        grid = [decoder.mask_token] * 16
        for place, patch in enumerate(keep[image].tolist()):
            grid[patch] = latent[1 + place]
        full = torch.stack(grid) + sincos_positions(8, (4, 4))
        full = torch.cat([latent[:1], full])[None]
        for block in decoder.blocks:
            full = block(full)
        painted = decoder.project(decoder.norm(full))[0, 1:]
        assert torch.allclose(output[image], painted[predict[image, 0]], rtol=0, atol=1e-12)


def test_hidden_pixels_do_not_reach_the_network() -> None:
    task = _task()
    images = task.views[0][:4].clone().requires_grad_()
    batch, output = _forward(task, images)
    output.sum().backward()
    patches = images.grad.unfold(2, 2, 2).unfold(3, 2, 2)  # (4, 3, 4, 4, 2, 2)
    seen = patches.abs().sum(dim=(1, 4, 5)).flatten(1)  # (4, 16)
    for image in range(4):
        assert (seen[image, batch["mask"].predict[:, 0][image]] == 0).all()
        assert (seen[image, batch.input[1].keep[image]] > 0).all()


def _keys(epoch: int, index: Tensor) -> Tensor:
    return torch.stack([torch.full_like(index, epoch), index], dim=1)


def test_masks_are_fair_and_only_of_image_and_epoch() -> None:
    task = _task()
    task.config.train.seed = 3

    def masked(index: Tensor, epoch: int) -> Tensor:
        none = torch.empty(0, 3, 8, 8)
        key = _keys(epoch, index)
        batch = Batch(views={"main": [none]}, labels=none, index=index, key=key)
        task.loss.prepare_batch(batch, task)
        keep, hidden = batch["mask"].keep, batch["mask"].predict[:, 0]
        assert torch.equal(torch.cat([keep, hidden], 1).sort(dim=1).values[0], torch.arange(16))
        assert batch.input[1] is batch["mask"]
        assert hidden.shape == (len(index), 12)
        return hidden

    index = torch.arange(4000)
    first = masked(index, 0)
    often = first.flatten().bincount() / 4000  # 0.75 within four deviations
    assert float((often - 0.75).abs().max()) < 4 * math.sqrt(0.75 * 0.25 / 4000)
    assert torch.equal(masked(index.flip(0)[:100], 0), first.flip(0)[:100])  # any batch or rank
    assert not torch.equal(masked(index, 1), first)
    task.config.train.seed = 4
    assert not torch.equal(masked(index, 0), first)


def test_perfect_painting_costs_nothing_and_no_painting_the_variance() -> None:
    task = _task()
    batch, _ = _forward(task)
    assert task.loss(predicted(batch["pixels"][:, None]), batch).item() == 0.0
    blank = task.loss(predicted(torch.zeros_like(batch["pixels"])[:, None]), batch).item()
    assert task.loss.chance_loss == 1.0
    assert blank == pytest.approx(11 / 12, abs=1e-4)  # 1 but for the unbiased variance
    assert _task(normalize_pixels=False).loss.chance_loss is None
    assert torch.equal(normalize(torch.full((2, 12), 7.0)), torch.zeros(2, 12))  # flat: no NaN


def test_the_loss_is_not_rounded_under_autocast() -> None:
    task = _task()
    batch, output = _forward(task)
    output, batch["pixels"] = output.float(), batch["pixels"].float()
    expected = task.loss(predicted(output[:, None]), batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(task.loss(predicted(output[:, None]), batch), expected)


def test_positions_are_fixed_unless_weights_were_loaded() -> None:
    task = _task()
    before = task.base_model.backbone.pos_embed.clone()
    task.run(2)
    after = task.base_model.backbone.pos_embed
    assert torch.equal(after, before)
    assert torch.equal(after[0, 1:].float(), sincos_positions(12, (4, 4)))
    assert not any(p is after for p in task.parameters)

    vit = _vit()
    weights = {key: value.clone() for key, value in vit.state_dict().items()}
    config = SimpleNamespace(init=SimpleNamespace(backbone="weights.pt"))
    task = SimpleNamespace(config=config, data_module=SimpleNamespace(channels=3))
    MAE(MAE.Config(**SMALL)).build_network(vit, task)
    assert all(torch.equal(value, weights[key]) for key, value in vit.state_dict().items())


def test_weights_start_as_in_the_paper() -> None:
    """Xavier's uniform: within sqrt(6 / (in + out)), and of that spread."""
    network = _task().base_model
    for layer in [network.backbone.blocks[0].mlp.fc1, network.head.embed]:
        bound = math.sqrt(6 / sum(layer.weight.shape))
        assert 0.9 * bound < float(layer.weight.detach().abs().max()) <= bound
        assert not layer.bias.any()
    patches = network.backbone.patch_embed.proj.weight  # like a linear layer of 12 -> 12
    assert 0.9 < float(patches.detach().abs().max()) / math.sqrt(6 / 24) <= 1
    assert network.backbone.patch_embed.proj.bias.all()  # torch's own, as in the code
    assert 0.005 < network.backbone.cls_token.std() < 0.05, "normal, with 0.02"


def test_images_of_another_size_have_masks_of_their_own_grid() -> None:
    vit = lambda: _vit(dynamic_img_size=True)  # noqa: E731
    task = MiniTask("mae", SMALL, backbone=vit, sizes=(6,), lr=0.1).run(2)
    batch, output = _forward(task)
    assert batch["mask"].predict[:, 0].shape == (4, 7)  # of 3 x 3 patches, two are kept
    assert int(batch["mask"].predict[:, 0].max()) == 8
    assert output.shape == (4, 7, 12)
    assert math.isfinite(task.losses[-1])


def test_backbone_is_exported_under_timms_names() -> None:
    task = _task()
    exported = task.loss.export_backbone(task.base_model)
    _vit().double().load_state_dict(exported.state_dict(), strict=True)
    assert exported(task.views[0][:2]).shape == (2, 12)
    output = task.base_model(task.batch(torch.arange(2)).input)
    assert output.prediction.shape == (2, 1, 12, 12)
    assert task.base_model.embedding.shape == (2, 12)


def test_mae_training_lowers_the_loss() -> None:
    losses = _task().run(8).losses
    assert losses[-1] < 0.98 * losses[0]


def test_impossible_configs_are_told() -> None:
    schema: Any = config_class(METHODS, "mae")
    vit = {"name": "vit_tiny", "patch_size": 16}
    wrong = schema(decoder_dim=30, decoder_heads=4)
    whole = {"backbone": vit}
    keys = [problem.partition(":")[0] for problem in wrong.problems(whole)]
    assert keys == ["decoder_dim"]
    right = {"backbone": vit}
    assert not list(schema().problems(right))
    assert not list(schema().problems({**right, "backbone": {"name": "timm", "model": "x"}}))


def test_what_only_the_backbone_shows_is_told() -> None:
    with pytest.raises(UserError, match="hides 16 of the 16 patches"):
        _task(mask_ratio=0.95)
    with pytest.raises(UserError, match="hides 0 of the 16 patches"):
        _task(mask_ratio=1e-20)
    with pytest.raises(UserError, match="gives one vector an image"):
        MiniTask("mae", SMALL)


def test_patchify_cuts_row_by_row() -> None:
    images = torch.randn(2, 3, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    for number in range(6):
        top, left = 4 * (number // 3), 4 * (number % 3)
        patch = images[:, :, top : top + 4, left : left + 4]
        assert torch.equal(patches[:, number], patch.permute(0, 2, 3, 1).reshape(2, -1))
