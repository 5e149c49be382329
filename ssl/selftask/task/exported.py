"""Buffers and backbone for evaluation, export and checkpoints: equal on all ranks."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from selftask.distributed.collectives import average_statistics, broadcast_tensors
from selftask.hooks.base import Task
from selftask.models.build import build_backbone
from selftask.models.weights.lora import adapt, merged
from selftask.task.averaged_weights import averaged_weights


def sync_buffers(task: Task) -> None:
    """Give every rank the same buffers, in the network and its teachers.

    BatchNorm's running statistics differ between ranks during training. Rank 0's, or the mean over
    ranks (``parallel.buffers``), are evaluated, exported and saved. Every rank must call this
    function. Does nothing with ``parallel.sync_buffers=never``.
    """
    parallel = task.config.parallel
    if parallel.sync_buffers == "never":
        return
    for network in task.networks:
        if parallel.buffers == "mean":
            average_statistics(network)
        else:
            broadcast_tensors(network.buffers())


def export_backbone(task: Task, student: str | None = None) -> nn.Module:
    """Return a trained backbone, unsharded, with merged adapters; every rank must call it.

    With a schedule-free optimizer, the averaged weights are returned. Hooks can change the result
    through ``task.before_export``. The result may be the trained module itself: do not modify it.

    Args:
        task: The task.
        student: Name of another trained backbone, as in ``Method.further_backbones``; None for the
            one that ``Method.export_backbone`` returns.
    """
    task.sync_buffers()
    backbone: nn.Module = (
        task.loss.export_backbone(task.base_model)
        if student is None
        else task.base_model.get_submodule(f"further.{student}.backbone")
    )
    with averaged_weights(task) as averaged:
        backbone = task.reduction.unsharded(backbone, lambda: _new_backbone(task, student))
        backbone = merged(deepcopy(backbone) if averaged else backbone)
    for change in task.before_export:
        backbone = change(backbone)
    return backbone


def _new_backbone(task: Task, student: str | None) -> nn.Module:
    channels = task.data_module.channels
    if student is not None:
        return build_backbone(task.loss.further_backbones()[student], channels)
    config = task.config.backbone
    backbone = build_backbone(config, channels)
    adapt(backbone, config.lora)
    return backbone
