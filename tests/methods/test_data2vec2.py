"""data2vec 2.0 against the figures of its authors' code, its paper as loops, and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn

from figures import draw
from minitask import MiniTask, predicted
from selftask.batch import Batch
from selftask.config.config_class import config_class
from selftask.config.run_length import RunLength
from selftask.errors import UserError
from selftask.methods.data2vec2 import Data2Vec2, Predictions, contextual_targets
from selftask.models.masks import is_hidden, scattered_squares
from selftask.models.predictors.conv_decoder import ConvDecoder
from selftask.models.predictors.patch_predictor import sincos_positions
from selftask.optim.schedules import build_schedule
from selftask.registry import METHODS

# facebookresearch/fairseq, examples/data2vec/models/data2vec2.py: the target (norm, first numbers),
# loss and gradient of hidden patches, and of class tokens. It computes in float32.
TARGETS = {
    0: (17.999698638916016, 0.2988341450691223, -0.5962982177734375, 1.840131402015686),
    500: (17.999637603759766, -0.8753917813301086, -1.794714331626892, 1.2902165651321411),
}
PATCHES = {0: (6.653263568878174, 0.7407779228), 500: (6.4661030769348145, 0.7302843588732176)}
IMAGES = {
    0: (0.09801953285932541, 0.03364271436224778),
    500: (0.11891355365514755, 0.037055305193062715),
}
DECAY = {0: 0.9998, 1: 0.9998000019, 50_000: 0.999895, 99_999: 0.9999899981, 100_000: 0.99999}

SMALL: dict[str, Any] = {
    "num_masks": 3,
    "square": 2,
    "top_blocks": 2,
    "mask_ratio": 0.7,
    "decoder_dim": 8,
    "decoder_depth": 2,
    "decoder_groups": 2,
}


def _vit(**args: Any) -> nn.Module:
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 3, "num_heads": 2}
    return VisionTransformer(num_classes=0, **{**sizes, **args})


def _task(backbone: Any = _vit, **config: Any) -> MiniTask:
    config = {"momentum": 0.9, **SMALL, **config}
    return MiniTask("data2vec2", config, backbone=backbone, sizes=(8,), lr=0.05)


def _terms(
    method: Data2Vec2, patches: Tensor, images: Tensor, targets: Tensor, keep: Tensor
) -> dict[str, Tensor]:
    """The loss for patches (M, B, N, E), class tokens (M, B, E), and visible patches (B, M, K)."""
    none = torch.empty(0, dtype=torch.int64)
    batch = Batch(
        views={}, labels=none, index=none, key=none, added={"targets": targets, "mask": keep}
    )
    return method(predicted(Predictions(patches, images)), batch)


@pytest.mark.parametrize("seed", TARGETS)
def test_targets_and_loss_are_those_of_the_authors_code(seed: int) -> None:
    targets = contextual_targets([draw(seed + layer, 3, 9, 12) for layer in range(2, 5)])
    figures = targets.norm().item(), *targets.flatten()[:3].tolist()
    assert figures == pytest.approx(TARGETS[seed], rel=1e-6)
    # the first 14 of the 27 patches, each as an image
    flat = targets.flatten(0, 1)[:14]
    predictions, tokens = draw(seed + 20, 14, 12).requires_grad_(), draw(seed + 21, 3, 12)
    method = Data2Vec2(Data2Vec2.Config(image_weight=0.03))  # 0.01 times a sum over 3 images
    keep = torch.empty(14, 1, 0, dtype=torch.int64)
    patches = _terms(method, predictions[None, :, None], tokens[None, :1], flat[:, None], keep)
    (gradient,) = torch.autograd.grad(patches["hidden_patches"], predictions)
    figures = patches["hidden_patches"].item(), gradient.norm().item()
    assert figures == pytest.approx(PATCHES[seed], rel=1e-6)
    tokens.requires_grad_()
    none = torch.empty(3, 1, 0, dtype=torch.int64)
    image = _terms(method, targets[None], tokens[None], targets, none)["class_token"]
    (gradient,) = torch.autograd.grad(image, tokens)
    assert (image.item(), gradient.norm().item()) == pytest.approx(IMAGES[seed], rel=1e-6)


def test_loss_is_that_of_the_paper() -> None:
    """Section 3.1 as loops over masks, images and hidden patches, for a trained task."""
    task = _task(image_weight=0.5).run(2)
    batch = task.forward(torch.arange(4))
    patches, tokens = (x.detach() for x in batch.output.prediction)
    targets, keep, expected = batch["targets"], batch["mask"], [0.0, 0.0]
    assert keep.shape == (4, 3, 4) and patches.shape == (3, 4, 16, 12)
    for mask in range(3):
        for image in range(4):
            hidden = sorted({*range(16)} - {*keep[image, mask].tolist()})
            assert len(hidden) == 12
            for patch in hidden:
                far = patches[mask, image, patch] - targets[image, patch]
                expected[0] += float(far @ far) / math.sqrt(12) / (12 * 3 * 4)
            far = tokens[mask, image] - sum(targets[image]) / 16
            expected[1] += 0.5 * float(far @ far) / math.sqrt(12) / (3 * 4)
    terms = task.loss(batch.output, batch)
    actual = [terms[name].item() for name in ("hidden_patches", "class_token")]
    assert actual == pytest.approx(expected, rel=1e-12)


def test_targets_are_outputs_of_the_teachers_mlps() -> None:
    """Section 3.1: of the last blocks, before the residual; each normalized over the patches."""
    task = _task().run(2)
    batch = task.forward(torch.arange(4))
    vit: Any = task.loss.teacher.network.backbone
    x = vit.patch_embed(batch.all_views[0]) + vit.pos_embed[:, 1:]
    x = torch.cat([(vit.cls_token + vit.pos_embed[:, :1]).expand(4, -1, -1), x], dim=1)
    layers = []
    for block in vit.blocks:
        x = x + block.attn(block.norm1(x))
        layers.append(block.mlp(block.norm2(x)))
        x = x + layers[-1]
    expected = torch.zeros(4, 16, 12, dtype=torch.float64)
    for layer in layers[-2:]:
        patches = layer[:, 1:]
        mean, variance = patches.mean(dim=1), patches.var(dim=1, correction=0)
        expected += (patches - mean[:, None]) / (variance[:, None] + 1e-5).sqrt() / 2
    mean, variance = expected.mean(dim=2), expected.var(dim=2, correction=0)
    expected = (expected - mean[..., None]) / (variance[..., None] + 1e-5).sqrt()
    assert torch.allclose(batch["targets"], expected, rtol=0, atol=1e-10)
    assert not batch["targets"].requires_grad


def test_masks_of_an_image_share_a_pass_of_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task()
    rows: list[int] = []
    teacher = task.loss.teacher.network.backbone.patch_embed
    teacher.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    task.run(1)
    assert rows == [8]


def test_squares_are_as_many_as_in_the_authors_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of (1 - 0.8 + 0.07) of 14 x 14 patches in squares of 3 x 3: int(5.88)."""
    shapes: list[tuple[int, ...]] = []

    def noted(draws: Tensor, side: int, grid: tuple[int, int]) -> Tensor:
        shapes.append((*draws.shape[1:], side, *grid))
        return scattered_squares(draws, side, grid)

    monkeypatch.setattr("selftask.methods.data2vec2.scattered_squares", noted)
    keep = Data2Vec2(Data2Vec2.Config()).draw_mask(1, torch.tensor([[0, 5]]), (14, 14))
    assert shapes == [(16, 5, 3, 14, 14)]
    assert keep.shape == (1, 16, 39)


