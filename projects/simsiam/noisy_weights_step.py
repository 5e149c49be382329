"""A train step for flat minima: the gradient is computed at noisy weights.

Bisla et al., Low-Pass Filtering SGD for Recovering Flat Optima in the Deep Learning Optimization
Landscape, AISTATS 2022, arXiv:2201.08025; with one draw per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean
from selftask.registry import register_train_step
from selftask.task import Task


@register_train_step("noisy_weights")
@dataclass(frozen=True, kw_only=True)
class NoisyWeights:
    """The standard step, with Gaussian noise on the weights until they are updated."""

    std: float = setting(0.01, min=0)  # standard deviation, relative to the RMS of each tensor

    def __call__(self, task: Task) -> None:
        """Run one step; a test phase has no noise and stops after the loss."""
        batch = task.last_batch = next(task.batches)

        with self._noise(task):
            with task.autocast():
                batch.output = task.model(batch.input)
                task.run_hooks("on_forward")
                batch.local_loss = task.loss(batch.output, batch)
            batch.loss = all_reduce_mean(batch.local_loss.detach())
            task.update_meters(batch)
            task.run_hooks("on_loss_and_meter")
            if not task.train:
                return
            task.optimizer.zero_grad()
            task.grad_scaler.scale(batch.local_loss).backward()

        task.reduce_gradients()
        task.grad_scaler.unscale_(task.optimizer)
        task.run_hooks("on_backward")

        task.grad_scaler.step(task.optimizer, where=task.where)
        task.grad_scaler.update()
        task.run_hooks("on_update")
        task.advance()

    @contextmanager
    def _noise(self, task: Task) -> Iterator[None]:
        """Context with noise on the weights; its draws depend on seed and step only."""
        groups = task.optimizer.param_groups if task.train else []
        weights = [p.detach() for group in groups for p in group["params"]]
        before = [w.clone() for w in weights]
        draws = torch.Generator().manual_seed(task.config.train.seed + task.steps_done)
        for weight in weights:
            noise = torch.randn(weight.shape, generator=draws).to(weight)
            weight += self.std * weight.square().mean().sqrt() * noise
        try:
            yield
        finally:  # also if a hook abandons the step
            for weight, start in zip(weights, before, strict=True):
                weight.copy_(start)
