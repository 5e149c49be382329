"""NEPA: predict the embedding of the next patch, in raster order.

B: images per rank, N: patches of an image, E: width of the backbone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.methods.base import Method, Task
from selftask.models.features.extract import adapter_of
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("nepa")
class NEPA(Method):
    """NEPA (arXiv:2512.16922): predicts the embedding of the next patch; no decoder, no teacher.

    Patches are projected to embeddings, and the transformer, in which each patch attends to itself
    and to earlier patches, predicts the next embedding.

    Loss: ``-cos(f(z_1 ... z_k), z_{k+1})`` of embeddings z and the network f; the target z_{k+1}
    has no gradient.

    Published: ImageNet top-1 after fine-tuning of ViT-B 83.8, ViT-L 85.3 (paper, abstract).

    Use it before fine-tuning, as a simple alternative to masked images; features are weak by k-NN.

    Implemented from the paper and its pseudo-code; not compared with results of the authors' code.
    Targets are projections of patches without their positions.
    """

    paper = "Xu et al., Next-Embedding Prediction Makes Strong Vision Learners, arXiv 2025"
    loss_reduction = "samples"
    sample_dim = None  # the prediction is a pair, and only one of it has a gradient
    views = 1
    requires = ("attention",)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return a network whose patches attend to earlier ones; it has no head."""
        return NextPatchNetwork(backbone, nn.Identity())

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the loss; row k of the prediction (B, N, E) predicts embedding k + 1."""
        return next_embedding_loss(*output.prediction)


class NextPatchNetwork(Network):
    """Backbone whose patches attend to themselves and to earlier patches.

    ``prediction`` of its output is a pair of tensors (B, N, E): predicted and actual embeddings.
    """

    def forward(self, views: Sequence[Tensor]) -> PatchOutput:  # type: ignore[override]
        (images,) = views
        with torch.no_grad():
            embedded = adapter_of(self.backbone).embed(images)  # (B, N, E)
        length = embedded.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=images.device).tril()
        features = self.extract(images, attend=earlier.expand(len(images), -1, -1))
        return PatchOutput((features.patches, embedded), features)


@in_full_precision
def next_embedding_loss(predicted: Tensor, embedded: Tensor) -> Tensor:
    """Return the mean negative cosine of predictions and the embeddings of next patches.

    Args:
        predicted: (B, N, E); row k predicts embedding k + 1, and the last row is ignored.
        embedded: (B, N, E), without gradient.
    """
    return -F.cosine_similarity(predicted[:, :-1], embedded[:, 1:], dim=2).mean()
