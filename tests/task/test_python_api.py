"""Training from Python: settings, objects of the user, batches of one's own, a Learner."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import selftask
import tiny
from selftask.api.objects import overrides
from selftask.api.trainer import Interrupted
from selftask.batch import Batch
from selftask.data.transforms.nested import RandomApply
from selftask.data.transforms.normalize import Normalize
from selftask.data.views import Views
from selftask.errors import ConfigError, UserError
from selftask.hooks.base import Hook, function_hook
from selftask.methods.base import Method
from selftask.task.numerics import settle_precision
from selftask.train_steps.standard import standard_train_step


def test_import_is_light() -> None:
    code = (
        "import sys, selftask; print(sorted({'torch', 'numpy'} & set(sys.modules)), dir(selftask))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("[] ")
    assert all(f"'{name}'" in done.stdout for name in selftask.__all__)


def test_settings_are_those_of_the_command(tmp_path: Path) -> None:
    """Names, numbers, lists and paths reach the config as from the command line."""
    words = tiny.overrides(
        "simclr", tmp_path, "here", "optimizer.lr=1e-05", "train.checkpoint_every='1 epoch'"
    )
    config = tiny.config("simclr", tmp_path, "here", *words)
    task = selftask.create_task(
        "simclr/digits",
        data=tmp_path / "digits.npz",
        backbone={"name": "small_resnet", "width": 8},
        out=tmp_path / "here",
        method=config.method.to_dict(),
        train={"batch_size": 16, "epochs": 3, "log_every": 1, "threads": 1, "device": "cpu"},
        **{
            "train.checkpoint_every": "1 epoch",
            "data.val": None,
            "data.num_workers": 0,
            "optimizer.lr": 1e-05,
            "eval.evaluations": {"knn": None, "linear": None},
        },
    )
    assert task.config == settle_precision(config, task.device)


def test_wrong_objects_and_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train\.epochs'"):
        selftask.train("simclr", data="digits", **{"train.epoch": 1})
    with pytest.raises(UserError, match=r"train\.epochs: object is no value of a config"):
        selftask.train("simclr", data="digits", **{"train.epochs": object()})
    with pytest.raises(UserError, match="data: the class Images is no value of a config"):
        selftask.train("simclr", data=type("Images", (), {"__getitem__": None}))
    with pytest.raises(ConfigError, match=r"simclr/digts"):
        selftask.train(Path("simclr/digts"))
    with pytest.raises(UserError, match="expected an iterable with a length"):
        selftask.create_task("simclr", batches=iter([]))
    with pytest.raises(UserError, match=r"a Tensor is no batch \(number 0\); give float views"):
        selftask.create_task("simclr", batches=[torch.zeros(4, 3, 8, 8, dtype=torch.uint8)])
    with pytest.raises(UserError, match="MoCo has no option 'queue'; did you mean 'queue_size'"):
        selftask.Learner("moco", torch.nn.Flatten(), steps=1, batch_size=4, queue=8)
    with pytest.raises(UserError, match="DeepCluster acts before each epoch"):
        selftask.Learner("deepcluster", torch.nn.Flatten(), steps=1, batch_size=4)
    with pytest.raises(UserError, match=r"backbone: the class Flatten .*; give a module: an obj"):
        selftask.train("simclr", data="digits", backbone=torch.nn.Flatten)
    with pytest.raises(UserError, match=r"data: DataLoader .*; give a data set with __len__"):
        selftask.train("simclr", data=torch.utils.data.DataLoader([1]))
    with pytest.raises(UserError, match=r"hooks: expected a list, such as \[Hook\(\.\.\.\)\]"):
        selftask.train("simclr", data="digits", hooks=Hook())
    with pytest.raises(UserError, match=r"this is list of \[uint8 \(4, 3, 8, 8\), str\]"):
        selftask.create_task("simclr", batches=[[torch.zeros(4, 3, 8, 8).byte(), "a.jpg"]])


class Pull(Method):
    """Pulls two views together; not registered."""

    loss_reduction = "samples"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        strength: float = 1.0

    def forward(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.config.strength * (output[0] - output[1]).square().mean()


def loud_step(task: selftask.Task) -> None:
    """The standard step, and a number in the log."""
    standard_train_step(task)
    task.log("loud", task.steps_done)


def test_classes_and_functions_are_names(tmp_path: Path, forget_names: None) -> None:
    seen: list[int] = []
    task = selftask.create_task(
        Pull(Pull.Config(strength=3.0)),
        backbone=Flat(),
        batches=batches(),
        out=tmp_path / "run",
        optimizer={"name": torch.optim.NAdam, "lr": 0.01},
        train={"step": loud_step, "max_steps": 2, "log_every": 1},
        hooks=[function_hook(on_step=lambda task: seen.append(task.steps_done))],
        **{"hooks.export": None},
    )
    assert [*task.steps()] == seen == [1, 2]
    assert isinstance(task.loss, Pull) and task.loss.config.strength == 3.0
    assert tiny.rows(tmp_path / "run")[-1]["loud"] == 2
    assert task.config.to_dict()["method"] == {"name": "Pull", "strength": 3.0}
    assert task.config.train.step.name == "loud_step"
    assert isinstance(task.optimizer.optimizer, torch.optim.NAdam)


@dataclass(frozen=True, kw_only=True)
class Louder:
    """A train step with an option."""

    by: int = 1

    def __call__(self, task: selftask.Task) -> None:
        standard_train_step(task)
        task.log("loud", self.by)


def test_an_object_of_a_dataclass_is_its_name_and_fields(forget_names: None) -> None:
    step = {"step": Louder(by=3)}
    task = selftask.create_task("simclr", backbone=Flat(), batches=batches(), train=step)
    assert task.config.to_dict()["train"]["step"] == {"name": "Louder", "by": 3}


def darken(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Of an array, by a number of the view's own generator."""
    return image // np.uint8(rng.integers(2, 9))


