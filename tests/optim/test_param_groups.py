"""Parameter groups: who decays, and which groups are one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.optim.build import build_optimizer, lr_schedule
from selftask.optim.param_groups import merge_alike, split_decay

LENGTH = RunLength(num_samples=80, batch_size=8, epochs=2)  # 20 updates


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def build(**settings: object) -> torch.optim.Optimizer:
    config = OptimizerConfig(lr=0.1, **settings)  # type: ignore[arg-type]
    return build_optimizer(config, [("network", network())], LENGTH, batch=8)


def test_weights_decay_and_small_parameters_do_not() -> None:
    decayed, plain = split_decay([("network", network())], decay_all=False)
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in plain["params"]] == [1, 1, 1]


def test_groups_with_the_same_settings_become_one() -> None:
    groups = [{"params": [1], "x": 0.0}, {"params": [2], "x": 1.0}, {"params": [3], "x": 0.0}]
    assert merge_alike(groups) == [{"params": [1, 3], "x": 0.0}, {"params": [2], "x": 1.0}]


@pytest.mark.parametrize(
    ("settings", "num_groups"),
    [
        ({"name": "sgd"}, 1),
        ({"name": "sgd", "weight_decay": 0.1}, 2),
        ({"name": "sgd", "weight_decay": 0.1, "decay_1d": True}, 1),
        ({"name": "lars"}, 2),  # adapts weights layer by layer, and only them
    ],
)
def test_number_of_groups(settings: dict[str, object], num_groups: int) -> None:
    assert len(build(**settings).param_groups) == num_groups


def test_step_sets_what_classys_own_step_sets() -> None:
    """lr and a moving weight decay at every ``where``, against Classy's ``step``."""
    from selftask.classy import ClassyOptimizer

    ours = build(name="sgd", weight_decay=0.1, end_weight_decay=0.4)
    theirs = build(name="sgd", weight_decay=0.1, end_weight_decay=0.4)
    for where in (0.0, 0.3, 0.95):
        ours.step(where=where)
        ClassyOptimizer.step(theirs, where=where)
        for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert (a["lr"], a["weight_decay"]) == (b["lr"], b["weight_decay"])


def test_tokens_and_positions_decay_if_asked() -> None:
    """Of a ViT with a decoder: all that is not one-dimensional, and the decoder's mask token."""
    network = nn.Module()
    network.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
    network.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
    network.mask_token = nn.Parameter(torch.zeros(4))
    network.norm = nn.LayerNorm(4)
    network.linear = nn.Linear(4, 4)
    for tokens, num_decayed in ((False, 1), (True, 4)):
        decayed, plain = split_decay([("network", network)], decay_all=False, decay_tokens=tokens)
        assert len(decayed["params"]) == num_decayed
        assert len(plain["params"]) == 7 - num_decayed


def test_warmup_starts_at_start_lr() -> None:
    """0.3 to 4.8 over the first half, as a line; scaled by 2 with the batch."""
    config = OptimizerConfig(
        name="sgd", lr=2.4, start_lr=0.15, lr_scale="linear", warmup="50%", schedule="constant"
    )
    lr = lr_schedule(config, LENGTH, batch=512)
    for step in range(10):
        assert lr(step / 20) == pytest.approx(0.3 + 4.5 * step / 10)
    assert lr(0.75) == pytest.approx(4.8)
