"""Heads on patch features: votes of nearest patches, and the best of several linear layers.

M patches in memory, E features, C classes, G learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.data.loading.loader import EvalBatches
from selftask.errors import UserError
from selftask.evaluate.dense.linear_heads import LinearHeads, fit_linear_heads
from selftask.evaluate.dense.memory import PatchMemory, class_shares, vote
from selftask.evaluate.dense.patches import PatchFeatures, PatchOptions
from selftask.evaluate.nearest import Bank
from selftask.evaluate.on_ranks import in_order

Scores = Callable[[Tensor], Tensor]
"""Patch features (Q, E) -> probabilities of classes (Q, C), or their logits."""
Quality = Callable[[Tensor, Tensor], Tensor]
"""Logits (m, C) and shares of classes (m, C) of patches -> a number that is better if larger."""


@dataclass(frozen=True, kw_only=True)
class HeadOptions(PatchOptions):
    """Options of the heads and of the patches that they learn from."""

    heads: list[Literal["knn", "linear"]] = setting(["knn", "linear"], nonempty=True)
    """``knn``: votes of the nearest patches; ``linear``: a linear classifier of patches."""
    memory: int = setting(102_400, min=1)
    """Maximum number of training patches in memory, sampled from all images."""
    k: int = setting(30, min=1)
    """Number of nearest patches that vote."""
    temperature: float = setting(0.02, above=0)
    """Temperature of the votes; a large temperature gives all neighbors nearly equal weight."""
    lr: list[float] = setting([0.0001, 0.001, 0.01, 0.1], above=0, nonempty=True)
    """Learning rates of the linear heads, which are trained simultaneously; the best is chosen on
    held-out training images.
    """
    steps: int = setting(1000, min=1)
    """Number of steps of the linear heads."""
    weight_decay: float = setting(0.0001, min=0)
    """Decoupled weight decay of the linear heads; biases are not decayed."""
    held_out: float = setting(0.2, above=0, below=1)
    """Share of the training images that is held out to choose the learning rate."""
    images: int | None = setting(None, min=1)
    """Maximum number of images of each set, chosen at random; null: all."""
    seed: int = setting(0, min=0)
    """Seed of the choice of images and patches, and of their order."""

    def fit_linear(self, features: Tensor, shares: Tensor, rates: Sequence[float]) -> LinearHeads:
        """Fit a linear head for each learning rate, see ``fit_linear_heads``."""
        steps, decay = self.steps, self.weight_decay
        return fit_linear_heads(
            features, shares, rates, steps=steps, weight_decay=decay, seed=self.seed
        )


def sample_patches(
    patches: PatchFeatures,
    batches: EvalBatches,
    options: HeadOptions,
    num_images: int,
    masks_of: Callable[[Batch], Tensor],
    num_classes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sample of labeled patches: features (M, E), class shares (M, C), images (M,).

    Several ranks share the images, and all get the same sample.

    Args:
        patches: Patch features.
        batches: The training images.
        options: Size and seed of the sample.
        num_images: Number of training images.
        masks_of: Batch -> class numbers (B, S, S), negative for ignored pixels.
        num_classes: Number of classes, C.
    """
    memory = PatchMemory(options.memory, num_images, options.seed)

    def offer(batch: Batch) -> dict[int, int]:
        maps = patches(batch.all_views[0])
        grid = (maps.shape[2], maps.shape[3])
        shares = class_shares(masks_of(batch).to(maps.device), grid, num_classes)
        return memory.offer(maps, shares, batch.index)

    for counts in in_order(offer, batches):
        memory.add(counts)
    return memory.finish(batches.device)


def hits(scores: Tensor, shares: Tensor) -> Tensor:
    """Return the sum over patches of the share of correctly classified pixels.

    All pixels of a patch get the class with its highest score.

    Args:
        scores: Scores of patches (m, C).
        shares: Class shares of the patches (m, C).
    """
    return shares.gather(1, scores.argmax(dim=1, keepdim=True)).sum()


def fit_heads(
    options: HeadOptions, features: Tensor, shares: Tensor, images: Tensor, quality: Quality = hits
) -> tuple[dict[str, Scores], dict[str, float]]:
    """Fit the heads; return them by name, and the chosen learning rate as ``linear_lr``.

    Args:
        options: Options of the heads.
        features: Patches in memory (M, E).
        shares: Class shares of the patches (M, C).
        images: Their image numbers (M,).
        quality: Metric that the chosen learning rate maximizes on held-out images.

    Raises:
        UserError: If there are fewer patches than ``k``, or only one image to choose among several
            learning rates.
    """
    heads: dict[str, Scores] = {}
    facts: dict[str, float] = {}
    if "knn" in options.heads:
        if options.k > len(features):
            raise UserError(
                f"k: {options.k} neighbors are asked for, and there are {len(features)} labeled "
                f"patches; use at most {len(features)}"
            )
        bank = Bank(features)
        heads["knn"] = lambda rows: vote(bank, shares, rows, options.k, options.temperature)
    if "linear" in options.heads:
        rate = _best_rate(options, features, shares, images, quality)
        linear = options.fit_linear(features, shares, [rate])
        heads["linear"] = lambda rows: linear.scores(rows)[0]
        facts["linear_lr"] = rate
    return heads, facts


def _best_rate(
    options: HeadOptions, features: Tensor, shares: Tensor, images: Tensor, quality: Quality
) -> float:
    """Return the only learning rate, or the one with the best quality on held-out images."""
    if len(options.lr) == 1:
        return options.lr[0]
    numbers = torch.unique(images)
    check_choice(len(numbers))
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(options.seed))
    num_held_out = min(len(numbers) - 1, max(1, round(options.held_out * len(numbers))))
    held_out = torch.isin(images, numbers[order[:num_held_out].to(numbers.device)])
    heads = options.fit_linear(features[~held_out], shares[~held_out], options.lr)
    values = [float(quality(row, shares[held_out])) for row in heads.scores(features[held_out])]
    return options.lr[max(range(len(values)), key=values.__getitem__)]


def check_choice(num_images: int) -> None:
    """Raise UserError if fewer than two images have labels; call it for several learning rates."""
    if num_images < 2:
        raise UserError(
            "lr: 1 training image with labels leaves none to choose a learning rate on; give one, "
            "lr=[0.001], or heads=[knn]"
        )
