"""A task without data, on fake tensors (which have shapes but no memory) or on real tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from selftask.batch import Batch
from selftask.config.run_length import Clock, RunLength
from selftask.config.schema import Component, Config, GradScalerConfig, InitConfig
from selftask.distributed.world import World
from selftask.hooks.gradients.trained import parameters_of_optimizers, state_of_optimizers
from selftask.models.build import build_backbone, build_on_meta
from selftask.models.teacher import Teacher
from selftask.models.weights.frozen import Frozen
from selftask.parallel.reduction import Reduction
from selftask.plan.fake_data import FakeData
from selftask.random.keyed import LAYER_DRAWS
from selftask.task import Task

_CPU = torch.device("cpu")
_MOST_BATCHES = 2  # simulated batches of a step with accumulation; later ones equal the second


class FakeTask(Task):
    """A task for single steps of rank 0 among ``config.launch.world_size`` ranks, without data.

    Create and use it within ``SIMULATED.of(...)``. Its only hook is the method.

    Args:
        config: Config of the run.
        data: Fake data.
        mode: Mode for fake tensors, or None for real tensors on ``device``. With a mode, modules
            are built on the meta device, where initialization takes no time. Their tensors then
            become fake CPU tensors, since autocast does not support the meta device.
        device: Device of real tensors.
    """

    def __init__(
        self,
        config: Config,
        data: FakeData,
        mode: FakeTensorMode | None,
        device: torch.device = _CPU,
    ) -> None:
        super().__init__(_reduced(config))
        self.world = World(0, config.launch.world_size, 0, config.launch.processes)
        self.data_module: Any = data
        self.length = RunLength.of(self.config.train, data.num_samples)
        self.clock = Clock(self.length)
        self.mode: Any = mode or nullcontext()
        self.device = torch.device("meta") if mode else device
        if mode:
            chosen = self.config.backbone, data.channels
            self.backbone = build_on_meta(*chosen) or build_backbone(*chosen).to("meta")
        with self.device:
            self.build_model()
        self.device = device
        # reduce nothing; the plan computes the traffic of gradients
        self.reductions = dict.fromkeys(self.reductions, Reduction())
        if mode:
            for module in (self.base_model, self.loss):
                module._apply(lambda tensor: FakeTensor(mode, tensor.detach(), device))
        with self.mode:
            self.build_optimizer()
        self.build_hooks()
        for module in (self.base_model, self.loss):
            module.train()

    @property
    def teachers(self) -> list[nn.Module]:
        """Networks of the method's EMA teachers and frozen models."""
        return [part.network for part in self.loss.modules() if isinstance(part, Teacher | Frozen)]

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Parameters that optimizers update."""
        return parameters_of_optimizers(self)

    @property
    def optimizer_state(self) -> list[Tensor]:
        """Tensors of the state of optimizers."""
        return state_of_optimizers(self)

    def read(self, size: int, steps: int = 1) -> list[Batch]:
        """Set ``batches`` to the batches of the next steps, and return them.

        All steps have the same views. As in a run, the method prepares each batch when the step
        reads it. This is done outside the fake tensor mode, since masks are drawn on the host and
        need values.

        Args:
            size: Number of samples in a batch.
            steps: Number of steps; with accumulation, each has several batches.
        """
        with self.mode:
            number = self.config.train.accumulate
            views = [self.data_module.views(size, self.device) for _ in range(number)]
        batches = [
            self.data_module.batch(dict(of_batch), size, self.device)
            for _ in range(steps)
            for of_batch in views
        ]
        self.batches = self._prepared([*batches])
        return batches

    def _prepared(self, batches: list[Batch]) -> Iterator[Batch]:
        while batches:
            batch = batches.pop(0)  # freed as soon as the next one is read
            with unset_fake_temporarily():
                self.loss.prepare_batch(batch, self)
            if LAYER_DRAWS.num_layers:
                LAYER_DRAWS.start(batch.key, self.device)
            yield batch
        LAYER_DRAWS.stop()


def _reduced(config: Config) -> Config:
    """Return the config without features that a simulated step does not support or need."""
    train, parallel = config.train, config.parallel
    is_compiled = train.step.name == "compiled"
    checkpointing = parallel.activation_checkpointing
    return replace(
        config,
        train=replace(
            train,
            device="cpu",
            step=Component(name="standard") if is_compiled else train.step,
            accumulate=min(train.accumulate, _MOST_BATCHES),
            compile=False,
            on_nan="stop",
            sharded_checkpoints=False,
            grad_scaler=GradScalerConfig(enabled=False),
        ),
        parallel=replace(
            parallel,
            reduce="manual",
            sync_batch_norm="none" if parallel.sync_batch_norm == "none" else "all",
            activation_checkpointing="none" if checkpointing == "none" else "blocks",
        ),
        init=InitConfig(),
        hooks={},
        meters={},
    )
