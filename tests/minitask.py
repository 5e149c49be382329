"""A task in miniature: the registered train steps and one method, on data held in memory.

No config, files or logs, a network without BatchNorm and double precision throughout, so that what
a method does over some steps can be compared to 1e-9, between rank counts among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from selftask.batch import Batch, total
from selftask.config.run_length import Clock, RunLength
from selftask.config.schema import CompileConfig
from selftask.distributed.collectives import all_reduce_mean, rank, world_size
from selftask.hooks.base import defines
from selftask.methods.base import Method
from selftask.models.features.tokens import Features, Request, from_sequence
from selftask.models.network import PatchOutput
from selftask.optim.param_groups import frozen_until
from selftask.registry import METHODS, TRAIN_STEPS
from selftask.task.frozen import FrozenParameters

NUM_IMAGES = 24


class TinyBackbone(nn.Module):
    """Images of any size -> 6 features."""

    embed_dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(self.conv(images)).mean(dim=(2, 3))


class TinyTokens(nn.Module):
    """Images of 9 pixels -> 3x3 patches of 3 pixels, and of 6 pixels -> 2x2; 6 features."""

    embed_dim = mask_dim = 6
    offers = ("tokens", "dense")
    patch_size = (3, 3)

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 3, stride=3)
        self.mix = nn.Linear(6, 6)

    def extract(self, images: Tensor, **options: Any) -> Features:
        x = self.patch(images)
        grid = x.shape[2:]
        x = Request(**options).replace_masked(x.flatten(2).transpose(1, 2))
        x = torch.tanh(self.mix(x + x.mean(dim=1, keepdim=True)))
        return Features(x.mean(dim=1), from_sequence(x, 0, tuple(grid)), {})


class MiniTask:
    """What a train step and a method ask of a task, and nothing else.

    The data set are 24 images in four kinds, as ``views`` of the given sizes; batch k of an epoch
    is rows k * batch_size onwards, and this rank has its contiguous part.
    """

    should_log = True

    def __init__(
        self,
        method: str | type[Method],
        config: dict[str, Any],
        *,
        backbone: Callable[[], nn.Module] = TinyBackbone,
        sizes: tuple[int, ...] = (8, 8),
        batch_size: int = 8,
        epochs: int = 3,
        accumulate: int = 1,
        lr: float = 0.5,
        step: str | Callable[[Any], None] = "standard",
    ) -> None:
        torch.manual_seed(0)
        if accumulate > 1:
            step = "accumulate"
        self.train_step = TRAIN_STEPS[step] if isinstance(step, str) else step
        options = CompileConfig(backend="eager")
        train = SimpleNamespace(seed=0, accumulate=accumulate, compile_options=options)
        views = {"main": SimpleNamespace(count=len(sizes), of=None, images=[None])}
        self.config = SimpleNamespace(train=train, views=views, init=SimpleNamespace(backbone=None))
        self.length = RunLength(
            num_samples=NUM_IMAGES, batch_size=batch_size, accumulate=accumulate, epochs=epochs
        )
        self.clock = Clock(self.length)
        self.data_module = SimpleNamespace(
            num_images=NUM_IMAGES, channels=3, iterate_all=self.iterate_all
        )
        self.views = make_views(sizes)
        self.train, self.device = True, torch.device("cpu")
        method = METHODS[method] if isinstance(method, str) else method
        self.loss = method(method.Config(**config))
        self.base_model = self.model = self.loss.build_network(backbone(), self).double()
        self.loss.setup(self)
        self.loss.double()
        parameters = [*self.base_model.parameters(), *self.loss.parameters()]
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = _SGD(self.parameters, lr=lr)
        modules = [("network", self.base_model), ("loss", self.loss)]
        self.frozen = FrozenParameters(frozen_until(modules, self.loss.group_rules(), self.length))
        self.calls = {
            "on_forward": [self.loss.on_forward] if defines(self.loss, "on_forward") else []
        }
        self.grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.losses: list[float] = []
        self.grads: list[list[Tensor | None]] = []  # of each update, reduced
        self.logged: dict[str, Any] = {}

    # -- what happens to it --------------------------------------------------------------------

    def run(self, updates: int) -> MiniTask:
        """So many updates; a phase starts with each epoch, and with each call, as on a resume."""
        self.loss.on_phase_start(self)
        for update in range(updates):
            if update and self.clock.batch_in_epoch == 0:
                self.loss.on_phase_start(self)
            self.batches = self.rest_of_epoch()
            self.train_step(self)
        return self

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint would hold of it, and what it showed on the way."""
        return {
            "network": self.base_model.state_dict(),
            "method": self.loss.state_dict(),
            "clock": self.clock.state_dict(),
            "losses": self.losses,
            "grads": self.grads,
        }

    def resume(self, state: dict[str, Any]) -> MiniTask:
        """Go on from the ``state`` of another one."""
        self.base_model.load_state_dict(state["network"])
        self.loss.load_state_dict(state["method"])
        self.clock.load_state_dict(state["clock"])
        return self

    def rest_of_epoch(self) -> Iterator[Batch]:
        size, mine = self.length.batch_size, self.length.batch_size // world_size()
        for batch in range(self.clock.batch_in_epoch, self.length.batches_per_epoch):
            first = batch * size + rank() * mine
            yield self.batch(torch.arange(first, first + mine))

    def iterate_all(self) -> Iterator[Batch]:
        """This rank's part of all images, in batches of which the last is smaller."""
        for index in torch.arange(NUM_IMAGES).tensor_split(world_size())[rank()].split(5):
            yield self.batch(index)

    def batch(self, index: Tensor) -> Batch:
        batch = Batch(
            views={"main": [view[index] for view in self.views]},
            labels=self.labels(index),
            index=index,
            key=torch.stack([torch.full_like(index, self.clock.epoch), index], dim=1),
            number=self.clock.batch,
        )
        self.loss.prepare_batch(batch, self)
        return batch

    def labels(self, index: Tensor) -> Tensor:
        return torch.full_like(index, -1)

    def forward(self, index: Tensor, images: Tensor | None = None) -> Batch:
        """The batch of these images, after network and hook, before the loss."""
        batch = self.last_batch = self.batch(index)
        if images is not None:
            batch.views = {"main": [images]}
            batch.input = (images, *batch.input[1:])
        batch.output = self.base_model(batch.input)
        self.loss.on_forward(self)
        return batch

    # -- what the step and the method ask ------------------------------------------------------

    @property
    def where(self) -> float:
        return self.clock.where

    @property
    def steps_done(self) -> int:
        return self.clock.steps_done

    @property
    def batches_left(self) -> int:
        return self.length.batches_per_epoch - self.clock.batch_in_epoch

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update_meters(self, batch: Batch) -> None: ...

    def log(self, name: str, value: Any) -> None:
        self.logged[name] = value

    def run_hooks(self, point: str) -> None:
        if point == "on_loss_and_meter":
            self.losses.append(float(self.last_batch.loss))
        getattr(self.loss, point)(self)
        if point == "on_backward":
            self.grads.append([None if p.grad is None else p.grad.clone() for p in self.parameters])

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = all_reduce_mean(parameter.grad)
        self.frozen.drop_gradients(self.steps_done)

    def advance(self, batches: int = 1) -> None:
        self.clock.steps_done += 1
        self.clock.batch += batches


