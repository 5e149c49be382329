"""BEiT: predict the tokens that a frozen tokenizer assigns to hidden patches.

Section 2 of the paper; ``branch_depth`` adds the class token's branch of BEiT v2 (Peng et al.,
2022, arXiv:2208.06366, section 3.3).

B: images per rank, N: patches of an image, H: maximum number of hidden ones, E: width of the
backbone, K: tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.distillation import open_tokenizer, trained_teacher
from selftask.methods.families.masked_patches import (
    BlockMaskedPatches,
    HiddenPatchNetwork,
    mean_of_hidden,
)
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import gather_tokens
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.models.predictors.patch_predictor import transformer_blocks
from selftask.registry import register_method


@register_method("beit")
class BEiT(BlockMaskedPatches):
    """BEiT (arXiv:2106.08254): predicts the tokens of hidden patches, given by a trained tokenizer.

    Loss: ``-log softmax(s)[token]`` of the scores s of hidden patches.

    Published: ImageNet fine-tuned top-1 of ViT-B 85.5 and ViT-L 87.3 for BEiT v2 (authors' README).

    Use it before fine-tuning a transformer, if a tokenizer (``vqkd``) of similar images exists.

    Differs from the authors' code:

    * The loss is a mean over the hidden patches of an image, then over images; in the authors'
      code, over the hidden patches of a batch. The number of hidden patches differs slightly
      between images.
    * Positions are the backbone's; the authors' code has relative position biases that all blocks
      share.
    * The branch of BEiT v2 has its own final norm; in the authors' code it shares the backbone's.
    """

    paper = "Bao et al., BEiT: BERT Pre-Training of Image Transformers, ICLR 2022"
    columns = {
        "tokens": "Term of the loss: tokens of hidden patches.",
        "branch": "Term of the loss: the same, from the class token and an early layer (BEiT v2).",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockMaskedPatches.Config):
        tokenizer: FrozenModule = trained_teacher("give a run of vqkd or package.module:Class")
        """Tokenizer: a run of ``vqkd``, ``RUN@STEP`` or a checkpoint; a run with prototypes of
        patches (``ibot``, ``dinov2``) or images, the nearest of which is the token; ``timm:NAME``,
        whose classes then serve as tokens; or your own ``package.module:Class``, which returns
        tokens (B, N) and has ``num_tokens``, and ``patch_size`` if it needs images of another size.
        """
        branch_depth: int = setting(0, min=0)
        """Number of blocks of the class token's branch, 2 in BEiT v2; 0: no branch."""
        branch_layer: int = setting(-4, max=-2, tiny=-2)
        """Index of the hidden layer whose patches are the branch's input; -1 is the last layer."""
        branch_heads: int = setting(12, min=1, tiny=4)
        """Number of attention heads of a block of the branch."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the tokenizer, and build the network with a score for each token.

        Raises:
            UserError: If the tokenizer does not exist or gives no tokens, or if the backbone does
                not fit the masks or the branch.
        """
        self.check_backbone(backbone)
        self.check_grid(adapter_of(backbone).built_grid)
        self.tokenizer = open_tokenizer(self, task)
        self.num_tokens: int = self.tokenizer.num_tokens
        width, config = embed_dim(backbone), self.config
        head = self.build_head(width)
        if not config.branch_depth:
            return HiddenPatchNetwork(backbone, head)
        if "hidden" not in adapter_of(backbone).offers:
            raise UserError(
                f"method.branch_depth: a {type(backbone).__name__} has no hidden layers for the "
                "branch; set it to 0"
            )
        return BranchNetwork(
            backbone,
            head,
            layer=config.branch_layer,
            depth=config.branch_depth,
            num_heads=config.branch_heads,
        )

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the linear layer from a patch to the scores of all tokens."""
        head = nn.Linear(embed_dim, self.num_tokens)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["tokens"]`` (B, H), the tokens of the hidden patches."""
        batch = task.last_batch
        tokens = self.tokenizer.on_grid(batch.all_views[0], batch["grid"])  # (B, N)
        batch["tokens"] = tokens.gather(1, batch["hidden"][0])

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy with the tokens: ``tokens``, and ``branch`` if there is one.

        ``output.prediction`` has the scores (B, H, K), or (B, 2 * H, K) with the branch.
        """
        terms = ("tokens", "branch") if self.config.branch_depth else ("tokens",)
        scores = to_float32(output.prediction).chunk(len(terms), dim=1)  # (B, H, K) each
        tokens, (_, padding) = batch["tokens"], batch["hidden"]
        return {
            term: mean_of_hidden(_cross_entropy(part, tokens), padding)
            for term, part in zip(terms, scores, strict=True)
        }

    @property
    def chance_loss(self) -> float:
        """Loss of equal scores: ln(number of tokens), or twice this value with the branch."""
        return (2 if self.config.branch_depth else 1) * math.log(self.num_tokens)


class BranchNetwork(HiddenPatchNetwork):
    """Backbone and head, with a branch that also predicts the hidden patches (BEiT v2).

    The branch, a few blocks, predicts them from the last layer's class token (or the mean of its
    patches) and the patches of an early layer. The class token is the only input from later layers,
    so it learns to describe the image.

    Args:
        backbone: Backbone with ``"tokens"`` and ``"hidden"`` in its ``offers``.
        head: Patches (..., E) -> scores (..., K); used for the backbone and the branch.
        layer: Index of the early layer.
        depth: Number of blocks.
        num_heads: Attention heads of a block.
    """

    def __init__(
        self, backbone: nn.Module, head: nn.Module, *, layer: int, depth: int, num_heads: int
    ) -> None:
        super().__init__(backbone, head)
        self.layer = layer
        width = embed_dim(backbone)
        self.branch = transformer_blocks(width, depth, num_heads)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> PatchOutput:  # type: ignore[override]
        """Return a ``PatchOutput`` with the scores (B, 2 * H, K) of patches, then of the branch."""
        images, mask, indices = inputs
        features = self.extract(
            images, mask=mask, mask_token=self.mask_token, layers=(self.layer, -1)
        )
        early, last = features.hidden.values()
        states = self.norm(self.branch(torch.cat([last.class_token, early.patches], dim=1)))
        hidden = [gather_tokens(patches, indices) for patches in (features.patches, states[:, 1:])]
        return PatchOutput(self.head(torch.cat(hidden, dim=1)), features, mask)


def _cross_entropy(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy (B, H) of scores (B, H, K) with tokens (B, H)."""
    return F.cross_entropy(scores.transpose(1, 2), tokens, reduction="none")
