"""A folder of one's own: a source with captions, a backbone, a method, a train step, a hook.

Trained by the installed command as its author would: killed, resumed, exported, on two ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import tiny
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.task import Task

SHAPES = '''
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import nn

from selftask import registry
from selftask.data.source import Source
from selftask.hooks.base import Hook
from selftask.methods.base import Method

@registry.register_source("shapes")
class Shapes(Source):
    """White bars and boxes, with a caption and a size."""

    extras = {"caption": "text", "size": "array"}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        count: int = 64

    def __init__(self, config):
        self.labels = np.arange(config.count) % 2

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = np.zeros((16, 16, 3), np.uint8)
        image[: 4 + index % 9, : 4 if self.labels[index] else 12] = 255
        return image, self.labels[index]

    def extra(self, index, name):
        return ("a box", "a bar")[self.labels[index]] if name == "caption" else index % 9 / 9

    def path(self, index):
        return f"shape {index}"

    def describe(self):
        return f"{len(self)} shapes"

@registry.register_backbone("one_layer")
@dataclass(frozen=True, kw_only=True)
class OneLayer:
    width: int = 8

    def build(self, channels=3):
        layers = nn.Conv2d(channels, self.width, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(1)
        net = nn.Sequential(*layers, nn.Flatten())
        net.embed_dim = self.width
        return net

@registry.register_method("describe")
class Describe(Method):
    """Predict the caption's last letter but one, and the size."""

    loss_reduction = "samples"
    requires = ("captions",)
    views = 1

    def build_head(self, embed_dim):
        return nn.Linear(embed_dim, 2)

    def forward(self, output, batch):  # output: (1, B, 2)
        letter, size = output[0].unbind(dim=1)
        wanted = (batch.extras["caption"][:, 4] - ord("a") - 1) / 14  # 0 or 1; ids are bytes + 1
        sizes = batch.extras["size"].to(size.dtype)
        loss = F.mse_loss(letter, wanted.to(letter.dtype))
        return {"letter": loss, "size": F.mse_loss(size, sizes)}

@registry.register_train_step("plain")
def plain(task):
    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    batch.local_loss = task.loss(batch.output, batch)
    batch.loss = batch.local_loss.detach()
    task.run_hooks("on_loss_and_meter")
    task.optimizer.zero_grad()
    batch.local_loss.backward()
    task.reduce_gradients()
    task.optimizer.step(where=task.where)
    task.advance()

@registry.register_hook("count_bytes")
class CountBytes(Hook):
    def on_loss_and_meter(self, task):
        task.log("bytes", (task.last_batch.extras["caption"] > 0).sum())
'''
RECIPE = """\
import: [shapes]
data: {name: shapes, val: {name: shapes, count: 30}, num_workers: 0}
views: {main: {transforms: [{name: random_crop, size: 14}, {name: normalize, stats: half}]}}
backbone: one_layer
method: describe
train: {step: plain, epochs: 2, batch_size: 8, log_every: 1, threads: 1, device: cpu}
optimizer: {name: adamw, lr: 0.02}
hooks: {count_bytes: {}}
eval:
  transforms: [{name: center_crop, size: 14}, {name: normalize, stats: half}]
  evaluations: {knn: {}}
"""


@pytest.fixture
def mine(tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shapes.py").write_text(SHAPES)
    (tmp_path / "shapes.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_of_it_meets_in_a_step(mine: Path) -> None:
    config = load_config("shapes.yaml", ["out=run", "train.epochs=8"])
    task = Task(config, sources=open_data(config.data))
    task.prepare()
    task.on_start()
    losses = []
    while not task.done_training():
        task.on_phase_start()
        for _ in range(task.batches_left):
            task.step()
            losses.append(float(task.last_batch.loss))
        task.on_phase_end()
    assert task.last_batch.extras.keys() == {"caption", "size"}
    assert {*task.last_batch.terms} == {"letter", "size"}
    assert task.last_row["bytes"] == 8 * len(["start", *"a box", "end"])
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])
    with pytest.raises(
        UserError, match=r"no 'mask' in addition to image and label.* gives caption, size"
    ):
        task.last_batch.extras["mask"]
    task.close()


def test_data_without_captions_is_refused_with_the_key_to_set(mine: Path) -> None:
    config = load_config("shapes.yaml", ["data=digits", "data.val=null"])
    task = Task(config, sources=open_data(config.data))
    with pytest.raises(ConfigError, match=r"method\.name=describe needs captions, .*data\.caption"):
        task.prepare()


@pytest.mark.slow
def test_killed_resumed_exported_and_on_two_ranks(mine: Path) -> None:
    train = [sys.executable, "-m", "selftask", "train", "shapes.yaml"]
    assert tiny.run([*train, "out=whole"], mine).returncode == 0
    often = ["out=parts", "train.checkpoint_every=3"]
    killed = tiny.run([*train, *often, "hooks.fault_injection={at: 11, kind: kill}"], mine)
    assert killed.returncode != 0
    resumed = tiny.run([*train, *often], mine)
    assert "resumed from" in resumed.stdout
    assert resumed.stdout.splitlines()[-1].startswith("RUN finished: 16 steps"), resumed.stderr
    whole, parts = (tiny.last_state(mine / out) for out in ("whole", "parts"))
    assert tiny.differences(whole, parts) == []

    assert tiny.run([*train, "out=two", "launch.processes=2"], mine).returncode == 0
    exported = [torch.load(mine / out / "export/backbone.pt") for out in ("whole", "two")]
    for name, weight in exported[0].items():
        torch.testing.assert_close(exported[1][name], weight, atol=1e-5, rtol=1e-4)
    measure = [sys.executable, "-m", "selftask", "eval", "knn", "whole", "trust=true"]
    assert '"knn_top1": ' in tiny.run(measure, mine).stdout
