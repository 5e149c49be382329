"""MoCo v3 against its authors' figures and as loops; its teacher, and the frozen patches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from figures import draw
from minitask import MiniTask, TinyTokens
from selftask.config.run_length import RunLength
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.methods.mocov3 import MoCoV3, prediction_loss
from selftask.models.build import build_backbone
from selftask.optim.param_groups import freeze_for_good
from selftask.optim.schedules import build_schedule

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7}

# facebookresearch/moco-v3: temperature, loss, gradients of both predictions
FIGURES = [
    (0.2, 2.4475788983898283, 0.10368077078956082, 0.09477812841771567),
    (1.0, 11.027673189536536, 0.10399049592745314, 0.09201985133748614),
]


@pytest.mark.parametrize(("temperature", "loss", "first", "second"), FIGURES)
def test_loss_is_that_of_the_authors(
    temperature: float, loss: float, first: float, second: float
) -> None:
    prediction = torch.stack([draw(0, 16, 24), draw(1, 16, 24)]).requires_grad_()
    key = torch.stack([draw(2, 16, 24), draw(3, 16, 24)])
    computed = prediction_loss(prediction, key, temperature=temperature)
    (gradient,) = torch.autograd.grad(computed, prediction)
    figures = (computed.item(), *gradient.norm(dim=(1, 2)).tolist())
    assert figures == pytest.approx((loss, first, second), rel=1e-9)


def test_loss_is_that_of_the_paper() -> None:
    """Algorithm 1 as loops, and its extremes."""
    prediction, key, tau = draw(1, 2, 4, 5), draw(2, 2, 4, 5), 0.3
    total = 0.0
    for view in range(2):
        for i in range(4):
            scores = [
                float(torch.cosine_similarity(prediction[view, i], other, dim=0)) / tau
                for other in key[1 - view]
            ]
            total += 2 * tau * (math.log(sum(map(math.exp, scores))) - scores[i]) / 4
    assert prediction_loss(prediction, key, temperature=tau).item() == pytest.approx(total)
    apart = torch.eye(5, dtype=torch.float64)[:4].expand(2, 4, 5)
    assert prediction_loss(apart, apart, temperature=0.01).item() == pytest.approx(0, abs=1e-9)


def test_heads_are_those_of_the_authors() -> None:
    """As their code lists the layers, for a transformer and for a ResNet."""
    for layers, norm, case in ((3, True, "vit"), (2, False, "resnet")):
        config = MoCoV3.Config(
            out_dim=24, hidden_dim=32, projector_layers=layers, predictor_norm=norm
        )
        head: Any = MoCoV3(config).build_head(16)
        hidden = ["Linear(32, 32, no bias)", "BatchNorm1d(32)", "ReLU"] if case == "vit" else []
        first = ["Linear(16, 32, no bias)", "BatchNorm1d(32)", "ReLU", *hidden]
        last = ["Linear(32, 24, no bias)", "BatchNorm1d(24, no affine)"]
        assert _names(head.projector) == [*first, *last]
        first = ["Linear(24, 32, no bias)", "BatchNorm1d(32)", "ReLU"]
        assert _names(head.predictor) == [*first, *last[: 1 + norm]]


def _names(layers: nn.Sequential) -> list[str]:
    names = []
    for layer in layers:
        match layer:
            case nn.Linear():
                bias = "" if layer.bias is not None else ", no bias"
                names.append(f"Linear({layer.in_features}, {layer.out_features}{bias})")
            case nn.BatchNorm1d():
                affine = "" if layer.affine else ", no affine"
                names.append(f"BatchNorm1d({layer.num_features}{affine})")
            case _:
                names.append(type(layer).__name__)
    return names


def test_momentum_rises_as_that_of_the_authors() -> None:
    length = RunLength(num_samples=80, batch_size=8, accumulate=1, epochs=100)
    momentum = build_schedule(MoCoV3.Config().momentum, length)
    figures = [0.99, 0.9900024671981713, 0.995, 0.9999993831624083]
    assert [momentum(where) for where in (0.0, 0.01, 0.5, 0.995)] == pytest.approx(figures)


def test_keys_are_projections_of_a_teacher_without_gradient() -> None:
    task = MiniTask("mocov3", SMALL)
    projections = task.base_model([view[:8] for view in task.views])[:, :, 0]
    batch = task.run(1).last_batch  # at first the teacher is the network
    assert torch.allclose(batch["keys"], projections, rtol=1e-12)
    assert not batch["keys"].requires_grad
    assert not any(name.startswith("predictor") for name, _ in task.loss.teacher.named_parameters())


def test_chance_is_the_loss_of_equal_similarities() -> None:
    method: MoCoV3 = MiniTask("mocov3", SMALL, batch_size=4).loss
    same = torch.ones(2, 4, 5, dtype=torch.float64)
    loss = prediction_loss(same, same, temperature=0.2)
    assert loss.item() == pytest.approx(method.chance_loss)


def test_patch_projection_and_positions_can_be_fixed() -> None:
    backbone = build_backbone(Component(name="vit_micro", args={"img_size": 16}))
    config = {**SMALL, "freeze_patches": True, "fixed_positions": True}
    task = MiniTask("mocov3", config, backbone=lambda: backbone)
    freeze_for_good([("network", task.base_model)], [], task.loss.group_rules())
    fixed = {name for name, p in backbone.named_parameters() if not p.requires_grad}
    assert fixed == {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed"}
    plain = MiniTask("mocov3", {**SMALL, "freeze_patches": True}, backbone=TinyTokens)
    with pytest.raises(UserError, match=r"patch_embed.*matches no trained parameter"):
        freeze_for_good([("network", plain.base_model)], [], plain.loss.group_rules())
