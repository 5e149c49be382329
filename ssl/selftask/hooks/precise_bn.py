"""Precise BatchNorm: recompute statistics with the current weights."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selftask.config.fields import setting
from selftask.data.data_module import DataModule
from selftask.distributed.accelerator import to_float64
from selftask.distributed.collectives import all_reduce_sum, rank, world_size
from selftask.hooks.base import Hook, Task
from selftask.parallel.sync_batch_norm import separate_batch_norm
from selftask.random.permutation import epoch_order
from selftask.registry import register_hook


@register_hook("precise_bn")
@dataclass(eq=False, kw_only=True)
class PreciseBatchNorm(Hook):
    """Recomputes BatchNorm's statistics before the backbone is evaluated or exported.

    The running averages of training lag behind the weights. This hook computes mean and variance of
    ``batches`` x ``batch_size`` training images, with the transforms of the evaluation
    (arXiv:2105.07576, section 3). Only the evaluated and exported copy changes; training and
    checkpoints keep the running averages. The batches do not depend on the number of ranks.
    """

    priority: ClassVar[int] = 10  # before evaluation and export
    batches: int = setting(200, min=1)
    """Number of batches over all ranks; fewer if there are not enough images."""
    batch_size: int = setting(64, min=2)
    """Number of images that are normalized together on one rank."""

    def on_start(self, task: Task) -> None:
        data = task.data_module
        task.before_export.append(lambda backbone: self.recompute(backbone, data))

    def recompute(self, backbone: nn.Module, data: DataModule) -> nn.Module:
        """Return a copy of the backbone with precise statistics; every rank must call this method.

        The copy is in evaluation mode. A backbone without running statistics is returned as it is.
        """
        if not _norms(backbone):
            return backbone
        chosen = self._batches_of_rank(data.config.train.seed, data.num_images)
        batches = data.chosen_samples(chosen.ravel(), chosen.shape[1])
        precise = deepcopy(backbone)
        separate_batch_norm(precise)
        with torch.random.fork_rng(devices=()):  # for DataLoader
            _set_statistics(precise, (batch.input for batch in batches), len(chosen))
        return precise.eval()

    def _batches_of_rank(self, seed: int, num_images: int) -> np.ndarray:
        """Return the image indices of this rank's batches, (batches, batch_size)."""
        size = min(self.batch_size, num_images)
        number = min(self.batches, num_images // size)
        order = epoch_order(seed, 0, num_images).at(np.arange(number * size))
        return order.reshape(number, size)[rank() :: world_size()]


def _norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm modules that track running statistics."""
    modules = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [module for module in modules if module.running_mean is not None]


def _set_statistics(model: nn.Module, inputs: Iterator[Tensor], number: int) -> None:
    """Set BatchNorm's statistics to those of the inputs of all ranks.

    Args:
        model: Module to modify in place; BatchNorm remains in train mode.
        inputs: Batches of images of this rank.
        number: Number of batches on this rank.
    """
    from fvcore.nn.precise_bn import update_bn_stats

    norms = _norms(model)
    model.eval()
    for norm in norms:
        norm.train()
    num_images = 0

    def counted() -> Iterator[Tensor]:
        nonlocal num_images
        for images in inputs:
            num_images += len(images)
            yield images

    update_bn_stats(model, counted(), number)
    device = next(model.buffers()).device
    share = num_images / float(all_reduce_sum(torch.tensor(float(num_images), device=device)))
    for norm in norms:
        mean, var = norm.running_mean, norm.running_var
        assert mean is not None
        assert var is not None
        both = all_reduce_sum(to_float64(torch.stack([mean, var + mean.square()])) * share)
        norm.running_mean = both[0].to(mean)
        norm.running_var = (both[1] - both[0].square()).to(var)
