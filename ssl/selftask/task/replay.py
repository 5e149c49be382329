"""Repeat one dumped step on one process, and find the first module that is not finite."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from selftask.checkpoint import store
from selftask.checkpoint.manifest import DamagedCheckpoint, read_file
from selftask.config.load import load_config
from selftask.config.trust import refuse_addresses
from selftask.errors import UserError, explained, join_some, nearest_path
from selftask.hooks.failures.dump import unpack
from selftask.hooks.failures.non_finite import is_finite, non_finite_images
from selftask.random import process_state
from selftask.random.keyed import LAYER_DRAWS
from selftask.task import Task
from selftask.task.scoring import forward_without_hooks


@dataclass
class Replay:
    """Results of a repeated step, and the recorded ones."""

    step: int
    ranks: int
    problem: str  # as recorded
    recorded: float  # loss, averaged over ranks
    loss: float
    terms: dict[str, float]
    images: list[str] = field(default_factory=list)  # images that are not finite
    weights: list[str] = field(default_factory=list)  # non-finite ones, before the step
    module: str = ""  # the first module whose output is not finite
    gradients: list[str] = field(default_factory=list)  # in order of the backward pass

    @property
    def same(self) -> bool:
        """True if the loss equals the recorded one, up to rounding if there were several ranks."""
        if math.isnan(self.recorded):
            return math.isnan(self.loss)
        return math.isclose(self.loss, self.recorded, rel_tol=0.0 if self.ranks == 1 else 1e-4)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: losses, and all that is not finite."""
        yield f"recorded: {self.problem}"
        comparison = "the same" if self.same else f"recorded was {self.recorded!r}"
        yield f"step {self.step} replayed: loss {self.loss!r} ({comparison})"
        for name, value in self.terms.items():
            yield f"  term {name}: {value!r}"
        for text in self.images:
            yield f"images that are not finite: {text}"
        if self.weights:
            yield f"weights that are not finite before the step: {join_some(self.weights, 4)}"
        if self.module:
            yield f"first module whose output is not finite: {self.module}"
        if self.gradients:
            yield f"gradients that are not finite, last layer first: {join_some(self.gradients, 4)}"
        problem = self.images or self.weights or self.module or self.gradients
        if not problem and math.isfinite(self.loss):
            yield (
                "all is finite here: the cause is neither in the batch nor in weights or random "
                "states; a hook of the run, its hardware or another rank remain"
            )


def replay(folder: Path, overrides: list[str], *, trust: bool = False) -> Replay:
    """Repeat the step dumped in ``failures/step_N`` without changing the run's folder.

    The batches of all ranks are joined into one batch, since W ranks compute the same as one
    process.

    Args:
        folder: The dump, or a file in it.
        overrides: ``key=value`` words that the user has typed.
        trust: Allow code and addresses that the run names.

    Raises:
        UserError: If the folder holds no complete and readable dump, the data of the run cannot be
            opened, or the run names code or addresses and ``trust`` is False.
    """
    if folder.is_file():  # one of the dump
        folder = folder.parent
    parts, state = _read(folder)
    with tempfile.TemporaryDirectory() as out:
        alone = ["launch={nodes: 1, processes: 1}", "resume=never", "parallel.reduce=manual"]
        words = [*alone, "data.num_workers=0", "init.backbone=null", f"out={out}", *overrides]
        config = load_config(str(folder / "config.yaml"), words, trust=trust)
        if not trust:
            refuse_addresses(config, "data", "method")
        task = Task(config)
        task.prepare()
        try:
            task.load_state_dict(state)
            return _repeat(task, parts, state)
        finally:
            task.close()


def _read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if not folder.exists():
        raise UserError(f"{folder}: there is no such folder; {nearest_path(folder)}")
    files = sorted(folder.glob("rank_*.pt"), key=lambda path: int(path.stem[5:]))
    states = sorted(folder.glob("step_*.pt"))
    if not files or not states:
        raise UserError(f"{folder}: no dump of a failed step; they lie in RUN/failures/step_N")
    with explained(f"{folder}: its batches cannot be read", DamagedCheckpoint):
        parts = [read_file(file) for file in files]
    if len(parts) != parts[0]["ranks"]:
        raise UserError(f"{folder}: batches of {len(parts)} of {parts[0]['ranks']} ranks")
    return parts, store.load(states[-1])


def _repeat(task: Task, parts: list[dict[str, Any]], state: dict[str, Any]) -> Replay:
    batch = unpack([part["batch"] for part in parts], task.device)
    result = Replay(
        step=parts[0]["step"],
        ranks=len(parts),
        problem=parts[0]["problem"],
        recorded=sum(part["loss"] for part in parts) / len(parts),
        loss=math.nan,
        terms={},
        images=list(non_finite_images(batch, task.data_module.train_source)),
        weights=[name for name, value in _tensors(task) if not is_finite(value.detach())],
    )
    process_state.set_rng_state(state["rng"][0])
    task.train = True
    task.base_model.train()
    task.loss.train()
    if LAYER_DRAWS.num_layers:
        LAYER_DRAWS.start(batch.key, task.device)
    with _watched(task, result):
        forward_without_hooks(task, batch)
        batch.local_loss.backward()
    LAYER_DRAWS.stop()
    result.loss = float(batch.local_loss.detach())
    result.terms = {name: float(value) for name, value in batch.terms.items()}
    return result


@contextmanager
def _watched(task: Task, result: Replay) -> Iterator[None]:
    """Context that records the first non-finite module output and all non-finite gradients."""
    handles: list[Any] = []

    def output_of(name: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if not result.module and not is_finite(output):
                entering = "finite" if is_finite(inputs) else "not finite either"
                result.module = f"{name} ({type(module).__name__}); its input is {entering}"

        return check

    def gradient_of(name: str) -> Any:
        def check(parameter: Tensor) -> None:
            if not is_finite(parameter.grad):
                result.gradients.append(name)

        return check

    for part, root in task.trained:
        for name, module in root.named_modules(prefix=part):
            handles.append(module.register_forward_hook(output_of(name)))
        for name, parameter in root.named_parameters(part):
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(gradient_of(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(task: Task) -> Iterator[tuple[str, Tensor]]:
    for part, root in task.trained:
        yield from root.named_parameters(part)
        yield from root.named_buffers(part)
