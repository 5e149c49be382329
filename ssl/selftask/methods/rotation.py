"""Rotation: predict by which multiple of 90 degrees an image is rotated.

B: images per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.pretext import Pretext
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("rotation")
class Rotation(Pretext):
    """RotNet (arXiv:1803.07728): predicts by which multiple of 90 degrees an image is rotated.

    Loss: ``-log softmax(s)[rotation]`` of the scores s of the four rotations.

    Use it as a cheap baseline; not for images without an upright direction.
    """

    paper = (
        "Gidaris et al., Unsupervised Representation Learning by Predicting Image Rotations, "
        "ICLR 2018"
    )
    views = 1
    num_classes = 4

    @dataclass(frozen=True, kw_only=True)
    class Config:
        all_rotations: bool = True
        """Whether a batch contains all four rotations of each image, as in the paper; false: one
        drawn at random, as in VISSL.
        """

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build a linear classifier."""
        return nn.Linear(embed_dim, self.num_classes)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Rotate the images counterclockwise by multiples of 90 degrees.

        Sets ``batch["classes"]`` (V, B), the number of quarter turns. V is 4 with
        ``all_rotations``, else 1: one random rotation of each image. Raises UserError if the images
        are not squares.
        """
        (images,) = batch.all_views
        height, width = images.shape[2:]
        if height != width:
            raise UserError(
                f"views: rotation turns squares, and views have {height}x{width} pixels; give both "
                "sides one size"
            )
        rotated = [torch.rot90(images, turns, (2, 3)) for turns in range(self.num_classes)]
        turns = torch.arange(self.num_classes, device=images.device)
        if self.config.all_rotations:
            batch["classes"] = turns[:, None].expand(-1, len(images))
            batch.input = rotated
            return
        key = batch.key.to(images.device, non_blocking=True)
        draws = uniform(task.config.train.seed, key, 1)[:, 0]
        classes = (draws * self.num_classes).long()  # (B,)
        batch["classes"] = classes[None]
        batch.input = [torch.stack(rotated)[classes, torch.arange(len(images), device=key.device)]]

    def meter_input(
        self, output: Tensor, batch: Batch, head: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the scores (V * B, 4) and the numbers of quarter turns (V * B,)."""
        return output.flatten(0, 1), batch["classes"].flatten()
