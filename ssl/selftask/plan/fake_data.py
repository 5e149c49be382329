"""Fake data of a run: sizes, and random batches with the right shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from selftask.batch import Batch, Draws, Extras
from selftask.config.checks.grid import output_side
from selftask.config.checks.requirements import required
from selftask.config.schema import Config, num_views
from selftask.data.tokenizers.base import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class FakeData:
    """Replacement for the data module of a task, without data.

    Args:
        config: Config of the run.
        num_samples: Number of samples in an epoch.
        num_images: Number of training images.
        channels: Number of image channels.
        num_classes: Number of classes; 0 without labels.
        side: Height and width in pixels of views that keep the size of the images; None if there
            are none.
        origin: Text on the origin of the numbers.
    """

    config: Config
    num_samples: int
    num_images: int
    channels: int = 3
    num_classes: int = 0
    side: int | None = None
    origin: str = ""

    has_test = False
    train_source = val_source = None
    val_sources: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    fingerprint: Any = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of captions."""
        return build_tokenizer(self.config.data.tokenizer)

    @cached_property
    def sides(self) -> dict[str, int]:
        """Height and width of the views by group, in pixels; 0 if they are unknown."""
        numbers = num_views(self.config.views)
        return {
            name: output_side(group.transforms) or self.side or 0
            for name, group in self.config.views.items()
            if numbers[name]
        }

    def views(self, size: int, device: torch.device) -> dict[str, list[Tensor]]:
        """Return random views by group, each (size, C, H, W), float32, uniform in [0, 1).

        Their memory format is channels last, as from the loader.
        """
        numbers = num_views(self.config.views)
        shape = (size, self.channels)
        return {
            name: [
                torch.rand(*shape, side, side, device=device).to(memory_format=torch.channels_last)
                for _ in range(numbers[name])
            ]
            for name, side in self.sides.items()
        }

    def batch(self, views: dict[str, list[Tensor]], size: int, device: torch.device) -> Batch:
        """Return a batch with the given views; all its other tensors are real.

        Args:
            views: Views by group, each (B, C, H, W); they may be fake tensors.
            size: Number of samples, B.
            device: Device of the other tensors, except for ``key``, which is on the CPU.
        """
        index = torch.arange(size) % self.num_images
        key = torch.stack([torch.zeros_like(index), index], dim=1)
        return Batch(
            views=views,
            labels=(index % max(1, self.num_classes)).to(device),
            index=index.to(device),
            key=key,
            extras=self._extras(size, device),
            draws={name: [_draws(size, device)] * len(group) for name, group in views.items()},
        )

    def unreadable_state(self) -> dict[str, Any]:
        """Return an empty dict; every image is readable."""
        return {}

    def _extras(self, size: int, device: torch.device) -> Extras:
        """Return the captions (B, L) or numbers (B,) that the method requires, if any."""
        method, extras = self.config.method, Extras()
        if "captions" in required(method.name):  # (B, L) token ids, of half the maximum length
            tokens = torch.zeros(size, self.tokenizer.length, dtype=torch.int64, device=device)
            tokens[:, : self.tokenizer.length // 2] = 1
            extras["caption"] = tokens
        if "numbers" in required(method.name):
            numbers = torch.ones(size, device=device)
            extras.update(dict.fromkeys(method.args["targets"], numbers))
        return extras


def _draws(size: int, device: torch.device) -> Draws:
    """Return the draws of views that show the whole image."""
    return Draws(
        matrix=torch.eye(2, 3, device=device).repeat(size, 1, 1),
        image_size=torch.ones(size, 2, device=device),
        params={},
    )
