"""Pretext tasks: the network predicts a change that the method has made to an image.

V: views, B: images per rank, C: classes, E: width of the backbone; T: tiles of an image, A:
arrangements of P tiles each.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.methods.base import Method, Task
from selftask.models.build import embed_dim
from selftask.models.network import Network
from selftask.models.precision import to_float32


class Pretext(Method):
    """Method that sets ``batch["classes"]``, which the network learns to predict.

    A subclass sets ``num_classes``, C.

    Shape:
        Classes (V, B), and scores (V, B, C).
    """

    loss_reduction = "samples"
    num_classes: int

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of the scores ``output`` (V, B, C) with the classes."""
        scores = to_float32(output.flatten(0, 1))
        return F.cross_entropy(scores, batch["classes"].flatten())

    @property
    def chance_loss(self) -> float:
        """Cross-entropy of equal scores: ln(classes)."""
        return math.log(self.num_classes)


class TilesPretext(Pretext):
    """Pretext task on the tiles of an image, which are the views of the group ``tiles``.

    An image has A arrangements, each of P of its tiles. The network predicts their classes.

    Shape:
        Classes (B, A), and scores (B, A, C).
    """

    sample_dim = 0
    views = {"tiles": (4, None)}

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        return TilesNetwork(backbone, self.build_head(embed_dim(backbone)))

    def arrange(self, batch: Batch, task: Task) -> tuple[Tensor, Tensor]:
        """Return the numbers of the tiles of each arrangement (B, A, P), and its class (B, A)."""
        raise NotImplementedError(f"{type(self).__name__} arranges no tiles")

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        arranged, batch["classes"] = self.arrange(batch, task)
        batch.input = (batch.views["tiles"], arranged)


class TilesNetwork(Network):
    """Network from T tiles (B, ...) and tile numbers (B, A, P) to scores (B, A, C).

    The head gets the features (N, P, E) of the tiles of N = B * A arrangements.
    """

    def forward(self, inputs: tuple[list[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        tiles, arranged = inputs
        features = self.pooled(tiles).unflatten(0, (len(tiles), -1))  # (T, B, E)
        images = torch.arange(len(arranged), device=arranged.device)[:, None, None]
        rows = features[arranged, images]  # (B, A, P, E)
        scores: Tensor = self.head(rows.flatten(0, 1))
        return scores.unflatten(0, arranged.shape[:2])
