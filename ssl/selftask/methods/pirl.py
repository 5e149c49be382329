"""PIRL: match an image and its shuffled tiles with the image's entry in a memory bank.

B: images per rank; K: negatives of an image; T: tiles; D: width of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import num_views
from selftask.methods.base import NumViews, Task
from selftask.methods.families.memory_contrast import MemoryContrast
from selftask.models.build import embed_dim
from selftask.models.network import Network
from selftask.registry import register_method


@register_method("pirl")
class PIRL(MemoryContrast):
    """PIRL (arXiv:1912.01991): recognizes an image by its shuffled tiles among all images.

    Loss: ``lambda L(m, tiles) + (1 - lambda) L(m, image)`` (eq. 5) with an entry m of the memory. L
    is a softmax over negatives by default, and NCE in the paper (``loss: nce``).

    Use it in place of ``npid`` if the order of an image's parts should not matter.

    Differs from the authors' code:

    * Image and tiles are compared with the same negatives, and an image is never its own negative;
      in the authors' code both have separate negatives, drawn from all images.
    * The normalization constant of NCE is estimated from the negatives of the image; in the
      authors' code, from those of the tiles and the positive.
    * There is no random photometric shift of the channels.
    """

    paper = (
        "Misra and van der Maaten, Self-Supervised Learning of Pretext-Invariant "
        "Representations, CVPR 2020"
    )
    columns = {
        "image": "Term of the loss: whole images.",
        "tiles": "Term of the loss: jigsaw tiles.",
    }
    views: ClassVar[dict[str, NumViews]] = {"image": 1, "tiles": (2, None)}

    @dataclass(frozen=True, kw_only=True)
    class Config(MemoryContrast.Config):
        loss: Literal["nce", "info_nce"] = "info_nce"
        """How the image is distinguished from its negatives. nce: by noise-contrastive estimation,
        as in the paper; info_nce: by a softmax.
        """
        num_negatives: int = setting(32000, min=1, tiny=16)
        """Number of negatives drawn from the memory bank, K."""
        tiles_weight: float = setting(0.5, min=0, max=1)
        """Weight of the loss of tiles, lambda in eq. 5."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        num_tiles = num_views(task.config.views)["tiles"]
        return TilesNetwork(backbone, embed_dim(backbone), num_tiles, self.config.out_dim)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Draw the order of each image's tiles, and ``batch["negatives"]`` (B, K).

        The input is the list of image and tiles, and the order (B, T).
        """
        tiles = batch.views["tiles"]
        order = self.draw_negatives(batch, task, others=len(tiles)).argsort(dim=1, stable=True)
        batch.input = (batch.views["image"] + tiles, order)  # order (B, T)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of eq. 5 for ``output`` (2, B, D)."""
        image, tiles = self.contrast(batch, *output)
        weight = self.config.tiles_weight
        return {"tiles": weight * tiles, "image": (1 - weight) * image}


class TilesNetwork(Network):
    """Network from image and tiles (B, C, H, W) and the tiles' order (B, T) to outputs (2, B, D).

    Output 0 is a linear layer of the image's features. Output 1 is computed from the tiles: one
    layer is applied to each tile, and another one to the concatenated results.
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
        features = self.pooled(views)  # ((1 + T) * B, E)
        head: nn.ModuleDict = self.head  # type: ignore[assignment]
        image, *tiles = features.chunk(len(views))
        parts = head["tile"](torch.stack(tiles, dim=1))  # (B, T, D)
        shuffled = parts.gather(1, order[..., None].expand_as(parts))
        return torch.stack([head["image"](image), head["tiles"](shuffled.flatten(1))])
