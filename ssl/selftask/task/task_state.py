"""State of a task: collect, save, find and restore it."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selftask import classy
from selftask.checkpoint import manifest, rotation, store
from selftask.checkpoint.nested import check_plain
from selftask.checkpoint.writer import CheckpointWriter
from selftask.config.checks.locations import asked_checkpoint, uses_newest
from selftask.config.extensions.user_code import source_of
from selftask.config.run_length import RunLength
from selftask.config.schema import Config
from selftask.config.values.budget import show_bytes
from selftask.data.fingerprint import differences
from selftask.distributed.collectives import barrier, gather_objects, is_primary
from selftask.errors import UserError, plural
from selftask.files.paths import exists
from selftask.files.received import UnreadableFile
from selftask.hooks.base import Task
from selftask.logs import get_logger
from selftask.optim.build import lr_schedule
from selftask.parallel.sync_batch_norm import has_batch_norm
from selftask.random import process_state
from selftask.task.averaged_weights import averaged_weights

log = get_logger(__name__)


def take(task: Task, *, full: bool = True) -> dict[str, Any]:
    """Return the state of all parts; every rank must call this function.

    Buffers are synchronized first, since a resume loads the same buffers on all ranks.

    Args:
        task: The prepared task.
        full: If True, gather sharded tensors on the first rank; if False, leave them sharded.

    Returns:
        A nested dict of tensors and plain Python objects.

    Raises:
        UserError: If the state of a hook contains other objects.
    """
    task.sync_buffers()
    optimizer = task.reduction.rearrange(task.optimizer.get_classy_state())
    named = {name: other.get_classy_state() for name, other in task.optimizers.items()}
    tensors = {
        "model": task.base_model.state_dict(),
        "method": task.loss.state_dict(),
        "optimizer": optimizer,
        "optimizers": named,
        "hooks": {key: _state_of_hook(task, key, hook) for key, hook in task.named_hooks.items()},
    }
    return {
        **(task.reduction.full_state(tensors) if full else tensors),
        "scaler": task.grad_scaler.state_dict(),
        "backbone": _place_of_backbone(task),
        "channels": task.data_module.channels,
        "data": task.data_module.fingerprint,
        "unreadable": task.data_module.unreadable_state(),
        "length": asdict(task.length),
        "clock": task.clock.state_dict(),
        "meters": [meter.get_classy_state() for meter in task.meters],
        "scalars": {name: float(value) for name, value in task.training_scalars.items()},
        "history": task.history.state_dict(),
        "rng": gather_objects(process_state.rng_state()),
        "threads": gather_objects(torch.get_num_threads()),
        "metrics_bytes": task.rows.length if task.rows is not None else 0,
    }


def _place_of_backbone(task: Task) -> str:
    """Return the key of the exported backbone in the state, such as ``model.backbone``."""
    backbone = task.loss.export_backbone(task.base_model)
    parts = (("model", task.base_model), ("method", task.loss))
    places = [
        f"{part}.{name}"
        for part, module in parts
        for name, inner in module.named_modules()
        if inner is backbone
    ]
    assert places, "export_backbone must return a module inside the network or the method"
    return places[0]


def restore(task: Task, state: dict[str, Any]) -> None:
    """Restore the state of all parts, which must match, except hooks and meters.

    A hook without a state in the checkpoint starts anew.

    Raises:
        ValueError: If the names of the optimizers differ. Other differences raise errors of torch,
            or KeyError.
    """
    reduction = task.reduction
    task.base_model.load_state_dict(reduction.shard_state(task.base_model, state["model"]))
    task.loss.load_state_dict(reduction.shard_state(task.loss, state["method"]))
    task.optimizer.set_classy_state(reduction.shard_state_of_optimizer(state["optimizer"]))
    named = state["optimizers"]
    if named.keys() != task.optimizers.keys():
        raise ValueError(f"optimizers: {[*task.optimizers]} now, {[*named]} in the checkpoint")
    for name, optimizer in task.optimizers.items():
        optimizer.set_classy_state(named[name])
    task.grad_scaler.load_state_dict(state["scaler"])
    task.clock.load_state_dict(state["clock"])
    _restore_hooks(task, state["hooks"])
    for meter, meter_state in zip(task.meters, state["meters"], strict=False):
        meter.set_classy_state(meter_state)
    task.scalars = dict(state["scalars"])
    task.history.load_state_dict(state["history"])
    task.data_module.restore_unreadable(state["unreadable"])
    if task.world.rank < len(state["rng"]):
        process_state.set_rng_state(state["rng"][task.world.rank])
    if task.device.type == "cpu":
        _keep_threads(task, state["threads"])


def _state_of_hook(task: Task, key: str, hook: Any) -> Any:
    """Return the state of a hook; raise UserError if a checkpoint cannot hold it."""
    classy.before_save(hook, task)
    state = hook.get_classy_state()
    try:
        if not isinstance(state, dict):
            kind = type(state).__name__
            raise TypeError(f"state_dict of hooks.{key} returned a {kind}: a dict is expected")
        check_plain(state, f"state_dict of hooks.{key}")
    except TypeError as error:
        raise UserError(f"{source_of(type(hook))}: {error}") from None
    return state


def _restore_hooks(task: Task, states: dict[str, Any]) -> None:
    """Restore the hooks by their keys in the config; log keys that only one side has."""
    for key, hook in task.named_hooks.items():
        if key in states:
            hook.set_classy_state(states[key])
        else:
            log.info("hooks.%s: the checkpoint has no state of it; it starts anew", key)
    for key in states.keys() - task.named_hooks.keys():
        if states[key] and "checkpoint" in task.named_hooks:  # otherwise the run is not continued
            log.warning("hooks.%s: its state in the checkpoint is not used: no such hook now", key)


def _keep_threads(task: Task, saved: list[int]) -> None:
    """Restore the number of threads, on which the rounding of sums depends; warn if it is fixed."""
    current = torch.get_num_threads()
    before = saved[task.world.rank] if len(saved) == task.world.size else current
    if before == current:
        return
    if task.config.train.threads == "auto":
        torch.set_num_threads(before)
        log.info(
            "threads: %d of torch as before the stop, for the same result bit for bit; auto would "
            "be %d here",
            before,
            current,
        )
    else:
        log.warning(
            "threads: %d of torch, %d before the stop: the result is no longer that of a run that "
            "was never stopped, bit for bit; train.threads=auto keeps the number",
            current,
            before,
        )


def save(task: Task) -> None:
    """Save ``checkpoints/step_N.pt`` unless this step and phase have been saved.

    Every rank must call this function; rank 0 writes. With ``train.sharded_checkpoints`` every rank
    writes its part of ``checkpoints/step_N/``.

    The state is copied before this function returns; the file may be written in the background. At
    the end of training and before a stop, it returns on every rank only after the file has been
    written.
    """
    last = task.clock.done or task.interrupted_by is not None
    now = (task.clock.steps_done, task.clock.phase)
    if now != task.saved:
        if task.rows is not None:
            task.rows.check_place()
        task.saved = now
        task.run_hooks("before_save")
        sharded = task.config.train.sharded_checkpoints
        with averaged_weights(task):
            state = take(task, full=False) if sharded else task.state_dict()
            if is_primary() or sharded:
                state = {"format": store.FORMAT, "config": task.config_text, **state}
                task.checkpoints.save(state, task.steps_done, last=last)
        task.event("checkpoint", f"checkpoint of step {task.steps_done}")
    if last:
        task.checkpoints.wait()
        barrier()  # if a rank exited early, the launcher would stop the one that writes


def open_writer(config: Config, out: Path) -> CheckpointWriter:
    """Create the checkpoint writer of a run."""
    kind = CheckpointWriter
    if config.train.sharded_checkpoints:
        from selftask.checkpoint.sharded_writer import ShardedWriter  # DCP is slow to import

        kind = ShardedWriter
    return kind(
        out / "checkpoints",
        keep=config.train.keep_checkpoints,
        background=config.train.async_checkpoints,
        durable=[out / "metrics.jsonl"],
    )


def _read(task: Task, path: Path) -> dict[str, Any]:
    """Load a checkpoint, or this rank's part of a sharded one.

    Raises DamagedCheckpoint or OSError on every rank if one of them cannot read it.
    """
    failure: Exception | None = None
    state: dict[str, Any] = {}
    try:
        if path.is_dir():
            from selftask.checkpoint import sharded

            state = sharded.load(
                path,
                empty=task.reduction.empty,
                checker=task.world.rank,
                num_checkers=task.world.size,
            )
        else:
            state = store.load(path)
    except (manifest.DamagedCheckpoint, UnreadableFile) as error:
        failure = manifest.DamagedCheckpoint(str(error))
    except OSError as error:
        failure = error
    for of_rank in gather_objects(failure):
        if of_rank is not None:
            raise of_rank
    return state


def resumes(config: Config) -> bool:
    """Return True if training would resume from the newest checkpoint in its run folder."""
    out = config.out_folder
    has_run = exists(out / "config.yaml") and rotation.checkpoints(out / "checkpoints")
    return bool(has_run) and uses_newest(config)


def resume(task: Task) -> bool:
    """Load the checkpoint that ``resume`` selects; return True if there was one.

    Every rank must call this function. Checkpoints of the run folder after this one are archived,
    and rows of ``metrics.jsonl`` that it does not continue are removed.

    Raises:
        UserError: If the checkpoint does not fit the config or the data, or there is no disk space
            for further checkpoints.
    """
    _check_space(task)
    selected = task.resume_from or asked_checkpoint(task.config)
    checkpoint = store.find(selected, task.out / "checkpoints", partial(_read, task))
    if checkpoint is None:
        task.data_module.restore_unreadable({})  # of an earlier run in this folder
    else:
        _load(task, *checkpoint)
    barrier()  # all ranks have read the checkpoint
    _discard_later(task, checkpoint)
    if checkpoint is None:
        return False
    state, path = checkpoint
    task.begun_at = task.steps_done
    task.run_hooks("after_load")
    log.info("resumed from %s: step %d, epoch %d", path, task.steps_done, task.clock.epoch)
    if not task.clock.done and task.resume_from is None:  # not finished, and no rollback
        task.event("resume", f"resumed from {path}", epoch=task.clock.epoch)
    _log_new_length(task, state)
    _log_new_statistics(task, state)
    return True


def _load(task: Task, state: dict[str, Any], path: Path) -> None:
    """Restore a checkpoint; raise UserError if it does not fit the config or the data."""
    _check_data(task, state, path)
    try:
        task.load_state_dict(state)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} does not fit: it is of another method, network or optimizer than the config; "
            f"use another out=, or another resume=\n{error}"
        ) from error


def _discard_later(task: Task, checkpoint: tuple[dict[str, Any], Path] | None) -> None:
    """Archive checkpoints after the one found, and drop rows that are not part of its run."""
    if task.rows is None:
        return
    folder = task.out / "checkpoints"
    rotation.archive(folder, -1 if checkpoint is None else task.steps_done)
    rows_bytes = 0
    if checkpoint is not None and checkpoint[1].resolve().parent == folder.resolve():
        rows_bytes = checkpoint[0]["metrics_bytes"]
    if task.rows.cut(rows_bytes):
        log.warning(
            "%s: rows before step %d are missing; the file was removed or cut after the "
            "checkpoint, and the training itself is not affected",
            *(task.rows.path, task.steps_done + 1),
        )


def _check_data(task: Task, state: dict[str, Any], path: Path) -> None:
    """Raise UserError or warn, as configured, if the data have changed since the checkpoint."""
    now = task.data_module.fingerprint
    changes = differences(state.get("data") or now, now, task.data_module.train_source.path)
    if not changes:
        return
    text = f"data is not what it was when {path.name} was written: {'; '.join(changes)}"
    if task.config.resume.data == "refuse":
        raise UserError(
            f"{text}; bring the data back, use another out=, or resume.data=allow to resume with it"
        )
    log.warning("%s; resuming with the data as it is now (resume.data=allow)", text)


def _log_new_length(task: Task, state: dict[str, Any]) -> None:
    """Warn if the length of the run has changed, since progress and schedules then jump."""
    before, now = RunLength(**state["length"]), task.length
    if before.total_batches == now.total_batches:
        return
    rates = []
    wheres = [task.clock.trained_batches / length.total_batches for length in (before, now)]
    for length, where in zip((before, now), wheres, strict=True):
        schedule = lr_schedule(task.config.optimizer, length, batch=length.samples_per_step)
        rates.append(schedule(min(where, 1.0 - 1e-9)))
    log.warning(
        "the run has %d steps now and had %d: at step %d progress jumps from %.3f to %.3f, and the "
        "learning rate from %.3g to %.3g",
        *(now.total_steps, before.total_steps, task.steps_done, *wheres, *rates),
    )


def _log_new_statistics(task: Task, state: dict[str, Any]) -> None:
    """Warn if BatchNorm now computes its statistics over another number of images."""
    if task.config.parallel.sync_batch_norm == "all":
        return
    before, now = len(state["rng"]), task.world.size
    images = state["length"]["batch_size"] // before, task.length.batch_size // now
    if images[0] != images[1] and any(map(has_batch_norm, (task.base_model, task.loss))):
        log.warning(
            "BatchNorm takes its statistics per rank: over %d images now (%d %s), %d before (%d); "
            "the result depends on it. parallel.sync_batch_norm=all takes those of all ranks",
            *(images[1], now, plural("rank", now), images[0], before),
        )


def _check_space(task: Task) -> None:
    """Raise UserError if the free disk space is below a lower bound of a checkpoint's size."""
    if not is_primary() and not task.config.train.sharded_checkpoints:
        return
    states = (task.base_model.state_dict(), task.loss.state_dict())
    needed = sum(_bytes(value) for state in states for value in state.values())
    for group in chain.from_iterable(one.param_groups for one in task.all_optimizers):
        copies = len(group.get("betas", ())) or bool(group.get("momentum"))
        needed += copies * sum(_bytes(parameter) for parameter in group["params"])
    free = shutil.disk_usage(task.out).free
    if needed > free:
        raise UserError(
            f"out={task.out}: the disk has {show_bytes(free)} free, and a checkpoint of this run "
            f"takes at least {show_bytes(needed)}; make room, or use another out="
        )


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0