class Mirror:
    """As torchvision's transforms: a Pillow image to a Pillow image; drawn by Python."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.mirror(image) if random.random() < 0.5 else image


def views_of(folder: Path, transforms: Any) -> list[np.ndarray]:
    """Two views of an image, by transforms given as objects."""
    config = selftask.create_task(
        "simclr/digits",
        data=tmp if (tmp := folder / "digits.npz").exists() else tiny.digits_file(folder),
        out=folder / "run",
        views={"main": {"count": 2, "transforms": transforms}},
        **{"data.val": None, "eval.evaluations": {"knn": None, "linear": None}},
    ).config
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    views = Views(config.views)
    first = views(image, 0, 1, 2)
    assert all(np.array_equal(*pair) for pair in zip(first, views(image, 0, 1, 2), strict=True))
    return [image, *first]


def test_transforms_are_callables(tmp_path: Path, forget_names: None) -> None:
    """Functions, lambdas, instances and selftask's own classes, alone, in lists and nested."""
    end = {"name": "normalize"}
    image, *views = views_of(tmp_path, [darken, end])
    divided = [[np.array_equal(view, image // by) for by in range(2, 9)] for view in views]
    assert [sum(row) for row in divided] == [1, 1]
    nested = {"name": "random_apply", "p": 1.0, "transforms": [lambda img: ImageOps.flip(img)]}
    image, *views = views_of(tmp_path, [nested, Mirror(), Normalize()])
    flipped = image[::-1]
    mirrored = [np.array_equal(view, flipped[:, ::-1]) for view in views]
    assert mirrored == [not np.array_equal(view, flipped) for view in views]
    image, *views = views_of(tmp_path, [RandomApply(p=1.0, transforms=[nested]), end])
    assert np.array_equal(views[0], flipped)
    config = overrides({"views.main.transforms": [ImageOps.mirror]})
    assert config == [
        'views.main.transforms=[{name: "custom", transform: "PIL.ImageOps:mirror"}]'
    ], "what can be imported is named so that the command can run it"
    with pytest.raises(UserError, match=r"gave a Tensor; a Pillow image or an array \(H, W, 3\)"):
        views_of(tmp_path, [lambda img: torch.zeros(3, 8, 8), end])


# -- tasks of batches --------------------------------------------------------------------------


def batches() -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return [[torch.randn(8, 3, 8, 8, generator=draw) for _ in range(2)] for _ in range(5)]


class Flat(torch.nn.Module):
    """Pixels -> 6 features."""

    embed_dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(192, 6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images.flatten(1))


def task_of_batches(out: Path, **settings: Any) -> selftask.Task:
    torch.manual_seed(3)
    more = {"train.epochs": 2, "train.threads": 1, "train.device": "cpu", "hooks.export": None}
    return selftask.create_task(
        "moco",
        out=out,
        optimizer={"name": "sgd", "lr": 0.1},
        **{"batches": batches(), **more, "backbone": Flat(), "method.queue_size": 16, **settings},
    )


def test_two_modules_of_one_class(tmp_path: Path, forget_names: None) -> None:
    """Each task trains its own module; loading a run leaves them alone."""
    networks = [Flat(), Flat()]
    tasks = [
        task_of_batches(tmp_path / str(i), backbone=network, **{"hooks.export": {}})
        for i, network in enumerate(networks)
    ]
    for task, network in zip(tasks, networks, strict=True):
        selftask.Trainer().train(task)
        assert task.base_model.backbone is network
    before = networks[1].linear.weight.clone()
    with pytest.raises(UserError, match=r"names code of its own.* \(in Python trust=True\)"):
        selftask.load(tmp_path / "0")
    loaded = selftask.load(tmp_path / "0", trust=True).backbone
    assert torch.equal(
        loaded.linear.weight, tasks[0].loss.export_backbone(tasks[0].base_model).linear.weight
    )
    assert torch.equal(networks[1].linear.weight, before)


def test_task_of_batches_resumes_bit_for_bit(tmp_path: Path, forget_names: None) -> None:
    """In the middle of the second epoch: the same batches from there on."""
    selftask.Trainer().train(task_of_batches(tmp_path / "whole"))
    with pytest.raises(Interrupted):
        selftask.Trainer().train(task_of_batches(tmp_path / "parts", **{"train.stop_at": 7}))
    selftask.Trainer().train(task_of_batches(tmp_path / "parts"))
    whole, parts = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert tiny.differences(whole, parts) == []


READ: list[int] = []  # by the data set, in this process


class Noisy(torch.utils.data.Dataset[int]):
    """Numbers of images, which are drawn when they are read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        READ.append(index)
        return index


def noisy_views(indices: list[int]) -> list[torch.Tensor]:
    """The user's ``collate_fn``: two views, drawn by three global generators."""
    shift = random.random() + float(np.random.rand())
    means = torch.tensor(indices).view(-1, 1, 1, 1) / 40 + shift
    return [means + torch.randn(len(indices), 3, 8, 8) for _ in range(2)]


class Blocks(torch.utils.data.Sampler[list[int]]):
    """The user's ``batch_sampler``: blocks of eight in an order of the epoch; it can seek."""

    def __init__(self) -> None:
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return 5

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def seek(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(5, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from ([*range(8 * n, 8 * n + 8)] for n in order[self.start :])


def plain_views(indices: list[int]) -> list[torch.Tensor]:
    """Two views that are functions of the image."""
    rows = [torch.Generator().manual_seed(index) for index in indices]
    views = torch.stack([torch.randn(2, 3, 8, 8, generator=row) for row in rows], dim=1)
    return list(views)


def start_worker(number: int) -> None:
    Path(os.environ["STARTED"]).joinpath(str(number)).touch()


def loader_of(kind: str) -> Any:
    if kind == "blocks":
        return torch.utils.data.DataLoader(Noisy(), batch_sampler=Blocks(), collate_fn=plain_views)
    workers: Any = {"num_workers": 2, "worker_init_fn": start_worker} if kind == "workers" else {}
    return torch.utils.data.DataLoader(
        Noisy(), batch_size=8, shuffle=True, collate_fn=noisy_views, **workers
    )


@pytest.mark.parametrize("kind", ["shuffled", "workers", "blocks"])
def test_a_loader_of_ones_own_resumes_bit_for_bit(
    kind: str,
    tmp_path: Path,
    forget_names: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the second epoch, although the stopped process drew other numbers."""
    monkeypatch.setenv("STARTED", str(tmp_path))

    def run(out: str, **more: Any) -> None:
        every = {"train.log_every": 1, **more}
        task = task_of_batches(tmp_path / out, batches=loader_of(kind), **every)
        selftask.Trainer().train(task)

    run("whole")
    with pytest.raises(Interrupted):
        run("parts", **{"train.stop_at": 7})
    READ.clear()
    run("parts")
    whole, parts = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert tiny.differences(whole, parts) == []
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert ("the first 2 of epoch 1 are read again" in log) is (kind != "blocks")
    if kind == "workers":
        assert [(tmp_path / name).exists() for name in "012"] == [True, True, False]
    else:  # besides the batch that shape and number of views are taken from
        assert len(READ) == 8 + 8 * (3 if kind == "blocks" else 5)
    losses = {row["loss"] for row in tiny.rows(tmp_path / "whole") if "loss" in row}
    assert len(losses) == 10 or kind == "blocks"


def test_learner_is_the_task(tmp_path: Path, forget_names: None) -> None:
    """A plain loop over the same batches gives the same losses, also from a saved state."""
    plain = {"optimizer.schedule": "constant", "optimizer.warmup": 0, "optimizer.weight_decay": 0}
    task = task_of_batches(tmp_path / "run", **plain)
    expected = [float(task.last_batch.loss) for _ in task.steps()]
    start = task_of_batches(tmp_path / "start", **plain)
    start.prepare()
    start.close()

    def build() -> selftask.Learner:
        more = {"num_images": 40, "queue_size": 16}
        return selftask.Learner("moco", Flat(), steps=10, batch_size=8, **more)

    learner = build()
    learner.network.load_state_dict(start.base_model.state_dict())
    learner.method.load_state_dict(start.loss.state_dict())
    optimizer = torch.optim.SGD(learner.network.parameters(), lr=0.1, momentum=0.9)
    actual = []
    for views in batches() * 2:
        other = build()
        other.load_state_dict(learner.state_dict())
        loss = learner(views)
        assert other(views).item() == loss.item()
        optimizer.zero_grad()
        loss.backward()
        learner.after_backward()
        optimizer.step()
        learner.update()
        actual.append(loss.item())
    assert actual == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 10
    assert learner.get_extra_state() == {"steps": 10}
