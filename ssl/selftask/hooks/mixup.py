"""Mixup and CutMix: mix pairs of images of a batch, and their labels.

Zhang et al., mixup, ICLR 2018, arXiv:1710.09412; Yun et al., CutMix, ICCV 2019, arXiv:1905.04899.

B: images per rank, C: classes, P = B / 2: pairs, lambda: the share of an image that stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.hooks.base import Hook, Task
from selftask.random.splitmix import hash_words
from selftask.registry import register_hook

_STREAM = 0x6D697875  # "mixu": separates these draws from other uses of the same seed


@register_hook("mixup")
@dataclass(eq=False, kw_only=True)
class Mixup(Hook):
    """Mixes pairs of images of a batch, in every view; labels become (B, C) probabilities.

    Images 2i and 2i + 1 of the shuffled batch are a pair with the same lambda and box. Both depend
    only on the seed, the epoch and the first image of the pair, not on the number of ranks or
    workers or on a resume. Methods without labels get mixed images only. CutMix weighs labels by
    their share of the pixels of a view, averaged over the views.
    """

    priority: ClassVar[int] = 40

    mixup: float = setting(0.8, min=0, also=["mixup_alpha", "alpha"])
    """Parameter alpha of mixup's distribution Beta(alpha, alpha); 0: no mixup."""
    cutmix: float = setting(1.0, min=0, also=["cutmix_alpha"])
    """Parameter alpha of CutMix's distribution Beta(alpha, alpha); 0: no CutMix."""
    p: float = setting(1.0, min=0, max=1, also=["prob", "mix_prob"])
    """Probability that a pair is mixed."""
    switch_p: float = setting(0.5, min=0, max=1, also=["switch_prob"])
    """Probability of CutMix instead of mixup for a mixed pair, if both are enabled."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not self.mixup and not self.cutmix:
            yield "mixup: mixup and cutmix are 0; one of them must be above 0"

    def on_start(self, task: Task) -> None:
        share = task.config.train.batch_size // task.world.size
        if share % 2:
            raise UserError(
                f"hooks.mixup mixes pairs of images, and a rank has {share} of "
                f"train.batch_size={task.config.train.batch_size}; an even number is needed"
            )
        self.seed = task.config.train.seed
        has_labels = {"labels", "numbers"}.intersection(task.loss.requires)
        self.num_classes = getattr(task.loss, "num_classes", None) if has_labels else None

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if task.train:
                self.mix(batch)
                task.loss.prepare_batch(batch, task)
            yield batch

    def mix(self, batch: Batch) -> None:
        """Mix the views of a batch in place, and its labels if the method uses them.

        Raises:
            UserError: If the labels to mix are not (B,).
        """
        if self.num_classes is not None and batch.labels.ndim > 1:
            raise UserError("hooks.mixup: labels with unknown entries (method.targets) do not mix")
        lam, box, is_cut = (
            torch.from_numpy(drawn).to(batch.labels.device, non_blocking=True)
            for drawn in self.draw(batch.key[::2].tolist())
        )
        areas = []
        for group in batch.views.values():
            for number, view in enumerate(group):
                keep, area = keep_mask(lam, box, is_cut, *view.shape[2:])
                keep = keep.to(view.dtype)
                group[number] = view * keep + _swapped(view) * (1 - keep)
                areas.append(area)
        if self.num_classes is not None:
            share = torch.stack(areas).mean(dim=0).repeat_interleave(2)[:, None].float()  # (B, 1)
            one_hot = F.one_hot(batch.labels, self.num_classes).float()  # (B, C)
            batch.labels = one_hot * share + _swapped(one_hot) * (1 - share)

    def draw(self, keys: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the parameters of each pair, from the key of its first image.

        Returns:
            lambda (P,) float32, 1 for a pair that is not mixed; boxes (P, 4) float32: center y and
            x, height and width as shares of the image; whether CutMix is used for the pair, (P,)
            bool.
        """
        lam, box = np.ones(len(keys), np.float32), np.zeros((len(keys), 4), np.float32)
        is_cut = np.zeros(len(keys), bool)
        for row, key in enumerate(keys):
            rng = np.random.Generator(np.random.SFC64(hash_words(self.seed, _STREAM, *key)))
            mixed, switch = rng.random(2)
            if mixed >= self.p:
                continue
            is_cut[row] = self.cutmix > 0 and (not self.mixup or switch < self.switch_p)
            alpha = self.cutmix if is_cut[row] else self.mixup
            lam[row] = rng.beta(alpha, alpha)
            side = np.sqrt(1 - lam[row])
            box[row] = (*rng.random(2), side, side)
        return lam, box, is_cut


def unmixed(task: Task, labels: Tensor) -> Tensor:
    """Return the labels of a training batch for meters, (B,) if they were mixed.

    Args:
        task: The task.
        labels: (B, C) probabilities with the hook ``mixup`` and a method that predicts classes, of
            which the largest is used. Otherwise they are returned unchanged.
    """
    mixups = [hook for hook in task.hooks if isinstance(hook, Mixup)]
    is_mixed = any(hook.num_classes is not None for hook in mixups)
    return labels.argmax(dim=1) if is_mixed else labels


def keep_mask(
    lam: Tensor, box: Tensor, is_cut: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the share of each image that is kept, for each pixel and on average.

    Args:
        lam: lambda of each pair, (P,).
        box: Boxes of the pairs, (P, 4), as shares of the image; clipped at its border.
        is_cut: True if a box is exchanged, False if all pixels are mixed, (P,).
        height: Height of the view, in pixels.
        width: Width of the view, in pixels.

    Returns:
        (2P, 1, height, width), equal for both images of a pair, and its mean over pixels (P,).
    """
    inside = []
    for axis, size in enumerate((height, width)):
        center, side = box[:, axis, None] * size, box[:, axis + 2, None] * size  # (P, 1)
        position = torch.arange(size, device=box.device)
        low = (center - side / 2).round().clamp(0, size)
        high = (center + side / 2).round().clamp(0, size)
        inside.append((position >= low) & (position < high))  # (P, size)
    outside = ~(inside[0][:, :, None] & inside[1][:, None, :])  # (P, height, width)
    keep = torch.where(is_cut[:, None, None], outside.float(), lam[:, None, None])
    return keep[:, None].repeat_interleave(2, dim=0), keep.mean(dim=(1, 2))


def _swapped(rows: Tensor) -> Tensor:
    """Exchange rows 2i and 2i + 1."""
    return rows.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
