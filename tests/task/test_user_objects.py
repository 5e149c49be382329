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
from selftask.api.batches import _moved, as_batch
from selftask.api.trainer import Trainer
from selftask.api.training import Run
from selftask.batch import Batch, Draws, Extras
from selftask.errors import UserError
from selftask.methods.moco import MoCo
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


@pytest.mark.parametrize("item", [5, None, "x", torch.zeros(3, 8, 8), torch.tensor(0.5), [1, 2]])
def test_what_is_no_batch_is_told_with_its_number(item: Any) -> None:
    with pytest.raises(UserError, match=rf"a {type(item).__name__} is no batch \(number 7\); give"):
        as_batch(item, 7, 4)


def test_a_smaller_last_batch_has_indices_of_its_own(tmp_path: Path) -> None:
    views = [[torch.randn(size, 3, 8, 8)] * 2 for size in (8, 8, 5)]
    task = selftask.create_task("simclr", backbone=network(), batches=views, out=tmp_path)
    indices = []
    for _ in zip(range(3), task.steps(), strict=False):
        indices += task.last_batch.index.tolist()
    task.close()
    assert indices == list(range(21))


def test_learner_counts_the_views() -> None:
    """One view would be its own positive."""
    backbone = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    learner = selftask.Learner("simclr", backbone, steps=1, batch_size=4)
    images = torch.rand(4, 3, 8, 8)
    assert learner([images, images]).isfinite()
    for views in (images, [images]):
        with pytest.raises(UserError, match="SimCLR needs 2 views or more of an image, got 1"):
            learner(views)


def test_random_numbers_of_the_caller_stay_the_same(tmp_path: Path) -> None:
    """The first batch is read here, of a DataLoader that shuffles."""
    words: dict[str, Any] = {"backbone": network(), "out": tmp_path}
    before = torch.get_rng_state()
    selftask.create_task("simclr", batches=DataLoader(Pairs(), 16, shuffle=True), **words)
    assert torch.equal(torch.get_rng_state(), before)


def batch_of_ones_own() -> Batch:
    """With every field that holds tensors of the data."""
    size = torch.zeros(4, 2)
    draws = Draws(matrix=torch.zeros(4, 2, 3), image_size=size, params={"crop": size})
    return Batch(
        views={"main": [torch.zeros(4, 3, 8, 8)]},
        labels=torch.zeros(4, dtype=torch.long),
        index=torch.arange(4),
        key=torch.zeros(4, 2, dtype=torch.long),
        extras=Extras(caption=torch.zeros(4, 5)),
        draws={"main": [draws]},
        drawn={"method": [torch.zeros(4)]},
    )


def test_a_batch_of_ones_own_is_on_the_device_except_for_its_key() -> None:
    """The device "meta" stands for a GPU."""
    moved = _moved(batch_of_ones_own(), torch.device("meta"))
    (draws,) = moved.draws["main"]
    tensors = [*moved.views["main"], moved.labels, moved.index, *moved.drawn["method"]]
    tensors += [moved.extras["caption"], draws.matrix, draws.image_size, draws.params["crop"]]
    assert all(tensor.is_meta for tensor in tensors) and not moved.key.is_meta
    with pytest.raises(UserError, match="no 'depth' in addition to image and label"):
        moved.extras["depth"]


def test_a_batch_of_ones_own_keeps_no_results() -> None:
    """A list of them is read again in the next epoch, which draws its own masks."""
    own = batch_of_ones_own()
    own.drawn.clear()
    batch = as_batch(own, 9, 4)
    batch.drawn["method"], batch["teacher"], batch.added_terms["x"] = 1, 2, torch.tensor(3.0)
    batch.local_loss = torch.tensor(1.0)
    assert (batch.number, batch.epoch, own.number, own.epoch) == (9, 2, 0, 0)
    assert (own.drawn, own.added, own.added_terms, own.terms) == ({}, {}, {}, {})
    assert batch.views["main"][0] is own.views["main"][0]


def test_settings_without_effect_are_refused() -> None:
    method = MoCo(MoCo.Config(queue_size=64))
    with pytest.raises(UserError, match=r"temperature: .*give them to MoCo\.Config"):
        selftask.Learner(method, network(), steps=4, batch_size=16, temperature=1.0)
    with pytest.raises(UserError, match="num_images at least batch_size"):
        selftask.Learner("moco", network(), steps=4, batch_size=16, num_images=8)
    with pytest.raises(UserError, match="weights and trust are for a model by its name"):
        selftask.Predictor(selftask.Model(network(), {"embed_dim": 8}), weights="none")
    batches = [[torch.randn(8, 3, 8, 8)] * 2]
    for key in ("data", "data.val"):
        with pytest.raises(UserError, match=rf"{key}: has no effect with batches"):
            selftask.create_task("simclr", batches=batches, **{key: "digits"})


def test_the_classifier_of_a_predictor_is_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(self: selftask.Predictor, module: Any) -> selftask.Model:
        self.head = nn.Linear(8, 2)
        return selftask.Model(network(), {"embed_dim": 8})

    monkeypatch.setattr(selftask.Predictor, "_open", opened)
    head = selftask.Predictor("run", device="meta").head
    assert head is not None and next(head.parameters()).is_meta


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
