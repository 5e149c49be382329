"""CrossMAE: MAE whose decoder attends only to the encoded patches.

B: images per rank, N: patches of an image, K kept and Q predicted ones, E: width of the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.masked_patches import Kept, initialize_network
from selftask.methods.mae import MAE
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid
from selftask.models.network import Network, PatchOutput
from selftask.models.predictors.memory_predictor import MemoryPredictor
from selftask.registry import register_method


@register_method("crossmae")
class CrossMAE(MAE):
    """CrossMAE (arXiv:2401.14391): MAE that predicts some of the masked patches independently.

    Loss: ``mean (x - x')^2`` of the standardized pixels x of the predicted patches and their
    predictions x'.

    Published: ImageNet fine-tuned top-1 of ViT-S 79.3, ViT-B 83.7, ViT-L 85.4 after 800 epochs in
    which all masked patches are predicted (authors' README).

    Use it in place of ``mae`` if its decoder costs too much.

    Differs from the authors' code:

    * The decoder does not read the patch embeddings before the first block, and reads the last
      layer after the final norm, which is thus trained.
    """

    paper = "Fu et al., Rethinking Patch Dependence for Masked Autoencoders, TMLR 2025"
    requires = ("subset", "hidden")

    @dataclass(frozen=True, kw_only=True)
    class Config(MAE.Config):
        predicted_ratio: float = setting(0.25, above=0, max=1)
        """Number of predicted patches, chosen among the masked ones, as a share of all patches."""
        decoder_depth: int = setting(12, min=1, tiny=1)
        """Number of blocks of the decoder."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network, initialized as in MAE, with fixed positions.

        A loaded backbone keeps its weights and positions.

        Raises:
            UserError: If ``mask_ratio`` or ``predicted_ratio`` does not fit the number of patches,
                or if a backbone that is not loaded has no positions.
        """
        adapter = adapter_of(backbone)
        self.num_predicted(adapter.built_grid)
        self.patch_size = adapter.patch_size[0]
        decoder = MemoryPredictor(
            embed_dim(backbone),
            adapter.built_grid,
            adapter.num_layers,
            num_out=task.data_module.channels * self.patch_size**2,
            **self.config.decoder_sizes,
        )
        initialize_network(backbone, decoder, task)
        return CrossNetwork(backbone, decoder)

    def num_predicted(self, grid: Grid) -> int:
        """Return the number of predicted patches; raise UserError if it is 0 or too large."""
        num_patches = grid[0] * grid[1]
        predicted = int(num_patches * self.config.predicted_ratio)
        masked = num_patches - self.num_kept(grid)
        if not 0 < predicted <= masked:
            raise UserError(
                f"method.predicted_ratio={self.config.predicted_ratio} is {predicted} of "
                f"{num_patches} patches, and {masked} are masked; 1 to {masked} can be predicted"
            )
        return predicted

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Kept:
        """Keep patches as MAE does, and choose some of the others at random to predict."""
        kept = super().draw_mask(seed, key, grid)
        return kept._replace(predict=kept.predict[..., : self.num_predicted(grid)])


class CrossNetwork(Network):
    """Encoder of some patches, and a decoder that predicts others: (B, 1, Q, outputs)."""

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        adapter = adapter_of(self.backbone)
        inner = range(adapter.num_layers - 1)
        features = self.extract(images, keep=mask.keep, layers=inner)
        layers = [*(features.hidden[number].sequence for number in inner), features.tokens.sequence]
        predicted = self.head(layers, mask.predict[:, 0], adapter.grid(*images.shape[-2:]))
        return PatchOutput(predicted[:, None], features, mask)
