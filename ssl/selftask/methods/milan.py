"""MILAN: predict a teacher's features of an image from the patches that the teacher attends to.

B: images per rank, N: patches of an image, K kept and Q masked ones, E: width of the backbone, D:
width of the teacher, C: width of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.schema import FrozenModule
from selftask.methods.base import Task
from selftask.methods.families.distillation import trained_teacher
from selftask.methods.families.masked_patches import Kept, KeptPatches, initialize_network
from selftask.models.build import embed_dim
from selftask.models.distillation.attention_teacher import AttentionTeacher
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.models.predictors.memory_predictor import MemoryBlock, MemoryPredictor
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("milan")
class MILAN(KeptPatches):
    """MILAN (arXiv:2208.06049): MAE that predicts the features of CLIP, with masks chosen by CLIP.

    Patches to which the class token of the frozen teacher attends are kept more often. The features
    of the whole image are predicted: the features of its class token, of kept and of masked
    patches.

    Loss: ``2 - 2 cos(p, t)`` of the predictions p and the teacher's features t.

    Published: ImageNet top-1 of ViT-B 85.4 fine-tuned (paper); 85.3, and 78.9 linear (mmselfsup).

    Use it in place of ``mae`` if a strong teacher such as CLIP exists.

    Differs from the authors' code:

    * Targets are the teacher's features as the backbone returns them. In mmselfsup, CLIP's are
      projected to the space of captions.
    * Features and attention of a teacher with another grid of patches are interpolated; in the
      authors' code grids are equal.
    """

    paper = "Hou et al., MILAN: Masked Image Pretraining on Language Assisted Representation, 2022"

    @dataclass(frozen=True, kw_only=True)
    class Config(KeptPatches.Config):
        teacher: FrozenModule = trained_teacher()
        """Vision transformer with a class token, such as CLIP's vision tower."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teacher, and build the network with MAE's initialization.

        A backbone that ``init`` loads keeps its weights.

        Raises:
            UserError: If the teacher does not exist, or has no patches, class token or attention
                weights; if ``mask_ratio`` keeps none or all of the patches; or if a backbone that
                is not loaded has no positions.
        """
        grid = adapter_of(backbone).built_grid
        self.num_kept(grid)
        trained = self.open_trained("teacher", task)
        self.teacher = AttentionTeacher(trained.network.backbone, "method.teacher")
        decoder = PromptingDecoder(
            embed_dim(backbone), grid, num_out=trained.width, **self.config.decoder_sizes
        )
        initialize_network(backbone, decoder, task)
        return PromptingNetwork(backbone, decoder)

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """Draw a number for each patch, (B, N), by which ``prepare_batch`` chooses patches."""
        rows, columns = self.grid_of(*sizes[0])
        return uniform(seed, key, rows * columns)

    @torch.no_grad()
    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Choose the patches to keep, and set ``batch["targets"]`` (B, 1 + N, D).

        Targets are in the order of the predictions.
        """
        images = batch.all_views[0]
        grid = self.grid_of(*images.shape[2:])
        with task.autocast():
            class_token, patches, attention = self.teacher.on_grid(images, grid)
        order = sampled_order(self.drawn(batch, task), attention)
        num_kept = self.num_kept(grid)
        batch["mask"] = Kept(order[:, :num_kept], order[:, None, num_kept:])
        batch["targets"] = torch.cat([class_token[:, None], gather_tokens(patches, order)], dim=1)
        batch.input = (images, batch["mask"])

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean squared distance of normalized predictions and targets.

        ``output.prediction`` is (B, 1 + N, D).
        """
        prediction, targets = to_float32(output.prediction), to_float32(batch["targets"])
        return 2 - 2 * F.cosine_similarity(prediction, targets, dim=2).mean()


@in_full_precision
def sampled_order(draws: Tensor, weights: Tensor) -> Tensor:
    """Return the order in which patches are drawn without replacement.

    The next patch is drawn with a probability proportional to its weight among the remaining ones:
    this is the ascending order of -ln(u) / w for uniform u (Efraimidis and Spirakis, 2006).

    Args:
        draws: (B, N) in [0, 1).
        weights: (B, N), at least 0.

    Returns:
        (B, N), indices of patches.
    """
    return (-draws.log() / weights).argsort(dim=1, stable=True)


class PromptingNetwork(Network):
    """Encoder of the kept patches, and a decoder for class token, kept and masked patches.

    ``prediction`` of its output is (B, 1 + N, D).
    """

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        features = self.extract(images, keep=mask.keep)
        encoded = torch.cat([features.tokens.class_token, features.patches], dim=1)
        grid = adapter_of(self.backbone).grid(*images.shape[-2:])
        predicted = self.head(encoded, mask.keep, mask.predict[:, 0], grid)
        return PatchOutput(predicted, features, mask)


class PromptingDecoder(MemoryPredictor):
    """Decoder that updates only the masked patches; the encoded patches are prompts.

    Masked patches attend to the prompts, which stay the same in all blocks, and to each other.

    Args:
        embed_dim: Width E of the encoded patches.
        grid: Rows and columns of patches.
        dim: Width C; divisible by 4 and by ``num_heads``.
        depth: Number of blocks.
        num_heads: Attention heads of a block.
        num_out: Number D of outputs per token.
    """

    def __init__(
        self, embed_dim: int, grid: Grid, *, dim: int, depth: int, num_heads: int, num_out: int
    ) -> None:
        super().__init__(dim, grid, None, dim=dim, depth=0, num_heads=num_heads, num_out=num_out)
        self.embed = nn.Linear(embed_dim, dim)
        self.blocks = nn.ModuleList(PromptedBlock(dim, num_heads) for _ in range(depth))

    def forward(self, encoded: Tensor, keep: Tensor, predict: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]
        """Predict the features of class token, kept and masked patches.

        Args:
            encoded: (B, 1 + K, E), class token and kept patches.
            keep: (B, K) indices of the kept patches.
            predict: (B, Q) indices of the masked patches.
            grid: Rows and columns of patches.

        Returns:
            (B, 1 + K + Q, D).
        """
        positions, embedded = self.positions_on(grid), self.embed(encoded)
        prompts = torch.cat([embedded[:, :1], embedded[:, 1:] + positions[keep]], dim=1)
        x = self.mask_token + positions[predict]  # (B, Q, C)
        for block in self.blocks:
            x = block(x, prompts)
        return self.project(self.norm(torch.cat([prompts, x], dim=1)))


class PromptedBlock(MemoryBlock):
    """Block of masked patches (B, Q, C), which attend to prompts (B, 1 + K, C) and to each other.

    Args:
        dim: Width C.
        num_heads: Number of attention heads.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, dim, num_heads)
        self.norm_memory = nn.Identity()  # prompts are not normalized in the published code

    def forward(self, x: Tensor, prompts: Tensor) -> Tensor:
        return super().forward(x, torch.cat([prompts, self.norm_queries(x)], dim=1))
