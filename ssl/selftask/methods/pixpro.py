"""PixPro: BYOL for cells of feature maps, which predict the teacher's cells at the same point.

B: images per rank, N: cells of a feature map, E: width of the backbone, D: width of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch, Draws
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.models.build import embed_dim
from selftask.models.heads import mlp
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("pixpro")
class PixPro(EMATeacher):
    """PixPro (arXiv:2011.10043): BYOL for cells of feature maps that show the same point.

    Loss: ``-2 mean cos(y, t)`` of predicted cells y of one view and the teacher's cells t of the
    other, over pairs of cells close to each other in the image, in both directions.

    Published: ImageNet linear top-1 of ResNet-50 55.1 after 400 epochs; detection on VOC 60.2 AP
    (paper).

    Use it to pretrain a convolutional network for detection or segmentation; whole images are not
    compared.

    Differs from the authors' code:

    * The term for whole images, which is disabled in the authors' code, is not implemented.
    """

    paper = (
        "Xie et al., Propagate Yourself: Exploring Pixel-Level Consistency for Unsupervised Visual "
        "Representation Learning, CVPR 2021"
    )
    loss_reduction = "samples"
    views = 2
    requires = ("dense", "boxes")

    @dataclass(frozen=True, kw_only=True)
    class Config(EMATeacher.Config):
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.99, "end": 1.0})
        """Momentum of the teacher."""
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the projector's output, D."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the projector's hidden layer."""
        max_distance: float = setting(0.7, above=0)
        """Largest distance of two cells that form a pair, in diagonals of the larger cell."""
        sharpness: float = setting(2.0, above=0)
        """Exponent of the cosines in eq. 3, gamma."""
        value_layers: int = setting(1, min=0, max=2)
        """Number of layers that transform the propagated features, g in eq. 3."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build projector and pixel propagation: cells (B, N, E) -> (B, N, D)."""
        config = self.config
        projector = CellLayers(mlp(embed_dim, config.hidden_dim, config.out_dim))
        value = (config.out_dim,) * (config.value_layers + 1)
        layers = CellLayers(mlp(*value)) if config.value_layers else nn.Identity()
        return nn.Sequential(projector, PixelPropagation(layers, sharpness=config.sharpness))

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        return CellNetwork(backbone, self.build_head(embed_dim(backbone)))

    def averaged(self, network: Any) -> nn.Module:
        """Return backbone and projector; the teacher does not propagate."""
        return CellNetwork(network.backbone, network.head[0])

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Set the teacher's ``batch["cells"]`` (2, B, N, D), and ``batch["pairs"]`` (B, N, N)."""
        batch = task.last_batch
        output = self.teacher(batch.input)
        batch["cells"] = output.prediction
        first, second = (draw for group in batch.draws.values() for draw in group)
        grid = output.features[0].tokens.grid
        batch["pairs"] = close_cells(first, second, grid, max_distance=self.config.max_distance)

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the loss of ``output.prediction`` (2, B, N, D), summed over both directions."""
        prediction, target, pairs = output.prediction, batch["cells"], batch["pairs"]
        return cell_regression_loss(prediction[0], target[1], pairs) + cell_regression_loss(
            prediction[1], target[0], pairs.mT
        )


class CellNetwork(Network):
    """Backbone, and a head for the cells of two views; each view has its own pass.

    ``prediction`` of its output is (2, B, N, D), and ``features`` is a list with an item per view.
    """

    def forward(self, views: Sequence[Tensor]) -> PatchOutput:  # type: ignore[override]
        of_views = [self.extract(view) for view in views]
        cells = torch.stack([self.head(features.patches) for features in of_views])
        return PatchOutput(cells, of_views)


class CellLayers(nn.Module):
    """Wrapper that applies layers for vectors to each cell of (B, N, D), like 1x1 convolutions.

    BatchNorm statistics are over the cells of all images.

    Args:
        layers: Vectors (B * N, D) -> vectors (B * N, D').
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, cells: Tensor) -> Tensor:
        outputs: Tensor = self.layers(cells.flatten(0, 1))
        return outputs.unflatten(0, cells.shape[:2])


class PixelPropagation(nn.Module):
    """Replaces each cell of a map with a sum over all cells, weighted by similarity (eq. 3).

    Args:
        value: Transform of the cells that are summed, g.
        sharpness: Exponent of the cosines, gamma.

    Shape:
        Input and output (B, N, D).
    """

    def __init__(self, value: nn.Module, *, sharpness: float) -> None:
        super().__init__()
        self.value = value
        self.sharpness = sharpness

    def forward(self, cells: Tensor) -> Tensor:
        return propagate(cells, self.value(cells), sharpness=self.sharpness)


@in_full_precision
def propagate(cells: Tensor, values: Tensor, *, sharpness: float) -> Tensor:
    """Return ``sum_j max(cos(x_i, x_j), 0)^gamma g(x_j)`` for each cell i (eq. 3).

    The values g(x_j) have unit length, as in the published code.

    Args:
        cells: x, (B, N, D).
        values: g(x), (B, N, D).
        sharpness: gamma.
    """
    units = F.normalize(cells, dim=2)
    similarity = (units @ units.mT).clamp(min=0) ** sharpness  # (B, N, N)
    return similarity @ F.normalize(values, dim=2)


@torch.no_grad()
def close_cells(
    first: Draws, second: Draws, grid: tuple[int, int], *, max_distance: float
) -> Tensor:
    """Return which cells of two views are close to each other in the image (eq. 1).

    Args:
        first: Augmentation parameters of the first view, whose cells are the rows of the result.
        second: Augmentation parameters of the second view.
        grid: Rows and columns of the feature map of each view.
        max_distance: Limit of the distance of two centers, in diagonals of the larger cell.

    Returns:
        (B, N, N) bool.
    """
    rows, columns = grid
    diagonals = []  # (B,) each
    for draw in (first, second):
        right, down, _ = draw.matrix.unbind(2)  # (B, 2) each
        diagonals.append(torch.cat([right / columns, down / rows], dim=1).norm(dim=1))
    limit = max_distance * torch.maximum(*diagonals)  # (B,)
    distance = torch.cdist(first.centers(rows, columns), second.centers(rows, columns))
    return distance < limit[:, None, None]


@in_full_precision
def cell_regression_loss(prediction: Tensor, target: Tensor, pairs: Tensor) -> Tensor:
    """Return -2 times the mean cosine of the pairs of an image, averaged over images.

    An image without pairs counts as 0.

    Args:
        prediction: (B, N, D).
        target: (B, N, D).
        pairs: (B, N, N) bool, True for pairs of a prediction (row) and a target (column).
    """
    cosine = F.normalize(prediction, dim=2) @ F.normalize(target, dim=2).mT  # (B, N, N)
    weight = pairs / (pairs.sum(dim=(1, 2), keepdim=True) + 1e-6).to(cosine.dtype)
    of_image = (cosine * weight).sum(dim=(1, 2))
    return -2 * of_image.mean()