class _SGD(torch.optim.SGD):
    def step(self, closure: None = None, *, where: float = 0.0) -> None:  # type: ignore[override]
        super().step()


_NONE = torch.empty(0, dtype=torch.int64)


def loss_of(
    method: Method, output: Tensor, *, labels: Tensor = _NONE, index: Tensor = _NONE, **added: Any
) -> Tensor:
    """The loss of an output alone, with what hooks would have added to the batch."""
    batch = Batch(views={}, labels=labels, index=index, key=_NONE, output=output, added=added)
    return total(method(output, batch))


def predicted(prediction: Any, features: Any = None) -> PatchOutput:
    """Output of a network of patches whose features no term of the loss uses."""
    return PatchOutput(prediction, features)


def make_views(sizes: tuple[int, ...]) -> list[Tensor]:
    """Views (24, 3, size, size) of images of four kinds; the same in every process."""
    draws = torch.Generator().manual_seed(7)
    kinds = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=draws)
    images = kinds[torch.arange(NUM_IMAGES) % 4]
    views = []
    for size in sizes:
        crop = images[:, :, :size, :size]
        views.append(crop + 0.5 * torch.randn(crop.shape, dtype=torch.float64, generator=draws))
    return views


def largest_difference(a: Any, b: Any) -> float:
    """Between two nested states of the same shape; integers and None must be equal."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max((largest_difference(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        return max((largest_difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, Tensor) and a.is_floating_point():
        return float((a - b).abs().max()) if a.numel() else 0.0
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
        return 0.0
    if isinstance(a, float):
        return abs(a - b)
    assert a == b
    return 0.0
