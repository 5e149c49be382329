"""Objects of the user, a network, a DataLoader or a Learner, after their training."""

from __future__ import annotations

import copy
import io
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import selftask
import tiny
from selftask.api.trainer import Trainer
from selftask.api.training import Run
from selftask.errors import UserError
from selftask.models.dropout import draw_per_sample
from selftask.random.keyed import LAYER_DRAWS


class Pairs(Dataset[Any]):
    def __init__(self, bug: bool = False) -> None:
        self.bug = bug

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.bug and index == 40:
            raise ZeroDivisionError
        return torch.randn(3, 8, 8), torch.randn(3, 8, 8)


def network() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, 8))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("bug", [False, True])
def test_workers_of_a_loader_end_with_the_steps(
    bug: bool, persistent: bool, tmp_path: Path
) -> None:
    """The task is in reference cycles: the collector would wait five seconds for each worker."""
    before = {*multiprocessing.active_children()}  # of other tests
    loader = DataLoader(Pairs(bug), 16, num_workers=1, persistent_workers=persistent)
    words: dict[str, Any] = {"train": {"epochs": 3}, "out": tmp_path / "run"}
    task = selftask.create_task("simclr", backbone=network(), batches=loader, **words)
    kept = None
    try:
        for step in task.steps():
            if step == 2 and not bug:
                break
    except ZeroDivisionError as error:
        kept = error
    assert {*multiprocessing.active_children()} <= before
    assert (kept is not None) is bug
    loader.dataset.bug = False  # type: ignore[attr-defined]
    if not persistent:
        assert len(list(loader)) == 4  # it can still be read
    assert {*multiprocessing.active_children()} <= before


class Short(list[Any]):
    """Two batches, and a length of three."""

    def __len__(self) -> int:
        return 3


def test_batches_that_end_before_their_length_are_told(tmp_path: Path) -> None:
    batches = Short([[torch.randn(8, 3, 8, 8)] * 2] * 2)
    task = selftask.create_task("simclr", backbone=network(), batches=batches, out=tmp_path)
    with pytest.raises(UserError, match="epoch 0 ended after 2 batches, and their length is 3"):
        for _ in task.steps():
            pass


def test_a_learner_can_be_copied_and_saved_between_steps() -> None:
    learner = selftask.Learner("moco", network(), steps=4, batch_size=16, queue_size=64)
    learner([torch.randn(16, 3, 8, 8), torch.randn(16, 3, 8, 8)]).backward()
    learner.after_backward()
    learner.update()
    twin = copy.deepcopy(learner)
    torch.save(learner, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for name, value in learner.state_dict().items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(twin.state_dict()[name], value)
            torch.testing.assert_close(loaded.state_dict()[name], value)


def test_a_trained_network_with_dropout_can_be_copied_and_saved() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    draw_per_sample([net], seed=0)
    torch.save(net, file := io.BytesIO())
    file.seek(0)
    key, ones = torch.tensor([[0, 3], [0, 5]]), torch.ones(2, 64)
    LAYER_DRAWS.start(key, ones.device, None)
    try:
        for twin in (copy.deepcopy(net), torch.load(file, weights_only=False)):
            assert twin[1].p == 0.5
            assert type(twin[1]) is type(net[1])
            assert torch.equal(twin[1](ones), net[1](ones)), "the same draws per sample"
    finally:
        LAYER_DRAWS.reset(0)
    assert torch.equal(net.eval()[1](ones), ones)


def test_a_run_is_found_after_the_script_has_changed_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tiny.task("simclr", tmp_path, "run", "train.max_steps=1", "out=run"))
    Trainer().train(run.task)
    monkeypatch.chdir("/")
    assert run.rows
    assert run.load().embed_dim > 0


def test_training_where_gradients_are_disabled(tmp_path: Path) -> None:
    with torch.no_grad():
        Trainer().train(tiny.task("simclr", tmp_path, "run", "train.max_steps=1"))
        assert not torch.is_grad_enabled()