def test_each_mask_shows_its_own_patches_to_the_network() -> None:
    """And its neighbors in the grid see them through the decoder, other images do not."""
    task = _task(image_weight=1.0)
    images = task.views[0][:4].clone().requires_grad_()
    batch = task.batch(torch.arange(4))
    patches, tokens = task.base_model(batch.input._replace(images=images)).prediction
    hidden = is_hidden(batch["mask"], 16)  # (4, 3, 16)
    assert (hidden[:, 0] != hidden[:, 1]).any()
    for mask in range(3):
        for image in range(4):
            total = patches[mask, image].square().sum() + tokens[mask, image].square().sum()
            (gradient,) = torch.autograd.grad(total, images, retain_graph=True)
            squares = gradient.abs().unfold(2, 2, 2).unfold(3, 2, 2).sum(dim=(1, 4, 5))
            seen = squares.flatten(1) > 0
            assert torch.equal(seen[image], ~hidden[image, mask])
            assert seen.sum() == seen[image].sum()


def test_decoder_is_grouped_convolutions_with_residuals() -> None:
    """As sums over neighbors, groups and channels, for 2 x 3 patches."""
    torch.manual_seed(0)
    decoder = ConvDecoder(4, dim=6, depth=2, kernel=3, groups=2).double()
    x = draw(1, 1, 6, 4)
    y = [x[0, patch] for patch in range(6)]
    for layer in decoder.layers:
        outputs, size = [], layer.in_channels // 2
        for patch in range(6):
            row, column = divmod(patch, 3)
            output = layer.bias.clone()
            for channel in range(6):
                first = channel // 3 * size
                for down in (-1, 0, 1):
                    for right in (-1, 0, 1):
                        r, c = row + down, column + right
                        if 0 <= r < 2 and 0 <= c < 3:
                            weights = layer.weight[channel, :, down + 1, right + 1]
                            output[channel] += weights @ y[3 * r + c][first : first + size]
            output = (output - output.mean()) / (output.var(correction=0) + 1e-5).sqrt()
            outputs.append(F.gelu(output))
        residual = layer.in_channels == layer.out_channels
        y = [a + b if residual else b for a, b in zip(y, outputs, strict=True)]
    expected = torch.stack([decoder.project(patch) for patch in y])
    assert torch.allclose(decoder(x, (2, 3))[0], expected, rtol=0, atol=1e-12)


