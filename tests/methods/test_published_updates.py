"""Every ImageNet recipe's updates beside those of its paper's published code, number by number.

A small version of the shipped recipe trains for some steps in double precision; from the gradients
of each step the update is computed once more by the rules of published_updates.py: who decays, who
is adapted, which lr. (Gradients and losses have tests of their own.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from published_updates import BATCH, CODE, NOT_REPLAYED, STEPS, WARMUP
from torch import nn

from selftask.cli.check import load
from selftask.equivalence.tiny_recipe import make_tiny
from selftask.equivalence.trace import RecordedTask
from selftask.optim.param_groups import named_parameters
from selftask.parallel.sync_batch_norm import Ranks, synchronize_batch_norm


class Watched(RecordedTask):
    """Keeps every parameter as it was before each update and as the optimizer left it."""

    def run_hooks(self, point: str) -> None:
        if point == "on_start":
            self.states: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        if point == "on_update":
            self.states.append((self.before, self._weights()))
        super().run_hooks(point)
        if point == "on_backward":
            self.before = self._weights()

    def _weights(self) -> dict[str, np.ndarray]:
        return {n: p.detach().numpy().copy() for n, p in self.trained_parameters.items()}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("recipe", CODE)
def test_updates_are_those_of_the_published_code(recipe: str, tmp_path: Path) -> None:
    code = CODE[recipe]
    settings = [f"out={tmp_path}", *([f"optimizer.warmup={WARMUP}"] if code.warmup else [])]
    settings += code.settings
    task = Watched(make_tiny(load(recipe, settings), batch_size=BATCH, steps=STEPS))
    task.prepare()
    try:
        task.train_until(STEPS)
    finally:
        task.close()
    assert len(task.states) == STEPS
    states: dict[str, dict[str, np.ndarray]] = {name: {} for name in task.trained_parameters}
    moved = 0
    for step, (before, after) in enumerate(task.states):
        for name, grad in task.gradients[step].items():
            decay = code.decay_at(step) if code.decays(name, grad.shape) else 0.0
            lr = code.lr_at(step) * code.rate(name, step)
            expected, states[name] = code.rule(before[name], grad.numpy(), states[name], lr, decay)
            np.testing.assert_allclose(after[name], expected, rtol=1e-12, atol=1e-15, err_msg=name)
            moved += not np.array_equal(before[name], after[name])
    assert moved > STEPS * len(states) / 2


@pytest.mark.parametrize(
    ("recipe", "sync", "zero_init"),
    [
        ("simclr/resnet50_imagenet", "all", True),  # run.py:209; tf2/resnet.py:366,467
        ("byol/resnet50_imagenet", "all", True),  # configs/byol.py:53; haiku's nets/resnet.py:104
        ("barlow/resnet50_imagenet", "all", True),  # main.py:89,179
        ("swav/resnet50_imagenet", "node", False),  # --sync_bn apex, groups of 8
        ("swav/resnet50_imagenet_batch256", "all", False),  # --sync_bn pytorch
        ("deepcluster/resnet50_imagenet", "node", False),
        ("corinfomax/resnet50_imagenet", "all", True),  # main_*_bn.py; model_base_resnet_bn.py
        ("mfm/resnet50_imagenet", "none", True),  # models/mfm.py, of timm's ResNet
        ("supcon/resnet50_imagenet", "all", True),  # hparams_flags.py; blocks.py
        ("moco/resnet50_imagenet", "none", False),  # shuffled instead
        ("mocov3/resnet50_imagenet", "all", True),  # main_moco.py:155,164
        ("mec/resnet50_imagenet", "all", True),  # main_pretrain.py, mec/builder.py:19
        ("directclr/resnet50_imagenet", "all", True),  # directclr/main.py
        ("mmcr/resnet50_imagenet", "all", True),  # mmcr/imagenet/train.py, models.py
        ("spark/resnet50_imagenet", "all", False),  # --sbn, by default
        ("pixpro/resnet50_imagenet", "all", True),  # contrast/models/PixPro.py, resnet.py
        ("zerocl/resnet50_imagenet", "all", True),  # main.py
        ("obow/resnet50_imagenet", "all", False),  # main_obow.py
        ("dcl/resnet50_imagenet", "all", False),  # lightly's main.py
    ],
)
def test_batch_norm_is_that_of_the_published_run(recipe: str, sync: str, zero_init: bool) -> None:
    config = load(recipe, [])
    assert config.parallel.sync_batch_norm == sync
    assert config.backbone.args["zero_init_residual"] == zero_init


def test_batch_norm_of_cmaes_heads_is_synchronized() -> None:
    """The default of nonlinear_neck.py."""
    assert load("cmae/vit_base_imagenet", []).parallel.sync_batch_norm == "all"


@pytest.mark.parametrize("recipe", ["supcon/resnet50_imagenet", "zerocl/resnet50_imagenet"])
def test_rules_for_batch_norm_match_synchronized_layers(recipe: str) -> None:
    layer = nn.Sequential(nn.BatchNorm2d(2))
    synchronize_batch_norm(layer, Ranks(None))
    rule = load(recipe, []).optimizer.groups[0]
    assert all(p.matches(rule) for p in named_parameters([("network.backbone", layer)]))


def test_every_imagenet_recipe_is_here() -> None:
    folder = Path(__file__).parents[2] / "configs"
    names = {f"{path.parent.name}/{path.stem}" for path in folder.glob("*/*imagenet*.yaml")}
    shared = {name for name in names if name.startswith("base/")}
    assert names - shared == {*CODE, *NOT_REPLAYED}
