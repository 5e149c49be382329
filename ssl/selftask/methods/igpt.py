"""Image GPT: predict the color of the next pixel, in raster order.

B: images per rank, N: patches of an image, h x w in a grid, T: predicted ones, C: channels, K:
colors of the palette.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.view_pixels import ViewPixels
from selftask.models.build import embed_dim
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("igpt")
class IGPT(ViewPixels):
    """Image GPT: predicts the color of each pixel from the previous ones, like a language model.

    The backbone is a ``causal_vit``, whose patches serve as pixels: their mean color is predicted.
    Use ``patch_size: 1`` and small images as in the paper, or larger patches. The first patch is
    predicted from the start token. In deep networks, layers in the middle have the best features
    (``eval.layers``).

    Loss: ``-log softmax(s_k)[color of k + 1]`` of the scores s_k that are computed from pixels up
    to k.

    Published: CIFAR-10 top-1 of iGPT-L 96.3 linear, 99.0 fine-tuned (paper, abstract).

    Use it as a baseline of generative pretraining; it is slow, since it has a token for each pixel.

    Differs from the authors' code:

    * The palette is a grid of 8 x 8 x 8 colors; in the authors' code, 512 clusters of ImageNet's
      colors.
    * The transformer reads pixels through a linear layer; in the authors' code it has a trained
      vector for each color.
    * The second objective of the paper, to predict masked pixels (BERT), is not implemented.
    """

    paper = "Chen et al., Generative Pretraining from Pixels, ICML 2020"
    loss_reduction = "samples"
    sample_dim = 0
    views = 1
    requires = ("dense",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        levels: int = setting(8, min=2, max=256)
        """Number of levels of a channel in the palette of K = levels^C colors (8 for RGB: 512)."""

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError unless the backbone is causal, as ``causal_vit`` is."""
        if not getattr(backbone, "causal", False):
            raise UserError(
                f"backbone: patches of a {type(backbone).__name__} see those that igpt predicts; "
                "take causal_vit"
            )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the backbone with a linear layer from a token to scores of the next color."""
        self.check_backbone(backbone)
        self.read_moments(task)
        self.num_colors: int = self.config.levels**task.data_module.channels
        return NextColorNetwork(backbone, nn.Linear(embed_dim(backbone), self.num_colors))

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["colors"]`` (B, N), the palette indices of the patches' mean colors."""
        batch = task.last_batch
        images = to_float32(batch.all_views[0]) * self.std + self.mean
        pixels = F.adaptive_avg_pool2d(images, batch.output.features.tokens.grid)
        batch["colors"] = palette_colors(pixels, self.config.levels)

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the cross-entropy of scores (B, T, K) with the colors of the last T patches."""
        scores = to_float32(output.prediction)
        colors = batch["colors"][:, -scores.shape[1] :]
        return F.cross_entropy(scores.flatten(0, 1), colors.flatten())

    @property
    def chance_loss(self) -> float:
        """Loss of equal scores: ln(number of colors)."""
        return math.log(self.num_colors)


class NextColorNetwork(Network):
    """Causal backbone, and a head that predicts a patch's color from the previous token.

    ``prediction`` of its output is (B, T, K). T is N, or N - 1 without a start token.
    """

    def forward(self, views: Sequence[Tensor]) -> PatchOutput:  # type: ignore[override]
        (images,) = views
        features = self.extract(images)
        first = max(features.prefix.shape[1] - 1, 0)  # the last prefix token precedes the patches
        return PatchOutput(self.head(features.tokens.sequence[:, first:-1]), features)


def palette_colors(pixels: Tensor, levels: int) -> Tensor:
    """Return the palette index of each pixel's color, (B, h * w) int64, in raster order.

    Args:
        pixels: (B, C, h, w) in [0, 1].
        levels: Levels of a channel; the first channel counts by 1, the second by ``levels``.
    """
    bins = (pixels * levels).long().clamp(0, levels - 1)
    weights = levels ** torch.arange(bins.shape[1], device=bins.device)
    return (bins * weights[:, None, None]).sum(dim=1).flatten(1)
