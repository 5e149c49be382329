"""Objects of the user, a network, a DataLoader or a Learner, after their training."""

from __future__ import annotations

import copy
import io
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision.models import resnet18

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


def test_invalid_options_of_a_learner_are_refused_as_in_a_recipe() -> None:
    for method, options, message in (
        ("simclr", {"temperature": -1}, "SimCLR: temperature=-1: must be above 0"),
        ("simclr", {"temperature": "warm"}, "SimCLR: temperature='warm': expected a number"),
        ("moco", {"momentum": 2.0}, "MoCo: momentum=2.0: must be at most 1"),
        ("beit", {}, "BEiT: tokenizer is missing: give a run"),
        ("clip", {}, "CLIP needs a tokenizer, which a Learner does not have"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            selftask.Learner(method, network(), steps=4, batch_size=16, **options)
    schedule = {"name": "linear", "start": 0.5, "end": 0.9}
    learner = selftask.Learner("byol", network(), steps=4, batch_size=16, momentum=schedule)
    assert learner.method.config.momentum["end"] == 0.9


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("supcon", "SupCon needs a label for each image; give (views, labels)"),
        ("detcon", "DetCon needs the crop boxes of the views"),
        ("rotation", "views: Rotation needs 1 view of an image, got 2"),
    ],
)
def test_batches_without_what_the_method_needs_are_refused(method: str, message: str) -> None:
    learner = selftask.Learner(method, resnet18(), steps=4, batch_size=4)
    with pytest.raises(UserError, match=re.escape(message)):
        learner([torch.randn(4, 3, 32, 32)] * 2)


class Maps(nn.Sequential):
    """A backbone that returns maps."""


@pytest.mark.parametrize(
    ("kind", "start"),
    [(nn.Sequential, "the backbone Sequential"), (Maps, r"\S*test_user_objects.py:\d+: .* Maps")],
)
def test_a_backbone_without_vectors_is_named_with_its_line(
    kind: type[nn.Sequential], start: str
) -> None:
    """The line of a class of torch would say nothing."""
    backbone = kind(nn.Conv2d(3, 8, 1))
    backbone.embed_dim = 8
    learner = selftask.Learner("simclr", backbone, steps=1, batch_size=4)
    with pytest.raises(UserError, match=rf"^{start} must map images .* returned \(8, 8, 4, 4\)"):
        learner([torch.rand(4, 3, 4, 4)] * 2)


@pytest.mark.parametrize("method", ["simclr", "swav", "dino"])
def test_learners_train_in_bfloat16(method: str) -> None:
    """Without autocast; heads and targets are computed in float32."""
    learner = selftask.Learner(method, network(), steps=4, batch_size=16).bfloat16()
    loss = learner([torch.randn(16, 3, 8, 8).bfloat16() for _ in range(2)])
    loss.backward()
    learner.update()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(p.grad.isfinite().all() for p in learner.backbone.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("mfm", "batches: mfm undoes the normalization of the views"),
        ("colorization", "views: colorization predicts colors in Lab"),
    ],
)
def test_a_method_that_undoes_normalization_needs_that_of_the_batches(
    method: str, message: str, tmp_path: Path
) -> None:
    """Moments of ImageNet, or none, would give targets that are not the pixels."""
    backbone = resnet18()
    backbone.fc = nn.Identity()
    with pytest.raises(UserError, match=r"undoes the normalization .* A Learner has no transforms"):
        selftask.Learner(method, backbone, steps=1, batch_size=4)
    settings = {"backbone": backbone, "batches": [torch.randn(4, 3, 32, 32)], "out": tmp_path}
    with pytest.raises(UserError, match=message):
        selftask.create_task(method, **settings).prepare()
    own = {"name": "normalize", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    key = "views.main.transforms"
    task = selftask.create_task(method, **settings, **{key: ["lab", own]})
    task.prepare()
    assert torch.equal(task.loss.std.flatten(), torch.tensor(own["std"]))


def test_settings_of_views_keep_the_number_that_the_batches_have(tmp_path: Path) -> None:
    batches = [[torch.randn(4, 3, 8, 8) for _ in range(3)]]
    views = {"main": {"transforms": [{"name": "normalize", "stats": "half"}]}}
    settings = {"backbone": network(), "batches": batches, "out": tmp_path}
    group = selftask.create_task("simclr", **settings, views=views).config.views["main"]
    assert group.count == 3
    assert group.transforms[0].args["stats"] == "half"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_labels_are_any_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    """Cross-entropy takes int64 only; images of NumPy are float64, and its labels int32 or less."""
    images, labels = torch.rand(16, 3, 8, 8, dtype=torch.float64), torch.arange(16) % 2
    batches = DataLoader(list(zip(images, labels.to(dtype), strict=True)), batch_size=8)
    options = {"method.num_classes": 2, "train.device": "cpu", "train.max_steps": 2}
    task = selftask.create_task(
        "supervised", backbone=network(), batches=batches, out=tmp_path, **options
    )
    for _ in task.steps():
        batch = task.last_batch
        assert batch.labels.tolist() == [0, 1] * 4 and batch.all_views[0].dtype == torch.float32
        assert batch.loss.item() == cross_entropy(batch.output, batch.labels).item()
    task.close()
    learner = selftask.Learner("supervised", network(), steps=1, batch_size=8, num_classes=2)
    losses = [learner(images[:8].float(), labels=of) for of in (labels[:8], [0, 1] * 4)]
    losses.append(learner((images[:8].float(), labels[:8].to(dtype))))
    scores = learner.network.head(learner.backbone(images[:8].float()))
    assert [loss.item() for loss in losses] == [cross_entropy(scores, labels[:8]).item()] * 3
    with pytest.raises(UserError, match=r"labels: .* each of the 8 images .* int64 \(3,\)"):
        learner(images[:8].float(), labels=labels[:3])


def test_the_index_of_an_image_is_its_own() -> None:
    """Counted indices would give each slot of the memory other images in every epoch."""
    learner = selftask.Learner("npid", network(), steps=4, batch_size=4, num_images=20)
    views = torch.rand(4, 3, 8, 8)
    assert learner(views, index=[19, 3, 5, 0]).isfinite()
    with pytest.raises(UserError, match="NPID has a memory of the images and needs the index"):
        learner(views)
    with pytest.raises(UserError, match="index: from 0 to 20, and the memory has 20 images"):
        learner(views, index=torch.tensor([0, 20, 1, 2]))


def test_batches_without_a_length_are_refused() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.rand(3, 8, 8)

    with pytest.raises(UserError, match="expected an iterable with a length"):
        selftask.create_task("simclr", backbone=network(), batches=DataLoader(Endless()))


def test_a_later_batch_with_other_views_is_named(tmp_path: Path) -> None:
    batches = [[torch.randn(8, 3, 8, 8)] * count for count in (2, 1)]
    task = selftask.create_task("simclr", backbone=network(), batches=batches, out=tmp_path)
    with pytest.raises(UserError, match="views: SimCLR needs 2 views or more of an image, got 1"):
        for _ in task.steps():
            pass
    task.close()


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
