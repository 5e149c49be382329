"""SimSiam: a predictor and a stop-gradient, without negatives or a slow teacher.

Chen and He, Exploring Simple Siamese Representation Learning, CVPR 2021, arXiv:2011.10566.

B: images per rank, D: width of projector and predictor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.methods.base import Method
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("my_simsiam")
class SimSiam(Method):
    """Prediction of each view's projection from the other view, with a stop-gradient."""

    loss_reduction = "samples"
    views = 2
    per_view = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = 2048  # D
        hidden_dim: int = 512  # the predictor's bottleneck

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projector of section 3, three layers each with BatchNorm, and the predictor."""
        dim = self.config.out_dim
        return ProjectorPredictor(
            mlp(embed_dim, dim, dim, dim, bias=False, last_norm=True, last_affine=False),
            mlp(dim, self.config.hidden_dim, dim, bias=False),
        )

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return eq. 2 for both directions; ``output`` (2, B, 2, D)."""
        projection, prediction = output.unbind(2)  # (2, B, D)
        first, second = negative_cosine(prediction, projection.detach().flip(0)) / 2
        return {"first": first, "second": second}

    @property
    def chance_loss(self) -> float | None:
        """None: the expected loss of unrelated vectors is 0, so a ratio to it is undefined."""
        return None


@in_full_precision
def negative_cosine(prediction: Tensor, projection: Tensor) -> Tensor:
    """Return eq. 1 of each view, averaged over images; both (2, B, D); -1 if all agree."""
    return -F.cosine_similarity(prediction, projection, dim=2).mean(dim=1)
