"""What ``step_overhead.py`` compares: models, batches that note the time, and who trains them."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask import logs
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source
from selftask.methods.simclr import info_nce
from selftask.models.heads import mlp
from selftask.registry import register_backbone
from selftask.task import Task
from selftask.task.loop import train_loop

LR, MOMENTUM = 0.01, 0.9
WARM_UP = 20  # steps of each turn that do not count


# -- what is trained --------------------------------------------------------------------------


class Tiny(nn.Module):
    """3072 -> 16 features: so small that all there is to see is overhead."""

    embed_dim = 16

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3072, 16)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.linear(images.flatten(1)))


class Conv(nn.Module):
    """Images of 32 pixels -> 32 features by two convolutions of stride 4."""

    embed_dim = 32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 32, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images)))).mean(dim=(2, 3))


@register_backbone("bench_tiny")
@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """The backbone of the MLP."""

    def build(self) -> nn.Module:
        return Tiny()


@register_backbone("bench_conv")
@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """The small convolutional backbone."""

    def build(self) -> nn.Module:
        return Conv()


@register_backbone("bench_vit")
@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The small transformer."""

    def build(self) -> nn.Module:
        return _vit_tiny()


@dataclass(frozen=True)
class Model:
    """One thing to train, in the bare loop's words and in selftask's."""

    about: str
    backbone: str  # selftask's name
    method: str  # supervised: one view; simclr: two
    batch_size: int
    steps: int  # of one turn

    @property
    def num_views(self) -> int:
        return 2 if self.method == "simclr" else 1

    def build(self) -> nn.Module:
        """What selftask builds for that method, as any script would write it."""
        if self.method == "supervised":
            return nn.Sequential(Tiny(), nn.Linear(Tiny.embed_dim, 10))
        backbone = _BUILD[self.backbone]()
        dim = backbone.embed_dim
        return TwoViews(backbone, mlp(dim, dim, 128, last_norm=True, bias=False, last_bias=False))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The same loss function for everybody."""
        if self.method == "supervised":
            return F.cross_entropy(output, target)
        return info_nce(*output.chunk(2), temperature=0.1)

    def batches(self) -> list[dict[str, Any]]:
        """Eight batches, gone through again and again."""
        draws = torch.Generator().manual_seed(0)
        size = (self.batch_size, 3, 32, 32)
        return [
            {
                "views": [torch.randn(size, generator=draws) for _ in range(self.num_views)],
                "target": torch.randint(0, 10, (self.batch_size,), generator=draws),
            }
            for _ in range(8)
        ]


MODELS = {
    "mlp": Model("MLP 3072-16-10, batch 32, cross-entropy", "bench_tiny", "supervised", 32, 800),
    "conv": Model("two convolutions, SimCLR, 2 x 64 of 32x32", "bench_conv", "simclr", 64, 120),
    "resnet18": Model("ResNet-18, SimCLR, 2 x 64 of 32x32", "resnet18", "simclr", 64, 7),
    "vit_tiny": Model("ViT-tiny/4, SimCLR, 2 x 32 of 32x32", "bench_vit", "simclr", 32, 7),
}


class TwoViews(nn.Module):
    """Both views in one pass, (2B, D)."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: list[Tensor]) -> Tensor:
        output: Tensor = self.head(self.backbone(torch.cat(views)))
        return output


def _resnet18() -> Any:
    import torchvision

    model = torchvision.models.resnet18()
    model.fc, model.embed_dim = nn.Identity(), 512
    return model


def _vit_tiny() -> Any:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=0)
    model.embed_dim = model.num_features
    return model


_BUILD = {"bench_conv": Conv, "resnet18": _resnet18, "bench_vit": _vit_tiny}


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=True)


# -- the time of each step --------------------------------------------------------------------


class Stamped:
    """``steps`` batches as pairs (input, target); notes wall and CPU time at each request."""

    def __init__(self, model: Model, steps: int) -> None:
        self.pool = [_pair(model, sample) for sample in model.batches()]
        self.steps = steps
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for step in range(self.steps):
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())
            yield self.pool[step % len(self.pool)]

    def step_times(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of wall and of CPU of the steps that count."""
        skip = min(WARM_UP, self.steps // 4)
        return np.diff(self.wall)[skip:], np.diff(self.cpu)[skip:]


def _pair(model: Model, sample: dict[str, Any]) -> tuple[Any, Tensor]:
    views = sample["views"]
    return (views[0] if model.num_views == 1 else views), sample["target"]


# -- the bare loop and the trainers -----------------------------------------------------------


def run_bare(model: Model, batches: Stamped, log_every: int) -> None:
    """What everybody is compared with."""
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
    """What a run takes for a terminal, on which it draws its bar."""

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
    """Its trainer, a train step and default hooks, as on a terminal; images are in memory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(terminal()):
        out = Path(folder) / "run"
        out.mkdir()
        config = _selftask_config(model, Path(folder), out, batches.steps, log_every, step)
        logs.start_log(out, rank=0)
        try:
            task = _TaskInMemory(config, sources=Sources(_Images(config, batches.steps), None))
            task.stamped = batches
            train_loop(task)
        finally:
            logs.stop_log()


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
    """A task whose feed gives the batches of the benchmark."""

    stamped: Stamped

    def prepare(self, *args: Any) -> None:
        super().prepare(*args)
        self.data_module.train_batches = self._stamped  # type: ignore[method-assign]

    def _stamped(self, first: int) -> Iterator[Batch]:
        for number, (views, labels) in enumerate(self.stamped):
            views = {"main": views if isinstance(views, list) else [views]}
            yield Batch(views=views, labels=labels, index=labels, key=labels, number=number)


class _Images(Source):
    """As many images as one epoch of the benchmark takes; none is ever read."""

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
    """Classy Vision's LocalTrainer and ClassificationTask without hooks."""
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
    """What Classy's task asks of a data set it does not read from."""

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
    """Lightning's Trainer without logger, checkpoints, bar or summary."""
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
    """The same with one ``self.log`` a step, as every recipe has."""
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
