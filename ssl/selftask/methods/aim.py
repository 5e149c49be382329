"""AIM: predict the next patch of an image, in raster order.

B: images per rank, N: patches of an image, E: width of the backbone, P: values in a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.masked_patches import MaskedPatches, initialize_network
from selftask.methods.mae import normalize, patchify
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid
from selftask.models.masks import hide_patches
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision
from selftask.models.predictors.residual_mlp import ResidualMLP
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("aim")
class AIM(MaskedPatches):
    """AIM (arXiv:2401.08541): predicts each patch from the previous ones, like a language model.

    The patches of a prefix of random length attend to each other. Each later patch attends to
    itself and to all patches before it. The network thus also learns full attention, which
    evaluations use on whole images.

    Loss: ``mean (x_{k+1} - f(x_1 ... x_k))^2`` over the patches x_{k+1} after the prefix, which are
    standardized; f is the network.

    Published: ImageNet top-1 of an attentive probe: AIM-0.6B 79.4, 1B 82.3, 3B 83.3, 7B 84.0
    (authors' README).

    Use it to train very large transformers on very many images; its features are weak by k-NN.

    Differs from lightly's code; the authors' code for pretraining is not public:

    * A patch predicts the next one; in lightly's code it predicts itself, which it sees.
    * The loss is a mean over the predicted patches of an image, then over images; in lightly's
      code, a mean over all patches, including the prefix.
    * No positions are added before the head. Its layers have biases and equal widths; in lightly's
      code they have no biases, and hidden layers are four times as wide.
    """

    paper = "El-Nouby et al., Scalable Pre-training of Large Autoregressive Image Models, ICML 2024"
    requires = ("attention",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        normalize_pixels: bool = True
        """Whether each target patch is normalized to mean 0 and variance 1."""
        decoder_dim: int = setting(2048, min=1, tiny=16)
        """Width of the head's blocks."""
        decoder_depth: int = setting(12, min=1, tiny=1)
        """Number of residual blocks of the head."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network, initialized as in MAE; a loaded backbone keeps its weights."""
        config = self.config
        self.patch_size = adapter_of(backbone).patch_size[0]
        head = ResidualMLP(
            embed_dim(backbone),
            dim=config.decoder_dim,
            depth=config.decoder_depth,
            num_out=task.data_module.channels * self.patch_size**2,
        )
        initialize_network(backbone, head, task)
        return CausalNetwork(backbone, head)

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Tensor:
        """Return a mask (B, N), True after the prefix, whose length is uniform from 1 to N - 1."""
        num_patches = grid[0] * grid[1]
        length = 1 + (uniform(seed, key, 1) * (num_patches - 1)).long()  # (B, 1)
        return torch.arange(num_patches) >= length

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        batch = task.last_batch
        pixels = patchify(batch.all_views[0], self.patch_size)  # (B, N, P)
        batch["pixels"] = normalize(pixels) if self.config.normalize_pixels else pixels

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the loss; row k of ``output.prediction`` (B, N, P) predicts patch k + 1."""
        return next_patch_loss(output.prediction, batch["pixels"], batch["mask"])

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image and the patches of the prefix."""
        (images,) = batch.all_views
        return {"image": images, "prefix": hide_patches(images, batch["mask"])}

    @property
    def chance_loss(self) -> float | None:
        """Loss of predicting the mean of each patch: 1 with ``normalize_pixels``, else None."""
        return 1.0 if self.config.normalize_pixels else None


class CausalNetwork(Network):
    """Backbone and head; each patch attends to the prefix, to earlier patches and to itself.

    It takes images (B, C, H, W) and a mask (B, N), True after the prefix. ``prediction`` of its
    output is (B, N, P).
    """

    def forward(self, inputs: tuple[Tensor, Tensor]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        features = self.extract(images, attend=prefix_causal(mask))
        return PatchOutput(self.head(features.patches), features, mask)


def prefix_causal(mask: Tensor) -> Tensor:
    """Return the attention mask (B, N, N) bool, True for patches to attend to (section 3.1).

    Each patch attends to the prefix, to earlier patches and to itself.

    Args:
        mask: (B, N) bool, True for patches after the prefix.
    """
    earlier = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
    return earlier | ~mask[:, None]


@in_full_precision
def next_patch_loss(prediction: Tensor, pixels: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared error over the patches after the prefix, then over images.

    Args:
        prediction: (B, N, P); row k predicts patch k + 1, and the last row is ignored.
        pixels: (B, N, P).
        mask: (B, N) bool, True for patches after the prefix, never the first one.
    """
    errors = (prediction[:, :-1] - pixels[:, 1:]).square().mean(dim=2)  # (B, N - 1)
    asked = mask[:, 1:]
    return ((errors * asked).sum(dim=1) / asked.sum(dim=1)).mean()
