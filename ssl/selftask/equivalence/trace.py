"""A task that records everything that must not depend on the number of ranks.

Training uses float64, so that any difference above rounding errors (1e-16) is a bug. BatchNorm
depends on the batch of its rank and is replaced by a norm over single samples, unless it is
synchronized.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_leaves_with_path

from selftask.batch import Batch, with_dtype
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.equivalence.progress import WatchedSteps
from selftask.equivalence.tiny_recipe import images_for
from selftask.errors import UserError
from selftask.task import Task

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@contextmanager
def batch_norm_replaced() -> Iterator[list[str]]:
    """Context in which modules are built with GroupNorm(1) instead of BatchNorm.

    Replacement happens during construction, since teachers copy networks and optimizers hold
    parameters.

    Yields:
        A list of the names of replaced modules, which grows as modules are built.
    """
    replaced: list[str] = []

    def without(parent: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
        if type(child) not in _BATCH_NORMS:
            return None
        assert isinstance(child, nn.modules.batchnorm._BatchNorm)
        replaced.append(name)
        return nn.GroupNorm(1, child.num_features, eps=child.eps, affine=child.affine)

    handle = register_module_module_registration_hook(without)  # type: ignore[arg-type]
    try:
        yield replaced
    finally:
        handle.remove()


class RecordedTask(Task):
    """A task on synthetic images that records inputs and results of each batch."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, sources=Sources(images_for(config), None))
        self.samples: list[Tensor] = []  # (B,) image indices of each batch
        self.inputs: list[dict[str, Tensor]] = []  # name -> (B,) weighted sums, for each batch
        self.batch_losses: list[Tensor] = []
        self.terms: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []  # for each step
        self.method_states: list[dict[str, Tensor]] = []  # after each step
        self.asked: dict[str, int] = {}  # file:line -> step that steps_done is compared with
        self.draws: dict[str, None] = {}  # global random generators that a step has used
        self.exchanges = 0  # collectives called while a loss was computed

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        super().prepare(*args, **kwargs)
        self.data_module: Any = _InDouble(self.data_module)
        modules = (("network", self.base_model), ("method", self.loss))
        named = chain.from_iterable(module.named_parameters(part) for part, module in modules)
        self.trained_parameters = {name: p for name, p in named if p.requires_grad}
        self._count_exchanges()
        prepare_batch = self.loss.prepare_batch

        def note_generators(batch: Batch, task: Any) -> None:
            self._generators = _generator_states()
            prepare_batch(batch, task)

        self.loss.prepare_batch = note_generators

    @property
    def steps_done(self) -> int:
        """Number of finished steps, as a ``WatchedSteps`` that records comparisons with it."""
        return WatchedSteps(super().steps_done, self.asked)

    def train_until(self, steps: int) -> None:
        """Train phase by phase, as a trainer does, until ``steps`` steps are done in total."""
        self.on_start()
        while self.steps_done < steps and not self.done_training():
            self.on_phase_start()
            while True:
                try:
                    self.step()
                except StopIteration:
                    break
                if self.steps_done >= steps and not self.phase_finished:
                    return
            self.on_phase_end()

    def run_hooks(self, point: str) -> None:
        """Call the hooks, then record the batch, the gradients or the state of the method."""
        super().run_hooks(point)
        if not self.train:
            return
        if point == "on_update":
            self.method_states.append(_tensors(self.loss))
        if point == "on_loss_and_meter":
            states = _generator_states()
            changed = [name for name in states if states[name] != self._generators[name]]
            self.draws.update(dict.fromkeys(changed))
            batch = self.last_batch
            assert batch.loss is not None
            if not batch.loss.isfinite():
                raise UserError(
                    f"the loss is {batch.loss.item()} in step {self.steps_done + 1} of the check; "
                    "only finite losses can be compared"
                )
            self.samples.append(batch.index.clone())
            self.inputs.append(dict(_per_sample(batch.input, len(batch.index))))
            self.batch_losses.append(batch.loss.detach().clone())
            self.terms.append({name: value.clone() for name, value in batch.terms.items()})
        if point == "on_backward":
            grads = {name: p.grad for name, p in self.trained_parameters.items()}
            self.gradients.append({n: _full_copy(g) for n, g in grads.items() if g is not None})

    def record(self) -> dict[str, Any]:
        """Return everything recorded on this rank, with the final state."""
        return {
            "samples": self.samples,
            "inputs": self.inputs,
            "loss": self.batch_losses,
            "terms": self.terms,
            "gradients": self.gradients,
            "network": _tensors(self.base_model),
            "method": self.method_states,
            "optimizer": dict(self._optimizer_state()),
            "exchanges": self.exchanges,
            "draws": list(self.draws),
            "asked": self.asked,
        }

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names such as ``network.head.0.weight.exp_avg`` with their tensors."""
        names = {id(parameter): name for name, parameter in self.trained_parameters.items()}
        for optimizer in self.all_optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            state = optimizer.get_classy_state().get("optim", {}).get("state", {})
            for number, entries in state.items():
                for key, value in entries.items():
                    if isinstance(value, Tensor | float | int):
                        full = _full_copy(torch.as_tensor(value))
                        yield f"{names.get(id(params[number]), number)}.{key}", full

    def _count_exchanges(self) -> None:
        """Count the collectives called during the forward pass of the loss."""
        counted: list[Any] = []

        def before(module: nn.Module, args: Any) -> None:
            counted.append(_CollectiveCounter().__enter__())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            counter = counted.pop()
            counter.__exit__(None, None, None)
            self.exchanges += counter.calls

        self.loss.register_forward_pre_hook(before)
        self.loss.register_forward_hook(after, always_call=True)


class _CollectiveCounter(TorchDispatchMode):
    """Context manager that counts the gathers and reductions between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        self.calls += func.namespace == "c10d" and ("all" in name or "reduce" in name)
        return func(*args, **kwargs or {})


class _InDouble:
    """DataModule whose batches of training images have views in float64."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def train_batches(self, first: int) -> Iterator[Batch]:
        return (with_dtype(batch, torch.float64) for batch in self._feed.train_batches(first))

    def iterate_all(self) -> Iterator[Batch]:
        return (with_dtype(batch, torch.float64) for batch in self._feed.iterate_all())


def _generator_states() -> dict[str, Any]:
    """Return the states of the global generators by name, as values that can be compared."""
    numpy_state: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numpy_state[1].tobytes(), numpy_state[2]),
        "random": random.getstate(),
    }


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {name: _full_copy(value) for name, value in state.items() if isinstance(value, Tensor)}


def _full_copy(tensor: Any) -> Tensor:
    """Return a detached copy, gathered from all ranks if FSDP has sharded it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def _per_sample(value: Any, rows: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a position-weighted sum per sample for each tensor (B, ...) in nested containers."""
    for path, leaf in tree_leaves_with_path(value):
        if isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == rows:
            flat = leaf.detach().reshape(rows, -1).double()
            weights = torch.linspace(1.0, 2.0, flat.shape[1]).double()
            yield f"input{keystr(path)}", flat @ weights
