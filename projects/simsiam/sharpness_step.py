"""A train step that looks for flat minima: two gradients an update.

Foret et al., Sharpness-Aware Minimization, ICLR 2021, arXiv:2010.01412.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selftask.batch import total
from selftask.distributed.collectives import all_reduce_mean
from selftask.registry import register_train_step
from selftask.task import Task

RADIUS = 0.05  # rho in eq. 2


@register_train_step("sharpness_aware")
def sharpness_aware_step(task: Task) -> None:
    """Gradient, climb by ``RADIUS`` along it, gradient there, climb down, update with that."""
    batch = task.last_batch = next(task.batches)
    with task.autocast():
        batch.output = task.model(batch.input)
        task.run_hooks("on_forward")
        batch.local_loss = task.loss(batch.output, batch)
    batch.loss = all_reduce_mean(batch.local_loss.detach())
    task.update_meters(batch)
    task.run_hooks("on_loss_and_meter")
    if not task.train:
        return

    _gradient(task, batch.local_loss)
    climb = _climb(task)
    with task.autocast():
        uphill = total(task.loss(task.model(batch.input), batch))  # the loss is pure: once more
    _gradient(task, uphill)
    with torch.no_grad():
        for parameter, up in climb:
            parameter -= up
    task.grad_scaler.unscale_(task.optimizer)
    task.run_hooks("on_backward")

    task.grad_scaler.step(task.optimizer, where=task.where)
    task.grad_scaler.update()
    task.run_hooks("on_update")
    task.advance()


def _gradient(task: Task, loss: Tensor) -> None:
    task.optimizer.zero_grad()
    task.grad_scaler.scale(loss).backward()
    task.reduce_gradients()


@torch.no_grad()
def _climb(task: Task) -> list[tuple[Tensor, Tensor]]:
    """Eq. 2: every weight, and by how much it went up. The scale of the loss cancels out."""
    weights = [p for g in task.optimizer.param_groups for p in g["params"] if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in weights]))
    climb = [(p, p.grad * (RADIUS / norm.clamp(min=1e-12))) for p in weights]
    for parameter, up in climb:
        parameter += up
    return climb