def test_noise_belongs_to_the_image_and_fills_hidden_patches_alone() -> None:
    task = _task(noise=0.3)
    batch, alone = task.batch(torch.arange(24)), task.batch(torch.tensor([5]))
    noise = batch.input.noise
    assert noise.shape == (24, 16, 12)
    assert torch.equal(noise[5], alone.input.noise[0])
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
    assert noise.std().item() == pytest.approx(0.3, rel=0.03)
    none = batch.input._replace(noise=torch.zeros_like(noise))
    outputs = [task.base_model(inputs).prediction for inputs in (batch.input, none)]
    assert not torch.allclose(outputs[0].patches, outputs[1].patches)
    assert torch.equal(outputs[0].images, outputs[1].images)  # the encoder has none


def test_teacher_has_fixed_positions_and_the_momentum_of_the_authors_code() -> None:
    task = _task()
    positions = task.base_model.backbone.pos_embed
    assert not positions.requires_grad and not positions[0, 0].any()
    assert torch.allclose(positions[0, 1:], sincos_positions(12, (4, 4)).double())
    length = RunLength(num_samples=375_300 * 2, batch_size=2, accumulate=1, epochs=1)
    momentum = {**Data2Vec2.Config().momentum, "warmup": 100_000}
    schedule = build_schedule(momentum, length)
    actual = {step: schedule(step / 375_300) for step in DECAY}
    assert actual == pytest.approx(DECAY, abs=1e-9)


def test_data2vec2_training_lowers_the_loss() -> None:
    losses = _task().run(9).losses
    assert losses[-1] < losses[0]
    assert all(math.isfinite(loss) for loss in losses)


def test_without_a_class_token_there_is_one_term() -> None:
    bare = {"class_token": False, "global_pool": "avg"}
    task = _task(lambda: _vit(**bare), image_weight=0.0)
    batch = task.forward(torch.arange(4))
    assert [*task.loss(batch.output, batch)] == ["hidden_patches"]


def test_impossible_configs_are_refused() -> None:
    schema: Any = config_class(METHODS, "data2vec2")
    config = schema(decoder_dim=10, decoder_kernel=2)
    backbone = {"name": "vit_tiny", "depth": 3, "class_token": False}
    assert [*config.problems({"backbone": backbone})] == [
        "top_blocks: 10; the backbone has 3 blocks",
        "image_weight: 2.56; needs backbone.class_token: true; or 0",
        "decoder_dim: 10 must be divisible by decoder_groups=16",
        "decoder_kernel: 2 must be odd",
    ]
    with pytest.raises(UserError, match=r"mask_ratio=0.99 hides 16 of the 16 patches"):
        _task(mask_ratio=0.99)
    with pytest.raises(UserError, match=r"decoder_groups=8: the 12 features"):
        _task(decoder_groups=8)
    with pytest.raises(UserError, match=r"image_weight=2.56: the backbone has no class token"):
        _task(lambda: _vit(class_token=False, global_pool="avg"))
    with pytest.raises(UserError, match="have no module `mlp`"):
        _task(_without_mlp)


def _without_mlp() -> nn.Module:
    vit: Any = _vit()
    for block in vit.blocks:
        block.feed = block.mlp
        del block.mlp
    return vit
