"""Contrast of each image with its entry and those of other images in a memory bank (NPID).

B: images per rank, K: negatives of an image, D: width of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Method, Task
from selftask.models.losses import noise_contrast
from selftask.models.memory_bank import MemoryBank
from selftask.random.keyed import uniform


class MemoryContrast(Method):
    """Method with ``self.memory``, which has an entry for each image, updated after each step.

    An entry is a vector, or several of them, ``(*entry_shape, D)``.

    The config's ``loss`` is ``"nce"``, noise-contrastive estimation, or ``"info_nce"``, a softmax
    over an image and its negatives. A subclass may add losses that need no negatives.
    """

    loss_reduction = "samples"  # negatives come from the memory
    requires = ("index",)  # the memory has an entry for each image
    entry_shape: ClassVar[tuple[int, ...]] = ()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        num_negatives: int = setting(4096, min=1, tiny=16)
        """Number of negatives drawn from the memory bank, K."""
        temperature: float = setting(0.07, above=0)
        """Temperature of the similarities, tau."""
        momentum: float = setting(0.5, min=0, max=1)
        """Weight of the old entry when an entry of the memory bank is updated."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.loss == "nce":
            self.normalizer = noise_contrast.Normalizer()  # Z in eq. 4 of NPID

    def setup(self, task: Task) -> None:
        super().setup(task)
        shape = *self.entry_shape, self.config.out_dim
        self.memory = MemoryBank(task.data_module.num_images, *shape)

    def draw_negatives(self, batch: Batch, task: Task, *, others: int = 0) -> Tensor:
        """Draw ``batch["negatives"]``, the indices (B, K) of each image's negatives.

        Args:
            batch: The batch.
            task: The task, with the seed of the run.
            others: Number of additional draws for each image.

        Returns:
            The additional draws, (B, others) in [0, 1).
        """
        key = batch.key.to(batch.index.device, non_blocking=True)
        draws = uniform(task.config.train.seed, key, others + self.config.num_negatives)
        of_memory = draws[:, others:]
        batch["negatives"] = noise_contrast.other_images(of_memory, batch.index, len(self.memory))
        return draws[:, :others]

    def on_forward(self, task: Task) -> None:
        """Set NCE's constant Z, ``batch["normalizer"]``, if ``loss`` is ``"nce"``.

        In training, also collect the new entries that ``on_update`` stores in the memory.
        """
        batch, features = task.last_batch, task.last_batch.output[0].detach()
        if self.config.loss == "nce":
            batch["normalizer"] = self.normalizer.of(
                features, self.memory, batch["negatives"], self.config.temperature
            )
        if task.train:
            self.pending.append((batch.index, self.entries_of(features)))

    def entries_of(self, features: Tensor) -> Tensor:
        """Return the images' new entries, ``(B, *entry_shape, D)``; by default their features.

        Args:
            features: Output of the network, without gradient, ``(B, *entry_shape, D)``.
        """
        return features

    def contrast(self, batch: Batch, *features: Tensor) -> list[Tensor]:
        """Return the loss of each tensor of features ``(B, *entry_shape, D)``, a mean over images.

        Positives are the images' own entries of the memory, negatives are ``batch["negatives"]``.
        """
        entries, negatives = self.memory[batch.index], self.memory[batch["negatives"]]
        loss: Callable[..., Tensor] = noise_contrast.info_nce
        if self.config.loss == "nce":
            constants = {"normalizer": batch["normalizer"], "num_images": len(self.memory)}
            loss = partial(noise_contrast.nce, **constants)
        return [loss(rows, entries, negatives, self.config.temperature) for rows in features]

    def on_update(self, task: Task) -> None:
        """Update the memory; in the first step, set NCE's constant for the rest of the run."""
        super().on_update(task)
        if self.config.loss == "nce":
            self.normalizer.keep(task.last_batch["normalizer"])
        for index, features in self.take_pending():
            self.memory.update(index, features, self.config.momentum)

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(1 + K) with K ``num_negatives``; for NCE
        ln(1 + K) + K ln(1 + 1/K).
        """
        negatives: int = self.config.num_negatives
        is_nce = self.config.loss == "nce"
        return noise_contrast.chance_of_nce(negatives) if is_nce else math.log1p(negatives)
