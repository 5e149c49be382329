"""The task: all parts of a run, and the interface of train steps and hooks.

``prepare`` builds process group, data, backbone with initial weights and network, calls ``setup``
of the method, and builds optimizer and hooks, in this order. A checkpoint is loaded last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.classy import ClassyTaskNames
from selftask.config.load import to_yaml
from selftask.config.run_length import Clock, RunLength
from selftask.config.schema import Config
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import Sources
from selftask.distributed import device, process_group
from selftask.distributed.collectives import is_primary
from selftask.distributed.heartbeat import HEARTBEAT
from selftask.distributed.world import read_world
from selftask.errors import StepSkipped
from selftask.hooks.averages.weight_average import WeightAverage
from selftask.hooks.base import POINTS, WRAPPERS, Hook
from selftask.logs import get_logger
from selftask.logs.rows import MetricsFile
from selftask.models.teacher import Teacher
from selftask.optim.loss_scaler import NoScaler
from selftask.parallel.activation_budget import ActivationBudget
from selftask.parallel.build import save_activations
from selftask.parallel.initial_weights import initial_weights
from selftask.parallel.reduction import Reduction
from selftask.random import process_state
from selftask.registry import register_task
from selftask.task import build, exported, hook_calls, loop, numerics, opening, task_state
from selftask.task.averaged_weights import set_phase_weights
from selftask.task.frozen import FrozenParameters
from selftask.task.rank_agreement import open_same_data
from selftask.task.recorder import Recorder
from selftask.task.scoring import log_meters, score, update_meters
from selftask.task.step_check import StepCheck

log = get_logger(__name__)


@register_task("standard")
class Task(Recorder, ClassyTaskNames):
    """One run and its parts; docs/how-to-own-hook.md lists what is public.

    Args:
        config: The config of the run.
        sources: Opened data; if None, ``config.data`` is opened.
        backbone: The module to train; if None, ``config.backbone`` is built.
    """

    # built by ``prepare``
    data_module: DataModule
    length: RunLength
    clock: Clock
    loss: Any  # the method
    base_model: Any  # the network, neither wrapped nor compiled
    model: Any  # the network as called by train steps
    compiled_whole: bool  # with torch.compile: the network is one graph, not one for each block
    networks: list[nn.Module]  # the network, and teachers that follow it
    trained: list[tuple[str, nn.Module]]  # modules with trained parameters, by name
    activations: ActivationBudget
    reduction: Reduction  # of the network
    optimizer: Any
    optimizers: dict[str, Any]  # others, by name
    frozen: Any  # FrozenParameters
    grad_scaler: NoScaler  # or its subclass LossScaler
    meters: list[Any]
    named_hooks: dict[str, Any]
    hooks: list[Any]  # in calling order, the method first
    meters_in_training: bool  # for hooks of Classy Vision, which print or plot their values

    def __init__(
        self, config: Config, *, sources: Sources | None = None, backbone: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.world = read_world()
        self.device = device.pick_device(config.train.device, self.world)
        self.config = config = numerics.settle_precision(config, self.device, backbone)
        self.sources, self.backbone = sources, backbone
        self.objects: dict[str, Any] = {}  # of the config, by name; set by ``create_task``
        self.init_weights: Mapping[str, Tensor] | None = None  # set by the launcher
        self.out = config.out_folder
        self.opening: dict[str, str] = {}  # entries of the start-up table, set by the launcher
        self.evaluate: Callable[[Task], dict[str, float]] | None = None  # set by the launcher
        self.before_export: list[Callable[[nn.Module], nn.Module]] = []  # each returns a copy
        self.averages: dict[str, WeightAverage] = {}  # weight averages by the keys of their hooks
        self.low_precision = numerics.LOW_PRECISION.get(config.train.precision)  # None: float32
        self.train_step_function = build.train_step(config.train.step)
        self.train = True
        self.losses: list[Tensor] = []  # losses of this phase, on the device
        self.added_hooks: dict[str, Any] = {}  # added by ``add_hook``
        self.exception: BaseException | None = None  # ends the run; for ``on_exception``
        self.interrupted_by: str | None = None  # stop reason; stops after this step
        self.calls: dict[str, list[Callable[[Task], None]]] = {}  # hook point -> methods of hooks
        self.rollbacks = 0  # number of returns to a checkpoint because of NaN
        self.begun_at = 0  # step of the checkpoint that was loaded
        self.resume_from: str | None = None  # overrides ``resume.checkpoint``
        self.saved: tuple[int, int] | None = None  # step and phase of the newest checkpoint
        self.checkpoints = task_state.open_writer(config, self.out)

    @classmethod
    def from_config(cls, config: Config) -> Task:  # type: ignore[override]
        return cls(config)

    # -- building -------------------------------------------------------------------------------

    def prepare(self, num_dataloader_workers: int = 0, dataloader_mp_context: Any = None) -> None:
        """Build all parts, then load the checkpoint to resume from; the arguments are ignored."""
        process_group.join_world(self.world, self.device)
        numerics.agree_on_precision(self)
        train = self.config.train
        process_state.seed_all(train.seed, rank=0)  # equal initial weights on every rank
        self.out.mkdir(parents=True, exist_ok=True)
        sources = open_same_data(self.config, self.sources)
        self.data_module = DataModule(self.config, sources, self.world, self.device)
        self.length = RunLength.of(train, self.data_module.num_samples)
        self.clock = Clock(self.length)
        self.build_model()
        self.build_optimizer()
        self.build_hooks()
        opening.log_parts(self)
        process_state.seed_all(train.seed, self.world.rank)
        self.rows = MetricsFile(self.out / "metrics.jsonl") if is_primary() else None
        self.resumed = task_state.resume(self)
        opening.print_opening(self)
        self.batches: Iterator[Batch] = iter(())

    def build_model(self) -> None:
        """Build method and network, and distribute them over ranks."""
        parallel = self.config.parallel
        initial = initial_weights(parallel, self.device)
        self.loss, self.base_model = build.network(self, initial)
        self.init_weights = None
        self.trained = [("network", self.base_model), ("loss", self.loss)]
        build.set_up_method(self, initial)
        self.activations = save_activations(parallel, self.base_model)
        teachers = [part.network for part in self.loss.modules() if isinstance(part, Teacher)]
        self.networks = [self.base_model, *teachers]
        self.reductions = build.reductions(self, initial)
        self.reduction = self.reductions[None]
        self.model = build.called_network(self)

    def build_optimizer(self) -> None:
        """Build the optimizers, the schedule of frozen parameters and the loss scaler."""
        self.optimizer, self.optimizers = build.optimizers(self)
        self.all_optimizers = [self.optimizer, *self.optimizers.values()]
        settings = [one for optimizer in self.all_optimizers for one in optimizer.settings]
        self.frozen = FrozenParameters((one.frozen_steps, one.parameter.value) for one in settings)
        self.grad_scaler = build.grad_scaler(self)
        self.step_check = StepCheck(self)

    def build_hooks(self) -> None:
        """Build hooks and meters, and collect the functions to call at each point."""
        self.named_hooks = build.hooks(self)
        self.meters = build.meters(self)
        hooks = hook_calls.in_order(self.named_hooks.values())
        self.hooks = [self.loss, *hooks]
        self.meters_in_training = not all(isinstance(hook, Hook) for hook in hooks)
        self.calls = hook_calls.calls(self.hooks, POINTS)
        self._wrappers = hook_calls.calls(self.hooks, WRAPPERS)
        self._reduce = hook_calls.gradient_reductions(self, self._wrappers["wrap_reduction"])

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
        return numerics.autocast(self.device, self.low_precision)

    def score(self, see: Callable[[Batch], None] | None = None) -> dict[str, float]:
        """Return loss and meters on ``data.val``. Collective call; see ``scoring.score``."""
        return score(self, see)

    def update_meters(self, batch: Batch) -> None:
        """Update the meters in a test phase; in training, only for hooks of Classy Vision."""
        if not self.train or self.meters_in_training:
            update_meters(self, batch)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context without gradient reduction, for all batches of a step but the last."""
        return self.reduction.no_sync()

    def reduce_gradients(self, optimizer: str | None = None) -> None:
        """Average an optimizer's gradients over ranks, and drop those of frozen parameters.

        ``optimizer`` is its name in ``self.optimizers``; None for ``self.optimizer``.
        """
        self._reduce[optimizer]()

    def export_backbone(self, student: str | None = None) -> nn.Module:
        """Return a backbone, unsharded; every rank must call it.

        See ``exported.export_backbone``.
        """
        return exported.export_backbone(self, student)

    def sync_buffers(self) -> None:
        """Give every rank equal buffers; every rank must call it. See ``exported.sync_buffers``."""
        exported.sync_buffers(self)

    def advance(self, batches: int = 1) -> None:
        """Count one finished step of ``batches`` global batches."""
        self.clock.advance(batches)
        HEARTBEAT.step = self.clock.steps_done

    def skip_step(self) -> None:
        """Discard gradients and count a skipped step; BatchNorm's statistics may have changed."""
        for optimizer in self.all_optimizers:
            optimizer.zero_grad()
        for reduction in self.reductions.values():
            reduction.discard()
        self.loss.pending.clear()
        self.activations.finalize()
        self.clock.skip(self.last_batch.number + 1 - self.clock.batch)
        HEARTBEAT.step = self.clock.steps_done

    def run_hooks(self, point: str) -> None:  # type: ignore[override]
        """Call every hook that defines ``point``, the method first; UserError if it is unknown."""
        hook_calls.call_hooks(self, point)

    def add_hook(self, hook: Any, name: str | None = None) -> None:
        """Add a hook object to those of the config, before ``prepare``.

        Args:
            hook: The hook, such as ``function_hook(on_step=...)``.
            name: Name under which its state is saved; if None, the name of its class and a number.

        Raises:
            UserError: If the object is not a hook or the name is taken.
        """
        name = name or f"{type(hook).__name__}_{len(self.added_hooks)}"
        build.check_added_hook(hook, name, {**self.config.hooks, **self.added_hooks})
        self.added_hooks[name] = hook

    @property
    def should_log(self) -> bool:
        """True if this step is logged; compute expensive metrics only then.

        After ``advance``, as in ``on_step``, it is about the next step instead.
        """
        done = self.clock.steps_done + 1
        return done % self.config.train.log_every == 0 or done == self.length.total_steps

    def steps(self) -> Iterator[int]:
        """Prepare and train, with all hooks and checkpoints; yield ``steps_done`` after each step.

        The body of ``for step in task.steps(): ...`` may read ``task.last_batch`` and change the
        task. Only ``Trainer`` writes the log file and ``status.json``.
        """
        return loop.iterate_steps(self)

    # -- phases and steps: Classy's interface ---------------------------------------------------

    def done_training(self) -> bool:
        """Return True if no phase remains."""
        return self.clock.done and not self._test_is_next()

    def on_start(self) -> None:
        self.run_hooks("on_start")

    def on_phase_start(self) -> None:
        """Start a train phase (after a resume, its remaining part) or a test phase."""
        self.train, self.phase_begun = not self._test_is_next(), self.clock.phase
        HEARTBEAT.step = self.clock.steps_done
        self.losses.clear()
        self.base_model.train(self.train)
        self.loss.train(self.train)
        if not self.train:
            self.sync_buffers()
        for meter in self.meters:
            meter.reset()
        for optimizer in self.all_optimizers if self.train else ():
            optimizer.on_epoch(self.clock.where_of_epoch)
        self._phase_stop = min(self.clock.batch + self.batches_left, self.length.total_batches)
        self.batches = self._read_batches()  # reads nothing yet
        set_phase_weights(self)
        self.run_hooks("on_phase_start")
        for wrap in self._wrappers["wrap_batches"]:
            self.batches = hook_calls.wrapped_batches(wrap, self, self.batches)

    def step(self) -> None:
        """Call the train step and its hooks once; raise StopIteration at the end of the phase."""
        if self.phase_begun < 0:
            raise RuntimeError("step() before on_phase_start(); Trainer().train(task) calls both")
        if self.train:
            if self.clock.stopped:
                raise StopIteration
            if self.clock.batch < self._phase_stop:  # else the train step raises StopIteration
                self.clock.in_step = True
                self.run_hooks("before_step")
            self.train_step()
        else:
            self.eval_step()
        self.run_hooks("on_step")

    @torch.enable_grad()  # a notebook may have disabled gradients for all of its cells
    def train_step(self) -> None:
        """Call the train step; after ``StepSkipped``, count the step without an update."""
        self.step_check.begin(self)
        try:
            self.train_step_function(self)
        except StepSkipped:
            self.skip_step()
        else:
            self.step_check.end(self)

    @torch.no_grad()
    def eval_step(self) -> None:
        """Call the train step, which stops after the loss in a test phase."""
        self.train_step_function(self)

    def on_phase_end(self) -> None:
        """Sum the meters over ranks, count the phase and call the hooks.

        Raises:
            UserError: If the train step did not use all batches of the phase.
        """
        if self.train and not self.clock.stopped:
            self.step_check.end_phase(self, self._phase_stop)
        log_meters(self)
        if not self.train:
            self.clock.tested = self.clock.batch
        self.clock.phase += 1
        self.run_hooks("on_phase_end")

    def on_end(self) -> None:
        self.run_hooks("on_end")

    def on_exception(self) -> None:
        """Call every hook's ``on_exception`` for the error being handled, even if one fails."""
        self.exception = sys.exc_info()[1]
        self.checkpoints.finalize()
        for call in self.calls.get("on_exception", ()):
            try:
                call(self)
            except Exception:
                log.exception("on_exception failed; the error before it is the one that counts")

    def close(self) -> None:
        """Wait for a pending checkpoint; stop the loader's workers, close files, release hooks."""
        loop.close(self)

    def _read_batches(self) -> Iterator[Batch]:
        return loop.read_batches(self, self._phase_stop)

    @property
    def batches_left(self) -> int:
        """Number of global batches that remain in the train phase; see ``Clock.batches_left``."""
        return self.clock.batches_left

    @property
    def phase_finished(self) -> bool:
        """True if the last counted step was the last of its train phase or stopped the training."""
        ends = self.clock.batch >= self._phase_stop or self.clock.stopped is not None
        return self.train and ends

    def _test_is_next(self) -> bool:
        every = self.config.eval.test_every
        return self.has_test_phases and self.clock.test_is_due(every, self.phases_to_test)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts; every rank must call it. See ``task_state.take``."""
        return task_state.take(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of all parts; see ``task_state.restore``."""
        task_state.restore(self, state)

    @cached_property
    def config_text(self) -> str:
        """Content of ``config.yaml``; cached, since writing it takes as long as copying a state."""
        return to_yaml(self.config)

    def save_checkpoint(self) -> None:
        """Save a checkpoint unless this step and phase have one; every rank must call it."""
        task_state.save(self)
