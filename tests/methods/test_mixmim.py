"""MixMIM against MAE's encoder and loops over pixels, on a plain transformer and on a Swin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from figures import draw
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.errors import UserError
from selftask.methods.mixmim import hidden_squares, mix, partners
from selftask.models.features.extract import extract
from selftask.models.network import PatchOutput
from selftask.parallel.activation_checkpointing import checkpoint_blocks
from selftask.task import Task

SWIN = "{img_size: 32, window_size: 2, embed_dim: 12, depths: [1, 2, 2], num_heads: [2, 2, 2]}"
"""Of a Swin with squares of 16 pixels."""


def _task(tmp_path: Path, *more: str) -> Any:
    return _started(tiny.task("mixmim", tmp_path, "run", *more))


def _swin_task(tmp_path: Path, *more: str) -> Any:
    overrides = [
        f"data={tiny.digits_file(tmp_path)}",
        "data={val: null, num_workers: 0}",
        f"backbone={{name: timm, model: swin_tiny_patch4_window7_224, args: {SWIN}}}",
        "method={decoder_dim: 16, decoder_depth: 1, decoder_heads: 2}",
        "train={batch_size: 8, epochs: 1, threads: 1, device: cpu}",
        "eval.evaluations={knn: null, linear: null}",
        f"out={tmp_path / 'run'}",
    ]
    config = load_config("mixmim/digits", [*overrides, *more])
    return _started(Task(config, sources=open_data(config.data)))


def _started(task: Any) -> Any:
    task.prepare()
    task.on_start(), task.on_phase_start()
    return task


def _forward(task: Any) -> Batch:
    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    return batch


def test_features_of_each_half_are_those_of_the_image_alone(tmp_path: Path) -> None:
    """On a plain transformer: of MAE's encoder, which leaves out the other squares."""
    task = _task(tmp_path)
    batch, backbone = _forward(task), task.base_model.backbone.eval()
    images, mask = batch.input
    hidden = hidden_squares(mask)
    with torch.no_grad():
        mixed = extract(backbone, mix(images, hidden), groups=hidden).patches
        for shown, seen in ((images, mask.keep), (partners(images), mask.predict[:, 0])):
            alone = extract(backbone, shown, keep=seen).patches
            halves = mixed.gather(1, seen[..., None].expand_as(alone))
            torch.testing.assert_close(halves, alone, rtol=1e-4, atol=1e-5)
    task.close()


def test_loss_is_that_of_the_paper(tmp_path: Path) -> None:
    """Both images of each mixed one, pixel by pixel; squares have mean 0 and variance 1."""
    task = _task(tmp_path, "method.normalize_pixels=true")
    batch = _forward(task)
    images, mask = batch.input
    output = draw(0, *batch.output.prediction.shape)
    loss = task.loss(PatchOutput(output, batch.output.features, mask), batch).item()
    side, columns = task.loss.side, images.shape[3] // task.loss.side
    errors, predicted = [], set()
    for number in range(len(images)):
        other = number + 1 if number % 2 == 0 else number - 1
        rows = [(number, int(square)) for square in mask.predict[number, 0]]
        rows += [(other, int(square)) for square in mask.keep[number]]
        predicted.update(rows)
        for row, (image, square) in enumerate(rows):
            top, left = side * (square // columns), side * (square % columns)
            pixels = images[image, :, top : top + side, left : left + side].double()
            pixels = (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()
            true = pixels.permute(1, 2, 0).flatten()  # the channel runs fastest
            errors.append((output[number, row] - true).square().mean().item())
    assert loss == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert len(predicted) == len(errors) == len(images) * columns**2  # each square once
    task.close()


def test_a_pair_has_the_same_squares_and_exchanges_them(tmp_path: Path) -> None:
    task = _task(tmp_path)
    batch = _forward(task)
    images, mask = batch.input
    hidden = hidden_squares(mask)
    assert torch.equal(mask.keep[0::2], mask.keep[1::2])
    assert not torch.equal(mask.keep[0], mask.keep[2])
    both = mix(images, hidden)
    torch.testing.assert_close(both[0::2] + both[1::2], images[0::2] + images[1::2])
    assert torch.equal(mix(both, hidden), images)  # exchanged twice
    assert partners(torch.arange(5)).tolist() == [1, 0, 3, 2, 4]
    task.close()


def test_a_swin_sees_both_images_and_predicts_each_from_itself(tmp_path: Path) -> None:
    task = _swin_task(tmp_path)
    batch, network = _forward(task), task.base_model.eval()
    images, mask = batch.input
    other = images.clone()
    other[1::2] += 1.0
    with torch.no_grad():
        before, after = (network((x, mask)).prediction for x in (images, other))
    hidden = mask.predict.shape[2]
    assert before.shape == (len(images), 4, 3 * 16**2)
    assert torch.equal(before[0::2, :hidden], after[0::2, :hidden])  # image 0 from image 0
    assert torch.equal(before[1::2, hidden:], after[1::2, hidden:])
    assert not torch.isclose(before[0::2, hidden:], after[0::2, hidden:]).all(dim=2).any()
    task.step()
    checkpoint_blocks(network.backbone.layers[0].blocks)
    with pytest.raises(UserError, match=r"parallel\.activation_checkpointing: groups of"):
        network((images, mask))
    task.close()


def test_odd_batches_and_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.batch_size=5: mixmim mixes pairs of images; take"):
        _task(tmp_path, "train.batch_size=5")
    resized = "views.main.transforms=[{name: resize, size: 24}, normalize]"
    with pytest.raises(UserError, match="views: images of 24x24 pixels cannot be divided into sq"):
        _forward(_swin_task(tmp_path, resized, "backbone.args.strict_img_size=false"))
