"""Mixed resolutions: views whose size differs from batch to batch."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.checks.grid import multiples, patch_size
from selftask.config.fields import setting
from selftask.config.schema import Component
from selftask.errors import UserError, nearest
from selftask.hooks.base import Hook, Task
from selftask.random.keyed import batch_uniform
from selftask.registry import register_hook

_STREAM = 0x6D697865  # "mixe": separates these draws from other uses of the same seed


@register_hook("mixed_resolution")
@dataclass(eq=False, kw_only=True)
class MixedResolution(Hook):
    """Resizes the views of each training batch to a smaller size, drawn at random for the batch.

    The network then serves images of several sizes, as after the high-resolution stage of DINOv3
    (arXiv:2508.10104, section 5.1). The draw depends on the seed and the number of the batch only:
    all ranks have the same size, also after a resume. The loader makes views in the size of
    ``views``, which must be at least the largest of ``sizes``; they are reduced to squares on the
    device, bicubic and antialiased. ``selftask plan`` counts the sizes of ``views``.
    """

    priority: ClassVar[int] = 35  # before mixup, whose shares are numbers of pixels

    sizes: dict[str, list[int]] = setting(
        missing="give sizes by group of views: {global: [96, 192], local: [48, 96]}", min=1
    )
    """Height and width in pixels by group of views. An index is drawn for each batch, and each
    group gets its size at this index; groups that are not listed keep their size.
    """
    shares: list[float] | None = setting(None, min=0)
    """Probability of each index into the lists of ``sizes``; they sum to 1. null: all equal."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        numbers = {len(sizes) for sizes in self.sizes.values()}
        if len(numbers) != 1 or 0 in numbers:
            yield f"sizes: groups with {sorted(numbers)} sizes; each needs as many, at least one"
        elif self.shares is not None and {len(self.shares)} != numbers:
            yield f"shares: {len(self.shares)} shares of {numbers.pop()} sizes"
        if self.shares is not None and abs(sum(self.shares) - 1) > 1e-6:
            yield f"shares: their sum is {sum(self.shares):g}, not 1"
        patch = patch_size(Component.from_dict(config["backbone"]))
        for group, sizes in self.sizes.items():
            if group not in config["views"]:
                yield f"sizes.{group}: no such group of views; {nearest(group, config['views'])}"
            for size in sizes:
                if patch is not None and size % patch:
                    cut = f"{size} pixels cannot be divided into patches of {patch}"
                    yield f"sizes.{group}: {cut}; {multiples(size, patch)}"

    def on_start(self, task: Task) -> None:
        self.seed = task.config.train.seed

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if task.train:
                self.reduce(batch)
                task.loss.prepare_batch(batch, task)
            yield batch

    def reduce(self, batch: Batch) -> None:
        """Resize the views of a batch to the sizes drawn for it, in place.

        Raises:
            UserError: If one of the sizes is larger than the views.
        """
        entry = self.entry(batch.number)
        for group, sizes in self.sizes.items():
            views = batch.views[group]
            side = min(views[0].shape[-2:])
            if max(sizes) > side:
                raise UserError(
                    f"hooks.mixed_resolution.sizes.{group}: {max(sizes)} pixels are more than the "
                    f"{side} of views.{group}"
                )
            batch.views[group] = [resized(view, sizes[entry]) for view in views]
        batch.drawn.pop("method", None)  # its masks are for the sizes of the loader

    def entry(self, number: int) -> int:
        """Return the index into ``sizes`` that is drawn for the batch of this number."""
        count = len(next(iter(self.sizes.values())))
        shares = self.shares or [1 / count] * count
        drawn = float(batch_uniform(self.seed ^ _STREAM, number, 1))
        return bisect([*accumulate(shares)][:-1], drawn)


def resized(view: Tensor, size: int) -> Tensor:
    """Return a view (B, C, H, W) resized to (B, C, size, size), bicubic and antialiased.

    A view that has this size is returned as it is.
    """
    if view.shape[-2:] == (size, size):
        return view
    return F.interpolate(view, size=(size, size), mode="bicubic", antialias=True)
