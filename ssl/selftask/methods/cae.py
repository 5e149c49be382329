"""CAE: predict the features of masked patches, and their tokens from the predicted features.

B: images per rank, N: patches of an image, K kept and Q masked ones, E: width of the backbone, D:
width of regressor and decoder, T: number of tokens, P: prefix tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.methods.base import Task
from selftask.methods.families.distillation import open_tokenizer, trained_teacher
from selftask.methods.families.masked_patches import Kept, KeptPatches, initialize_network
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import to_float32
from selftask.models.predictors.memory_predictor import MemoryPredictor
from selftask.models.predictors.patch_predictor import transformer_blocks
from selftask.registry import register_method


class MaskedPredictions(NamedTuple):
    """Outputs and targets for the masked patches."""

    features: Tensor
    """(B, Q, E), predicted by the regressor."""
    scores: Tensor
    """(B, Q, T), of the decoder."""
    targets: Tensor
    """(B, Q, E), the encoder's features of the masked patches, without gradients."""


@register_method("cae")
class CAE(KeptPatches):
    """CAE (arXiv:2202.03026): predicts features of masked patches, and BEiT's tokens from them.

    The encoder sees kept patches only. From its output a regressor predicts the encoder's features
    of the masked patches. A decoder predicts the tokens from these predictions alone.

    Loss: ``-log softmax(s)[token] + w mean (f - f')^2`` of masked patches: s are the decoder's
    scores, f the regressor's features, and f' the encoder's features.

    Published: ImageNet top-1 of ViT-B after 800 epochs 68.9 linear, 83.8 fine-tuned (authors'
    README).

    Use it in place of ``beit`` to use the encoder's features without fine-tuning.

    Differs from the authors' code:

    * Masked patches are drawn one by one; in the authors' code, in blocks.
    * The regressor reads the encoder's output, including the class token; in the authors' code it
      reads the output without the class token, and its own predictions.
    * Regressor and decoder have no LayerScale and no stochastic depth.
    """

    paper = (
        "Chen et al., Context Autoencoder for Self-Supervised Representation Learning, IJCV 2024"
    )
    columns = {
        "masked_tokens": "Term of the loss: tokens of masked patches.",
        "masked_features": "Term of the loss: features of masked patches.",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(KeptPatches.Config):
        tokenizer: FrozenModule = trained_teacher("give a run of vqkd or package.module:Class")
        """Tokenizer, as in ``beit``: a run of ``vqkd``, a run with prototypes, ``timm:NAME``, or
        ``package.module:Class``.
        """
        mask_ratio: float = setting(0.5, above=0, below=1)
        """Share of the patches that are masked, drawn at random."""
        decoder_dim: int = setting(768, min=1, tiny=16)
        """Width of regressor and decoder, D."""
        decoder_depth: int = setting(4, min=1, tiny=1)
        """Number of blocks of the regressor, and of the decoder."""
        decoder_heads: int = setting(12, min=1, tiny=2)
        """Number of attention heads of a block of regressor or decoder."""
        feature_weight: float = setting(2.0, min=0)
        """Weight of the squared difference of features, w."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the tokenizer, and build the network with MAE's initialization.

        A backbone that ``init`` loads keeps its weights.

        Raises:
            UserError: If the tokenizer does not exist or gives no tokens, if ``mask_ratio`` keeps
                none or all of the patches, or if a backbone that is not loaded has no positions.
        """
        grid = adapter_of(backbone).built_grid
        self.num_kept(grid)
        self.tokenizer = open_tokenizer(self, task)
        self.num_tokens: int = self.tokenizer.num_tokens
        head = RegressorDecoder(
            embed_dim(backbone), grid, num_tokens=self.num_tokens, **self.config.decoder_sizes
        )
        initialize_network(backbone, head, task)
        return ContextNetwork(backbone, head)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["tokens"]`` (B, Q), the tokens of the masked patches."""
        batch = task.last_batch
        images = batch.all_views[0]
        tokens = self.tokenizer.on_grid(images, self.grid_of(*images.shape[2:]))  # (B, N)
        batch["tokens"] = tokens.gather(1, batch["mask"].predict[:, 0])

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the two terms of the loss, means over patches.

        ``output.prediction`` is a ``MaskedPredictions``.
        """
        features, scores, targets = output.prediction
        tokens = F.cross_entropy(to_float32(scores).flatten(0, 1), batch["tokens"].flatten())
        difference = F.mse_loss(to_float32(features), to_float32(targets))
        return {"masked_tokens": tokens, "masked_features": self.config.feature_weight * difference}

    @property
    def chance_loss(self) -> float:
        """Loss of equal scores, and of zeros as features: ln(number of tokens) +
        ``feature_weight``.

        The encoder's features are normalized, so that their mean square is 1.
        """
        return math.log(self.num_tokens) + self.config.feature_weight


class ContextNetwork(Network):
    """Encoder of the kept patches, and a head that predicts the masked ones.

    ``prediction`` of its output is ``MaskedPredictions``. The targets are the encoder's features of
    the masked patches, without gradients.
    """

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        masked = mask.predict[:, 0]
        features = self.extract(images, keep=mask.keep)
        with torch.no_grad():
            targets = self.extract(images, keep=masked).patches
        grid = adapter_of(self.backbone).grid(*images.shape[-2:])
        predicted, scores = self.head(features.tokens.sequence, masked, grid)
        return PatchOutput(MaskedPredictions(predicted, scores, targets), features, mask)


class RegressorDecoder(nn.Module):
    """Regressor from kept patches to features of masked ones, and decoder from these to scores.

    Args:
        embed_dim: Width E of the encoded patches.
        grid: Rows and columns of patches.
        dim: Width D of both; divisible by 4 and by ``num_heads``.
        depth: Number of blocks of each.
        num_heads: Attention heads of a block.
        num_tokens: Number T of tokens.
    """

    def __init__(
        self, embed_dim: int, grid: Grid, *, dim: int, depth: int, num_heads: int, num_tokens: int
    ) -> None:
        super().__init__()
        self.regressor = MemoryPredictor(
            embed_dim, grid, None, dim=dim, depth=depth, num_heads=num_heads, num_out=embed_dim
        )
        self.embed = nn.Linear(embed_dim, dim)
        self.blocks = transformer_blocks(dim, depth, num_heads)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.project = nn.Linear(dim, num_tokens)

    def forward(self, encoded: Tensor, predict: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Predict features (B, Q, E) and scores of tokens (B, Q, T).

        Args:
            encoded: (B, P + K, E), prefix tokens and kept patches.
            predict: (B, Q) indices of the patches to predict.
            grid: Rows and columns of patches.
        """
        features = self.regressor([encoded], predict, grid)
        x = self.embed(features) + self.regressor.positions_on(grid)[predict]
        return features, self.project(self.norm(self.blocks(x)))
