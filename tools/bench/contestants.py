"""Trainers for the models of ``step_overhead.py``: a bare loop, selftask and others."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from small_models import Model, Stamped

from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source
from selftask.logs.lines import start_log, stop_log
from selftask.task import Task
from selftask.task.loop import train_loop

LR, MOMENTUM = 0.01, 0.9


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=True)


def run_bare(model: Model, batches: Stamped, log_every: int) -> None:
    """Train in a bare loop, the reference of the comparison."""
    network = model.build()
    optimizer = _optimizer(network.parameters())
    for step, (views, target) in enumerate(batches):
        loss = model.loss(network(views), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % log_every == 0:
            loss.item()


class _Terminal(io.StringIO):
    """A stream that selftask treats as a terminal, on which it draws its progress bar."""

    def isatty(self) -> bool:
        return True


def run_selftask(
    model: Model,
    batches: Stamped,
    log_every: int,
    *,
    terminal: type[io.StringIO] = _Terminal,
    step: str = "standard",
) -> None:
    """Train with selftask's trainer, a train step and default hooks, with images in memory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(terminal()):
        out = Path(folder) / "run"
        out.mkdir()
        train_in_memory(
            _selftask_config(model, Path(folder), out, batches.steps, log_every, step), batches
        )


def train_in_memory(config: Config, batches: Stamped) -> Task:
    """Train with selftask on batches in memory, in the run folder of ``config``."""
    start_log(Path(config.out), rank=0)
    try:
        task = _TaskInMemory(config, sources=Sources(_Images(config, batches.steps), None))
        task.stamped = batches
        train_loop(task)
        return task
    finally:
        stop_log()


def _selftask_config(
    model: Model, folder: Path, out: Path, steps: int, log_every: int, step: str
) -> Config:
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"data: digits\n"
        f"views: {{main: {{count: {model.num_views}, transforms: [normalize]}}}}\n"
        f"eval: {{transforms: [normalize]}}\n"
        f"backbone: {model.backbone}\n"
        f"method: {model.method}\n"
        f"train: {{max_steps: {steps}, batch_size: {model.batch_size}, log_every: {log_every}}}\n"
        f"optimizer: {{name: sgd, lr: {LR}, sgd_momentum: {MOMENTUM}}}\n"
    )
    more = [f"out={out}", "train.device=cpu", "train.threads=1", f"train.step={step}"]
    return load_config(str(recipe), more)


class _TaskInMemory(Task):
    """A task with the batches of the benchmark."""

    stamped: Stamped

    def prepare(self, *args: Any) -> None:
        super().prepare(*args)
        self.data_module.train_batches = self._stamped  # type: ignore[method-assign]

    def _stamped(self, first: int) -> Iterator[Batch]:
        pool = [labels for _, labels in self.stamped.pool]
        keys = [torch.stack([labels, torch.arange(len(labels))], dim=1) for labels in pool]
        for number, (views, labels) in enumerate(self.stamped):
            if not isinstance(views, dict):
                views = {"main": views if isinstance(views, list) else [views]}
            key = keys[number % len(keys)]  # in memory, as the views
            rows = {"labels": labels, "index": labels, "key": key, "draws": self.stamped.draws}
            yield Batch(views=views, number=number, **rows)


class _Images(Source):
    """A source with the number of images of a benchmark's epoch; images cannot be read."""

    def __init__(self, config: Config, steps: int) -> None:
        self.length = config.train.batch_size * steps
        self.labels = np.arange(self.length) % 10

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise AssertionError("the batches are in memory")

    def path(self, index: int) -> str:
        return f"image {index}"

    def describe(self) -> str:
        return f"{self.length} images"


def run_classy(model: Model, batches: Stamped, log_every: int) -> None:
    """Train with Classy Vision's LocalTrainer and ClassificationTask, without hooks."""
    losses = importlib.import_module("classy_vision.losses")
    models = importlib.import_module("classy_vision.models")
    optim = importlib.import_module("classy_vision.optim")
    tasks = importlib.import_module("classy_vision.tasks")
    trainer = importlib.import_module("classy_vision.trainer")

    class Loss(losses.ClassyLoss):  # type: ignore[misc, name-defined]
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return model.loss(output, target)

    class SGD(optim.ClassyOptimizer):  # type: ignore[misc, name-defined]
        def prepare(self, groups: Any) -> None:
            self.optimizer = _optimizer(groups)

    class Task(tasks.ClassificationTask):  # type: ignore[misc, name-defined]
        def get_batchsize_per_replica(self) -> int:
            return model.batch_size

        def build_dataloaders_for_current_phase(self) -> None:
            self.dataloader = [{"input": x, "target": y} for x, y in ()]

        def create_data_iterators(self) -> None:
            self.data_iterator = ({"input": x, "target": y} for x, y in batches)

        @property
        def num_batches_per_phase(self) -> int:
            return batches.steps

    task = Task()
    task.set_dataset(_ClassyImages(model.batch_size * batches.steps), "train")
    task.set_model(models.ClassyModel.from_model(model.build())).set_loss(Loss())
    task.set_optimizer(SGD()).set_num_epochs(1)
    task.set_optimizer_schedulers({"lr": LR})
    trainer.LocalTrainer().train(task)


class _ClassyImages:
    """The part of a data set that Classy's task needs; no images are read."""

    def __init__(self, num_images: int) -> None:
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images

    def get_batchsize_per_replica(self) -> int:
        return 1

    get_global_batchsize = get_batchsize_per_replica


def run_lightning(
    model: Model, batches: Stamped, log_every: int, *, log_loss: bool = False
) -> None:
    """Train with Lightning's Trainer, without logger, checkpoints, progress bar or summary."""
    lightning = load_lightning()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = model.build()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = model.loss(self.network(batch[0]), batch[1])
            if log_loss:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self.parameters())

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=log_every,
    )
    trainer.fit(Module(), batches)


def run_lightning_log(model: Model, batches: Stamped, log_every: int) -> None:
    """Train with Lightning and one ``self.log`` per step, as is common in recipes."""
    run_lightning(model, batches, log_every, log_loss=True)


def load_lightning() -> Any:
    try:
        return importlib.import_module("lightning.pytorch")
    except ImportError:
        return importlib.import_module("pytorch_lightning")


Entry = Callable[[Model, Stamped, int], None]
ENTRIES: dict[str, Entry] = {
    "bare loop": run_bare,
    "selftask": run_selftask,
    "selftask without bar": partial(run_selftask, terminal=io.StringIO),
    "selftask compiled": partial(run_selftask, step="compiled"),
    "classy LocalTrainer": run_classy,
    "lightning": run_lightning,
    "lightning + self.log": run_lightning_log,
}
