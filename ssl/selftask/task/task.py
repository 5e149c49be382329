"""The task: all parts of a run, and the interface of train steps and hooks.

``prepare`` builds process group, data, backbone with its initial weights, network, ``setup`` of
the method, optimizer and hooks, in this order. A checkpoint is loaded last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selftask import classy
from selftask.batch import Batch
from selftask.classy import ClassyTaskNames
from selftask.config.load import to_yaml
from selftask.config.run_length import Clock, RunLength
from selftask.config.schema import Component, Config
from selftask.data.fingerprint import check_same_on_all_ranks
from selftask.data.loading.data_module import DataModule
from selftask.data.loading.open_data import Sources, open_data
from selftask.distributed import device, process_group
from selftask.distributed.collectives import broadcast_buffers, broadcast_module, is_primary
from selftask.distributed.heartbeat import HEARTBEAT
from selftask.distributed.world import read_world
from selftask.errors import UserError
from selftask.hooks.base import POINTS, defines
from selftask.logs import MetricsFile, format_row, get_logger
from selftask.models.build import build_backbone, check_offers, check_sizes
from selftask.models.dropout import draw_per_sample
from selftask.models.summary import opening_lines
from selftask.models.teacher import Teacher
from selftask.models.weights.model_source import load_init
from selftask.optim.build import build_optimizer
from selftask.parallel.build import build_reduction, save_activations, synchronize
from selftask.random import process_state
from selftask.random.keyed import LAYER_DRAWS
from selftask.registry import HOOKS, METERS, METHODS, TRAIN_STEPS, Registry
from selftask.task import task_state

log = get_logger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FULL_PRECISION: AbstractContextManager[None] = nullcontext()


class Task(ClassyTaskNames):
    """Model, loss, meters, optimizer and hooks of one run; also usable by Classy's trainers.

    Args:
        config: The config of the run.
        sources: Opened data; None opens what ``config.data`` names.
    """

    def __init__(self, config: Config, *, sources: Sources | None = None) -> None:
        super().__init__()
        self.config = config
        self.sources = sources
        self.out = config.out_folder
        self.world = read_world()
        self.device = device.pick_device(config.train.device, self.world)
        self.evaluate: Callable[[Task], dict[str, float]] | None = None  # set by the launcher
        self.before_export: list[Callable[[nn.Module], nn.Module]] = []  # return a changed copy
        self._low_precision = _DTYPES.get(config.train.precision)  # None: float32
        self.train_step_function: Callable[[Task], None] = TRAIN_STEPS[config.train.step]
        self.train = True
        self.scalars: dict[str, Any] = {}  # values for the next row of the log
        self.losses: list[Tensor] = []  # of this phase; stay on the device
        self.interrupted_by: str | None = None  # stop reason; stops after this step
        self.last_row: dict[str, Any] = {}  # of metrics.jsonl
        self._calls: dict[str, list[Callable[[Task], None]]] = {}  # hook point -> methods of hooks
        self.saved: tuple[int, int] | None = None  # step and phase of the newest checkpoint
        self.checkpoints = task_state.open_writer(config, self.out)

    @classmethod
    def from_config(cls, config: Config) -> Task:  # type: ignore[override]
        return cls(config)

    # -- building -------------------------------------------------------------------------------

    def prepare(self, num_dataloader_workers: int = 0, dataloader_mp_context: Any = None) -> None:
        """Build every part, then load the checkpoint to resume from, if any.

        The arguments are those of Classy's interface and are ignored; see ``data.num_workers``.
        """
        train = self.config.train
        process_group.join_world(self.world, self.device)
        process_state.seed_all(train.seed, rank=0)  # equal initial weights on every rank
        self.out.mkdir(parents=True, exist_ok=True)
        sources = self.sources or open_data(self.config.data)
        check_same_on_all_ranks(sources.train, "data")
        check_same_on_all_ranks(sources.val, "data.val")
        self.data_module = DataModule(self.config, sources, self.world, self.device)
        self.length = RunLength.of(train, self.data_module.num_samples)
        self.clock = Clock(self.length)
        self._build_model()
        self._build_optimizer()
        self._build_hooks()
        channels = self.data_module.channels
        for line in opening_lines(self.config, self.base_model, self.loss, channels):
            log.info("%s", line)
        process_state.seed_all(train.seed, self.world.rank)
        self.rows = MetricsFile(self.out / "metrics.jsonl") if is_primary() else None
        self.resumed = task_state.resume(self)
        self.batches: Iterator[Batch] = iter(())

    def _build_model(self) -> None:
        config = self.config
        backbone = build_backbone(config.backbone, self.data_module.channels)
        check_sizes(backbone, config)
        check_offers(backbone, config)
        load_init(backbone, config)
        method = METHODS[config.method.name]
        self.loss = method(method.Config(**config.method.args))
        self.base_model = self.loss.build_network(backbone, self).to(self.device)
        synchronize(config.parallel, [self.base_model, self.loss])
        self.loss.setup(self)
        self.loss.to(self.device)
        draw_per_sample([self.base_model, self.loss], config.train.seed)
        for module in (self.base_model, self.loss):
            broadcast_module(module)
        self.activations = save_activations(config.parallel, self.base_model)
        self._distribute()

    def _distribute(self) -> None:
        """Shard or wrap the network as ``parallel`` requests; compile it if requested."""
        config = self.config
        self.reduction = build_reduction(config.parallel, self._low_precision)
        teachers = [part.network for part in self.loss.modules() if isinstance(part, Teacher)]
        self.networks = [self.base_model, *teachers]
        self.reduction.shard(self.networks)
        called: Any = torch.compile(self.base_model) if config.train.compile else self.base_model
        self.model = self.reduction.wrap(called)

    def _build_optimizer(self) -> None:
        train = self.config.train
        self.trained = [("network", self.base_model), ("loss", self.loss)]
        batch = train.batch_size * train.accumulate
        self.optimizer = build_optimizer(
            self.config.optimizer,
            self.trained,
            self.length,
            batch=batch,
            regroup=self.reduction.regroup,
        )
        self.grad_scaler = torch.amp.GradScaler(
            self.device.type, enabled=train.precision == "float16"
        )
        trained = {p for group in self.optimizer.param_groups for p in group["params"]}
        named = chain.from_iterable(module.named_parameters(name) for name, module in self.trained)
        self.reduction.register([(name, p) for name, p in named if p in trained])

    def _build_hooks(self) -> None:
        self.named_hooks = {k: _build(HOOKS, c, self.out) for k, c in self.config.hooks.items()}
        self.meters = [_build(METERS, c, self.out) for c in self.config.meters.values()]
        if self.meters and not self.loss.outputs_logits:
            raise UserError(
                f"meters ({', '.join(self.config.meters)}) look at class scores, and "
                f"method.name={self.config.method.name} gives none; see eval.evaluations"
            )
        ranked = sorted(self.named_hooks.values(), key=lambda hook: getattr(hook, "priority", 50))
        self.hooks = [self.loss, *ranked]
        self._calls = {
            point: [getattr(hook, point) for hook in self.hooks if defines(hook, point)]
            for point in POINTS
        }

    # -- for train steps and hooks --------------------------------------------------------------

    @property
    def where(self) -> float:
        """Training progress in [0, 1)."""
        return self.clock.where

    @property
    def steps_done(self) -> int:
        """Number of finished steps."""
        return self.clock.steps_done

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of ``train.precision``; it has no effect in float32."""
        if self._low_precision is None:
            return _FULL_PRECISION
        return torch.autocast(self.device.type, self._low_precision)

    def update_meters(self, batch: Batch) -> None:
        """Update the meters with output and labels in a test phase; do nothing in training."""
        if not self.train:
            for meter in self.meters:
                meter.update(batch.output.detach(), batch.labels)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context without gradient reduction, for all batches of a step but the last."""
        return self.reduction.no_sync()

    def reduce_gradients(self) -> None:
        """Average gradients over ranks, as far as the backward pass has not done so."""
        self.reduction.reduce()
        self.activations.finalize()

    def export_backbone(self) -> nn.Module:
        """Return the trained backbone, unsharded; every rank must call this method."""
        backbone = self.loss.export_backbone(self.base_model)
        broadcast_buffers(backbone)
        backbone = self.reduction.unsharded(
            backbone, lambda: build_backbone(self.config.backbone, self.data_module.channels)
        )
        for change in self.before_export:
            backbone = change(backbone)
        return backbone

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to every rank, in the network and its teachers.

        BatchNorm's running statistics differ between ranks during training; those of rank 0 are
        evaluated, exported and saved. Every rank must call this method.
        """
        for network in self.networks:
            broadcast_buffers(network)

    def advance(self, batches: int = 1) -> None:
        """Count one finished step of ``batches`` batches."""
        self.clock.steps_done += 1
        self.clock.batch += batches
        HEARTBEAT.step = self.clock.steps_done

    def run_hooks(self, point: str) -> None:  # type: ignore[override]
        """Call every hook that defines ``point``, the method first."""
        for call in self._calls.get(point, ()):
            call(self)

    def log(self, name: str, value: Any) -> None:
        """Add ``value``, a number or scalar tensor, to the next log row; does not synchronize."""
        self.scalars[name] = value

    def write_row(self, row: dict[str, Any]) -> None:
        """Write ``row``, with step and epoch, to the log and to ``metrics.jsonl``."""
        epoch = round(self.clock.batch / self.length.batches_per_epoch, 4)
        self.last_row = {"step": self.steps_done, "epoch": epoch, **row}
        if self.rows is not None:
            self.rows.write(self.last_row)
            log.info("%s", format_row(self.last_row))

    def pop_scalars(self) -> dict[str, float]:
        """Return and clear the values passed to ``log``; synchronizes with the device."""
        row = {name: float(value) for name, value in self.scalars.items()}
        self.scalars.clear()
        return row

    @property
    def should_log(self) -> bool:
        """True if this step is logged; compute expensive metrics only then."""
        done = self.clock.steps_done + 1
        return done % self.config.train.log_every == 0 or done == self.length.total_steps

    # -- phases and steps: Classy's interface ---------------------------------------------------

    def done_training(self) -> bool:
        """Return True if no phase remains."""
        return self.clock.done and not self._test_is_next()

    def on_start(self) -> None:
        self.run_hooks("on_start")

    def on_phase_start(self) -> None:
        """Begin a train phase, the rest of one after a resume, or a test phase."""
        self.train, self.phase_begun = not self._test_is_next(), self.clock.phase
        HEARTBEAT.step = self.clock.steps_done
        self.losses.clear()
        self.base_model.train(self.train)
        self.loss.train(self.train)
        if not self.train:
            self.sync_buffers()
        for meter in self.meters:
            meter.reset()
        if self.train and hasattr(self.optimizer, "on_epoch"):
            self.optimizer.on_epoch(self.clock.where_of_epoch)
        left = min(self.batches_left, self.length.total_batches - self.clock.batch)
        self._phase_stop = self.clock.batch + left
        self.batches = self._read_batches()  # reads nothing yet; hooks may wrap it
        self.run_hooks("on_phase_start")

    def step(self) -> None:
        """Call the train step once; raise StopIteration at the end of the phase."""
        if self.phase_begun < 0:
            raise RuntimeError("step() before on_phase_start(); Trainer().train(task) calls both")
        if self.train:
            self.train_step()
        else:
            self.eval_step()
        self.run_hooks("on_step")

    def train_step(self) -> None:
        self.train_step_function(self)

    @torch.no_grad()
    def eval_step(self) -> None:
        """Call the train step, which stops after the loss in a test phase."""
        self.train_step_function(self)

    def on_phase_end(self) -> None:
        """Sum the meters over ranks, and count the phase."""
        if self.train and self.clock.batch != self._phase_stop:
            raise RuntimeError(
                f"the epoch ended at batch {self.clock.batch} of {self._phase_stop}: a train step "
                "has to call task.advance(), and nothing but the data may raise StopIteration in it"
            )
        for key, meter in zip(self.config.meters, self.meters, strict=True):
            meter.sync_state()
            if not self.train:
                for name, value in meter.value.items():
                    self.log(f"test_{key}_{name}", value)
        self.clock.phase += 1
        self.run_hooks("on_phase_end")

    def on_end(self) -> None:
        self.run_hooks("on_end")

    def on_exception(self) -> None:
        """Call every hook's ``on_exception``, even if one of them fails."""
        self.checkpoints.finalize()
        for call in self._calls.get("on_exception", ()):
            try:
                call(self)
            except Exception:
                log.exception("on_exception failed; the error before it is the one that counts")

    def close(self) -> None:
        """Wait for a pending checkpoint, stop the loader's workers and close the files."""
        try:
            self.checkpoints.wait()
        finally:
            for opened in (getattr(self, "data_module", None), getattr(self, "rows", None)):
                if opened is not None:
                    opened.close()

    def _read_batches(self) -> Iterator[Batch]:
        """Yield the prepared batches of this phase, from the clock's position on."""
        first = self.clock.batch
        batches: Iterator[Batch] = (
            islice(self.data_module.train_batches(first), self._phase_stop - first)
            if self.train
            else self.data_module.test_batches()
        )
        prepare = self.loss.prepare_batch
        for batch in batches:
            prepare(batch, self)
            if self.train and LAYER_DRAWS.num_layers:
                LAYER_DRAWS.start(batch.key, self.device)
            yield batch
        LAYER_DRAWS.stop()

    @property
    def batches_left(self) -> int:
        """Number of remaining batches of the epoch."""
        return self.length.batches_per_epoch - self.clock.batch_in_epoch

    @property
    def phase_finished(self) -> bool:
        """True if the last counted step was the last of its train phase."""
        return self.train and (self.clock.batch_in_epoch == 0 or self.clock.done)

    def _test_is_next(self) -> bool:
        return self.has_test_phases and self.clock.phase % 2 == 1

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts, as tensors and plain Python objects."""
        return task_state.take(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of all parts, which must match exactly."""
        task_state.restore(self, state)

    @cached_property
    def config_text(self) -> str:
        """Content of ``config.yaml``; cached, since it takes as long as copying a state."""
        return to_yaml(self.config)

    def save_checkpoint(self) -> None:
        """Save a checkpoint unless this step has one; every rank must call this method."""
        task_state.save(self)


def _build(registry: Registry, component: Component, out: Path) -> Any:
    """Return the hook or meter of that name, from our registry or Classy Vision's."""
    if component.name in registry:
        return registry[component.name](**component.args)
    return classy.build(registry.kind, component.name, component.args, out)
