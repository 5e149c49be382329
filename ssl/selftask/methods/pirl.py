"""PIRL: match an image and its shuffled tiles with the image's entry in a memory bank.

Misra and van der Maaten, Self-Supervised Learning of Pretext-Invariant Representations, CVPR 2020,
arXiv:1912.01991.

B: images per rank; N: images of the data set; K: negatives of an image; T: tiles; D: width of the
heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import num_views
from selftask.methods.base import Method, NumViews
from selftask.models.build import embed_dim
from selftask.models.losses.noise_contrast import (
    Normalizer,
    chance_of_nce,
    info_nce,
    nce,
    other_images,
)
from selftask.models.memory_bank import MemoryBank
from selftask.models.network import Network, forward_by_size
from selftask.random.keyed import uniform
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("pirl")
class PIRL(Method):
    """PIRL (arXiv:1912.01991): contrast of an image and its jigsaw tiles with a memory bank."""

    columns = {
        "image": "Term of the loss: whole images.",
        "tiles": "Term of the loss: jigsaw tiles.",
    }
    loss_reduction = "samples"  # negatives come from the memory
    views: ClassVar[dict[str, NumViews]] = {"image": 1, "tiles": (2, None)}
    requires = ("index",)  # the memory has an entry for each image

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        loss: Literal["nce", "info_nce"] = "info_nce"
        """How the image is distinguished from its negatives: by noise-contrastive estimation, as in
        the paper, or by a softmax.
        """
        num_negatives: int = setting(32000, min=1, tiny=16)
        """Negatives drawn from the memory bank, K."""
        temperature: float = setting(0.07, above=0)
        """Temperature of the similarities."""
        tiles_weight: float = setting(0.5, min=0, max=1)
        """Weight of the loss of tiles, lambda in eq. 5."""
        momentum: float = setting(0.5, min=0, max=1)
        """Momentum of the memory bank."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.loss == "nce":
            self.normalizer = Normalizer()
        self.pending: list[tuple[Tensor, Tensor]] = []  # index and features since the last step

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        num_tiles = num_views(task.config.views)["tiles"]
        return TilesNetwork(backbone, embed_dim(backbone), num_tiles, self.config.out_dim)

    def setup(self, task: Task) -> None:
        self.memory = MemoryBank(task.data_module.num_images, self.config.out_dim)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Draw the order of each image's tiles and the indices of its negatives."""
        tiles, seed = batch.views["tiles"], task.config.train.seed
        key = batch.key.to(batch.index.device, non_blocking=True)
        draws = uniform(seed, key, len(tiles) + self.config.num_negatives)
        order = draws[:, : len(tiles)].argsort(dim=1, stable=True)  # (B, T)
        others = other_images(draws[:, len(tiles) :], batch.index, len(self.memory))
        batch["negatives"] = others  # (B, K)
        batch.input = (batch.views["image"] + tiles, order)

    def on_forward(self, task: Task) -> None:
        """Collect the image's features for the memory, which is updated in ``on_update``."""
        batch, features = task.last_batch, task.last_batch.output[0].detach()
        if self.config.loss == "nce":
            batch["normalizer"] = self.normalizer.of(
                features, self.memory, batch["negatives"], self.config.temperature
            )
        if task.train:
            self.pending.append((batch.index, features))

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of equation 5; ``output`` (2, B, D)."""
        image, tiles = output  # (B, D) each
        positive, negatives = self.memory[batch.index], self.memory[batch["negatives"]]
        temperature, share = self.config.temperature, self.config.tiles_weight
        contrast: Callable[..., Tensor] = info_nce
        if self.config.loss == "nce":
            contrast = partial(nce, normalizer=batch["normalizer"], num_images=len(self.memory))
        return {
            "tiles": share * contrast(tiles, positive, negatives, temperature),
            "image": (1 - share) * contrast(image, positive, negatives, temperature),
        }

    def on_update(self, task: Task) -> None:
        """Update the memory; in the first step, set NCE's constant for the rest of the run."""
        if self.config.loss == "nce":
            self.normalizer.keep(task.last_batch["normalizer"])
        for index, features in self.pending:
            self.memory.update(index, features, self.config.momentum)
        self.pending.clear()

    @property
    def chance_loss(self) -> float:
        """Loss if every entry of the memory is equally likely."""
        negatives = self.config.num_negatives
        return chance_of_nce(negatives) if self.config.loss == "nce" else math.log1p(negatives)


class TilesNetwork(Network):
    """Image and tiles (B, C, H, W), order of tiles (B, T) -> (2, B, D): image, then tiles.

    A linear layer is applied to each tile, and another one to the concatenated tiles of an image.
    """

    def __init__(self, backbone: nn.Module, embed_dim: int, num_tiles: int, out_dim: int) -> None:
        head = nn.ModuleDict(
            {
                "image": nn.Linear(embed_dim, out_dim),
                "tile": nn.Linear(embed_dim, out_dim),
                "tiles": nn.Linear(num_tiles * out_dim, out_dim),
            }
        )
        super().__init__(backbone, head)

    def forward(self, inputs: tuple[list[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        views, order = inputs
        features = forward_by_size(self.backbone, views)  # ((1 + T) * B, E)
        self.embedding = features.detach()
        head: nn.ModuleDict = self.head  # type: ignore[assignment]
        image, *tiles = features.chunk(len(views))
        parts = head["tile"](torch.stack(tiles, dim=1))  # (B, T, D)
        shuffled = parts.gather(1, order[..., None].expand_as(parts))
        return torch.stack([head["image"](image), head["tiles"](shuffled.flatten(1))])
