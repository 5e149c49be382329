"""Context encoders: the loss by its definition, the layer of section 3.1, and what is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from figures import draw
from minitask import predicted
from selftask.batch import Batch
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.methods.context_encoder import ChannelwiseLinear, ContextEncoder, center
from selftask.models.backbones.vit import ViTMicro

_NONE = torch.empty(0, dtype=torch.int64)


def _loss(method: ContextEncoder, prediction: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    batch = Batch(views={"main": [images]}, labels=_NONE, index=_NONE, key=_NONE)
    loss = method(predicted(prediction), batch)
    assert isinstance(loss, torch.Tensor)
    return loss


def _method(**config: Any) -> ContextEncoder:
    return ContextEncoder(ContextEncoder.Config(center_size=6, **config)).double()


def test_loss_is_a_weighted_mean_of_squares() -> None:
    """Pixel by pixel; weight 10 on the border of 2, as the authors' gradient (train.lua)."""
    images, prediction = draw(0, 2, 3, 12, 12), draw(1, 2, 3, 6, 6).requires_grad_()
    method = _method(overlap=2)
    loss = _loss(method, prediction, images)
    expected, weight_of = 0.0, {}
    for row in range(6):
        for column in range(6):
            inside = 2 <= row < 4 and 2 <= column < 4
            weight_of[row, column] = 1.0 if inside else 10.0
            difference = prediction[:, :, row, column] - images[:, :, row + 3, column + 3]
            expected += weight_of[row, column] * difference.square().sum().item()
    assert loss.item() == pytest.approx(expected / (2 * 3 * 36), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, prediction)
    error = (prediction - images[:, :, 3:9, 3:9]).detach()
    for (row, column), weight in weight_of.items():
        torch.testing.assert_close(
            gradient[..., row, column], weight * 2 * error[..., row, column] / (2 * 3 * 36)
        )
    assert _loss(method, center(images, 6), images) == 0


def test_channelwise_layer_connects_all_positions_of_a_channel() -> None:
    """And no others: its Jacobian is zero between channels; m n n' weights."""
    layer = ChannelwiseLinear(3, (4, 4), (2, 2)).double()
    assert layer.weight.numel() == 3 * 16 * 4
    x = draw(0, 1, 3, 4, 4)
    jacobian: Any = torch.autograd.functional.jacobian(layer, x)
    jacobian = jacobian[0, :, :, :, 0].flatten(1, 2).flatten(3)  # (3, 4, 3, 16)
    for number in range(3):
        for other in range(3):
            assert (jacobian[number, :, other] != 0).all() == (number == other)
            assert (jacobian[number, :, other] == 0).all() == (number != other)
    torch.testing.assert_close(jacobian[1, :, 1], layer.weight[1].detach())


def test_the_network_does_not_see_the_center_but_for_its_border(tmp_path: Path) -> None:
    task = tiny.task("context_encoder", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, side = task.last_batch, 16
    (images,) = batch.all_views
    hidden = torch.zeros(32, 32, dtype=torch.bool)
    hidden[8 + 2 : 8 + side - 2, 8 + 2 : 8 + side - 2] = True
    assert (batch.input[..., hidden] == 0).all()
    assert torch.equal(batch.input[..., ~hidden], images[..., ~hidden])
    assert batch.output.prediction.shape == (len(images), 3, side, side)
    painted = task.loss.visualize(batch.output, batch)["reconstruction"]
    assert torch.equal(painted[..., 8:24, 8:24], batch.output.prediction)
    around = torch.ones(32, 32, dtype=torch.bool)
    around[8:24, 8:24] = False
    assert torch.equal(painted[..., around], images[..., around])
    task.close()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("method.center_size=12", "method.center_size=12: the backbone has one position for each"),
        ("method.center_size=32", "method.center_size=32: it is half of the side of the images"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(setting: str, message: str, tmp_path: Path) -> None:
    task = tiny.task("context_encoder", tmp_path, "run", setting, "method.overlap=1")
    with pytest.raises(UserError, match=message):
        task.prepare(), task.on_start(), task.on_phase_start(), task.step()


def test_a_border_that_leaves_nothing_to_hide_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "context_encoder", "method.overlap=8"]) == 2
    assert "leaves nothing to hide of center_size=16" in capsys.readouterr().err


def test_strides_that_are_no_power_of_two_are_refused() -> None:
    vit = ViTMicro(img_size=36, patch_size=6, depth=1).build()
    with pytest.raises(UserError, match="a map of stride 6 cannot be doubled"):
        ContextEncoder.check_backbone(vit)
