"""SparK and FCMAE against their papers: masks, visible statistics, decoders, loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitask import MiniTask
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.methods.fcmae import BlockDecoder
from selftask.methods.spark import masked_l2, standardize
from selftask.models.features.tokens import Features, from_map
from selftask.models.features.unet_decoder import UNetDecoder
from selftask.registry import METHODS

BOTH = pytest.mark.parametrize("method", ["spark", "fcmae"])


class TinyConvolutions(nn.Module):
    """Images of 8 pixels -> 2 x 2 patches of 4 pixels, after a map of 4 x 4."""

    embed_dim, stride, patch_size, num_layers = 8, 4, (4, 4), 2
    offers = ("dense", "hidden", "sparse")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4))
        self.second = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8))

    def extract(self, images: Tensor, *, layers: tuple[int, ...] = ()) -> Features:
        maps = [x := torch.tanh(self.first(images)), torch.tanh(self.second(x))]
        hidden = {layer: from_map(maps[layer]) for layer in layers}
        return Features(maps[1].mean(dim=(2, 3)), from_map(maps[1]), hidden)


def _task(method: str, **config: Any) -> MiniTask:
    values = {"decoder_dim": 8, "mask_ratio": 0.5, **config}
    return MiniTask(method, values, backbone=TinyConvolutions, sizes=(8,), lr=0.1)


@BOTH
@pytest.mark.parametrize("normalize", [True, False])
def test_loss_is_that_of_the_paper(method: str, normalize: bool) -> None:
    """Mean of the squared differences to the masked patches, each normalized by itself."""
    task = _task(method, normalize_pixels=normalize)
    batch = task.forward(torch.arange(4))
    images, hidden = batch.all_views[0], batch["mask"].hidden
    predicted = batch.output.prediction.detach()
    assert predicted.shape == images.shape
    errors = []
    for i in range(4):
        for row, column in hidden[i].nonzero().tolist():
            cut = (i, slice(None), slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4))
            target = images[cut]
            if normalize:
                mean = target.sum() / 48
                variance = (target - mean).square().sum() / 47  # unbiased, as published
                target = (target - mean) / math.sqrt(variance + 1e-6)
            errors += (predicted[cut] - target).square().flatten().tolist()
    assert len(errors) == 4 * 2 * 48
    expected = math.fsum(errors) / len(errors)
    assert task.loss(batch.output, batch).item() == pytest.approx(expected, rel=1e-12)
    assert task.loss.chance_loss == (1.0 if normalize else None)


def test_the_loss_of_each_patchs_mean_is_its_variance() -> None:
    images, hidden = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.eye(2).bool()
    hidden = hidden.expand(2, 2, 2)
    target, mean, deviation = standardize(images, hidden)
    assert masked_l2(torch.zeros_like(target), target, hidden).item() == pytest.approx(
        47 / 48, rel=1e-4
    )
    assert torch.allclose(target * deviation + mean, images)
    assert masked_l2(target, target, hidden) == 0


@BOTH
def test_hidden_pixels_do_not_reach_the_prediction(method: str) -> None:
    task = _task(method)
    images = task.views[0][:4].clone()
    first = task.forward(torch.arange(4), images)
    hidden = first["mask"].hidden.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    other = task.forward(torch.arange(4), images.masked_fill(hidden, 7.0))
    assert torch.equal(first.output.prediction, other.output.prediction)
    assert not torch.equal(task.loss(first.output, first), task.loss(other.output, other))
    images.requires_grad_()
    task.forward(torch.arange(4), images).output.prediction.square().sum().backward()
    seen = images.grad.abs().unfold(2, 4, 4).unfold(3, 4, 4).sum(dim=(1, 4, 5)) > 0
    assert torch.equal(seen, ~first["mask"].hidden)


@BOTH
def test_batch_norm_follows_visible_positions_alone(method: str) -> None:
    task = _task(method)
    batch = task.forward(torch.arange(4))
    layer = task.base_model.backbone.first
    hidden = batch["mask"].hidden.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    maps = layer[0](batch.all_views[0].masked_fill(hidden, 0.0))
    rows = maps.movedim(1, 3)[~hidden[:, 0, ::2, ::2]]
    assert len(rows) == 4 * 2 * 4
    assert torch.allclose(layer[1].running_mean, 0.1 * rows.mean(dim=0))
    assert torch.allclose(layer[1].running_var, 0.9 + 0.1 * rows.var(dim=0))


@BOTH
def test_spark_and_fcmae_training_lowers_the_loss(method: str) -> None:
    """From the first epoch, of three batches, to the tenth."""
    config = {"decoder_dim": 8, "mask_ratio": 0.5, "normalize_pixels": False}
    task = MiniTask(method, config, backbone=TinyConvolutions, sizes=(8,), lr=1.0, epochs=10)
    losses = task.run(30).losses
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3])
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(("method", "visible"), [("spark", 20), ("fcmae", 19)])
def test_masks_are_those_of_the_published_code(method: str, visible: int) -> None:
    """Of 49 patches at 0.6: SparK rounds, ConvNeXt V2 cuts off. All patches are equally likely."""
    key = torch.stack([torch.zeros(2000, dtype=torch.int64), torch.arange(2000)], dim=1)
    drawn = METHODS[method](METHODS[method].Config()).draw_mask(0, key, (7, 7))
    assert drawn.visible.shape == (2000, visible)
    assert torch.equal(drawn.hidden.flatten(1).sum(dim=1), torch.full((2000,), 49 - visible))
    assert not drawn.hidden.flatten(1).gather(1, drawn.visible).any()
    shares = drawn.hidden.flatten(1).double().mean(dim=0)
    error = math.sqrt(shares.mean() * (1 - shares.mean()) / 2000)
    assert (shares - (49 - visible) / 49).abs().max() < 4 * error


@torch.no_grad()
def test_the_decoder_is_that_of_the_paper() -> None:
    """Tokens at hidden positions of each map, then up, add, and two convolutions, to the pixels."""
    torch.manual_seed(0)
    decoder = UNetDecoder([5, 6], dim=16, stride=8, channels=3, batch_norm=True).double().eval()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    maps = [torch.randn(2, width, 4 * s, 2 * s).double() for s, width in ((1, 5), (2, 6))]
    visible = torch.tensor([[0, 1, 6], [2, 3, 7]])
    hidden = torch.ones(2, 8).scatter(1, visible, 0.0).view(2, 4, 2).bool()
    x: Any = 0
    for level, up in enumerate(decoder.up):
        if level < 2:
            fill, dense = decoder.densify[level], maps[level].clone()
            dense = dense / math.sqrt(1 + 1e-5)  # fresh running statistics
            dense = dense * fill.norm.weight[:, None, None] + fill.norm.bias[:, None, None]
            for i in range(2):
                for y in range(dense.shape[2]):
                    for c in range(dense.shape[3]):
                        if hidden[i, y // (level + 1), c // (level + 1)]:
                            dense[i, :, y, c] = fill.mask_token
            x = x + F.conv2d(dense, fill.project.weight, fill.project.bias, padding=level)
        x = F.conv_transpose2d(x, up.enlarge.weight, up.enlarge.bias, stride=2, padding=1)
        first, norm, _, second, last = up.convolve
        x = norm(F.conv2d(x, first.weight, padding=1)).clamp(0, 6)
        x = last(F.conv2d(x, second.weight, padding=1))
        assert x.shape[1] == 16 >> (level + 1)
    expected = F.conv2d(x, decoder.project.weight, decoder.project.bias)
    assert torch.allclose(decoder(maps, visible, hidden), expected, atol=1e-10)
    assert isinstance(
        UNetDecoder([16], dim=16, stride=2, channels=3, batch_norm=False).densify[0].project,
        nn.Identity,  # as published, for equal widths at the coarsest level
    )


@torch.no_grad()
def test_the_block_decoder_is_that_of_the_paper() -> None:
    """Project, token at hidden positions, one block of ConvNeXt V2, a linear layer to pixels."""
    torch.manual_seed(0)
    decoder = BlockDecoder(5, 6, 1, stride=2, channels=3).double()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, visible = torch.randn(1, 5, 2, 2).double(), torch.tensor([[1, 2]])
    hidden = torch.tensor([[[True, False], [False, True]]])
    dense = torch.einsum("de,behw->bdhw", decoder.embed.weight[:, :, 0, 0], x)
    dense = dense + decoder.embed.bias[:, None, None]
    dense[0, :, 0, 0] = dense[0, :, 1, 1] = decoder.mask_token
    (block,) = decoder.blocks
    y = F.conv2d(dense, block.conv_dw.weight, block.conv_dw.bias, padding=3, groups=6)
    y = F.layer_norm(y.movedim(1, 3), (6,), block.norm.weight, block.norm.bias, 1e-6)
    y = F.gelu(F.linear(y, block.mlp.fc1.weight, block.mlp.fc1.bias))
    norms = y.square().sum(dim=(1, 2), keepdim=True).sqrt()
    shares = norms / (norms.mean(dim=3, keepdim=True) + 1e-6)
    y = block.mlp.grn.weight * (y * shares) + block.mlp.grn.bias + y
    y = dense + F.linear(y, block.mlp.fc2.weight, block.mlp.fc2.bias).movedim(3, 1)
    y = F.conv2d(y, decoder.predict.weight, decoder.predict.bias)  # (1, 12, 2, 2)
    image = decoder([x], visible, hidden)
    for row in range(2):
        for column in range(2):
            cut = image[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.allclose(cut.flatten(), y[0, :, row, column], atol=1e-10)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match=r"decoder_dim=10: must be divisible by the .*, 4, which"):
        _task("spark", decoder_dim=10)
    with pytest.raises(UserError, match=r"mask_ratio=0\.05 hides 0 of the 4 patches"):
        _task("spark", mask_ratio=0.05).forward(torch.arange(4))
    with pytest.raises(ConfigError, match=r"parallel\.activation_checkpointing must be none"):
        load_config("spark", ["parallel.activation_checkpointing=blocks"])
    with pytest.raises(ConfigError, match="'vit_micro' has none; take resnet101"):
        load_config("spark", ["backbone={name: vit_micro, img_size: 32}"])
    with pytest.raises(ConfigError, match=r"mask the patches of this one with fcmae or spark$"):
        load_config("mae", ["backbone={name: small_resnet}"])
