"""VQ-KD: train a tokenizer of patches whose codes encode the features of a frozen teacher.

Section 3.1 of BEiT v2. Its runs are tokenizers for ``beit``: ``method.tokenizer=RUN``.

B: images per rank, N: patches of an image, E: width of the backbone, D: width of a code, K: codes,
T: width of the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.distributed.collectives import all_gather_cat, all_reduce_sum
from selftask.errors import UserError
from selftask.methods.base import Method, Task
from selftask.methods.families.distillation import trained_teacher
from selftask.models.build import embed_dim
from selftask.models.clustering import cluster_sums, spherical_kmeans
from selftask.models.distillation.patch_decoder import PatchDecoder
from selftask.models.distillation.patch_targets import PatchTeacher
from selftask.models.distillation.vector_quantizer import VectorQuantizer
from selftask.models.features.extract import adapter_of
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.models.weights.load import load_part
from selftask.models.weights.trained import Scores
from selftask.random.splitmix import hash_words
from selftask.registry import register_method

_CODES = 0x636F6465  # "code": separates the draws of k-means from others of the same seed


@register_method("vqkd")
class VQKD(Method):
    """VQ-KD (arXiv:2208.06366): trains a tokenizer whose codes encode a frozen teacher's features.

    Loss: ``1 - cos(reconstruction, teacher) + beta |unit - code|^2 / D``: the decoder reconstructs
    the teacher's features, and the unit vectors of patches stay close to their codes (eq. 3, with a
    mean of squares).

    Use it to train the tokenizer of ``beit``.

    Differs from the authors' code:

    * The first codes are found by k-means among the patches of the first step, after this step; in
      the authors' code, before it.
    * The decoder has fixed sine-cosine positions; in the authors' code, learned ones.
    """

    paper = (
        "Peng et al., BEiT v2: Masked Image Modeling with Vector-Quantized Visual Tokenizers, 2022"
    )
    columns = {
        "reconstruction": "Term of the loss: 1 - cosine of reconstruction and teacher.",
        "commitment": "Term of the loss: squared distance of the patches from their codes.",
        "used_codes": "Share of the codes that patches of the step have, 0 to 1.",
    }
    loss_reduction = "samples"  # the codebook has no gradient
    views = 1
    requires = ("tokens",)
    sample_dim = None

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher: FrozenModule = trained_teacher()
        """Backbone whose features of patches are reconstructed, such as CLIP's or DINO's."""
        num_codes: int = setting(8192, min=2, tiny=12)
        """Number of codes, K."""
        code_dim: int = setting(32, min=1, tiny=8)
        """Width of a code, D."""
        codebook_momentum: float = setting(0.99, min=0, max=1)
        """Weight of the old codebook at each step."""
        commitment_weight: float = setting(1.0, min=0)
        """Weight of the distance of the patches from their codes, beta."""
        kmeans_iterations: int = setting(10, min=0)
        """Number of iterations of k-means for the first codes."""
        decoder_dim: int = setting(768, min=1, tiny=32)
        """Width of the decoder."""
        decoder_depth: int = setting(3, min=0, tiny=1)
        """Number of transformer blocks of the decoder."""
        decoder_heads: int = setting(12, min=1, tiny=4)
        """Number of attention heads of a block of the decoder."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
                yield (
                    f"decoder_dim: {self.decoder_dim}; a multiple of 4 and of decoder_heads="
                    f"{self.decoder_heads} is expected"
                )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teacher, and build the tokenizer with its decoder.

        Raises:
            UserError: If the teacher does not exist or has no patches, or if a step has fewer
                patches than codes.
        """
        trained = self.open_trained("teacher", task)
        self.teacher = PatchTeacher(trained.network.backbone, "method.teacher")
        config, grid = self.config, adapter_of(backbone).built_grid
        decoder = PatchDecoder(
            config.code_dim,
            trained.width,
            grid,
            dim=config.decoder_dim,
            depth=config.decoder_depth,
            num_heads=config.decoder_heads,
        )
        patches = grid[0] * grid[1] * task.length.samples_per_step
        if patches < config.num_codes:
            raise UserError(
                f"method.num_codes={config.num_codes}: the first codes are clusters of the patches "
                f"of one step, which are {patches}; set it to less, or train.batch_size to more"
            )
        return TokenizerNetwork(backbone, self.build_head(embed_dim(backbone)), decoder)

    def build_head(self, embed_dim: int) -> TokenizerHead:
        """Build the layers from patches to vectors, and the codebook."""
        return TokenizerHead(embed_dim, self.config.num_codes, self.config.code_dim)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        (batch.input,) = batch.all_views

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, N, T); in training, collect vectors for the codebook."""
        batch = task.last_batch
        coded, grid = batch.output.prediction, batch.output.features.tokens.grid
        _, batch["targets"] = self.teacher.on_grid(batch.input, grid)
        if task.train:
            self.pending.append((coded.units.detach().flatten(0, 1), coded.codes.flatten()))

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return both terms of eq. 3, means over patches; ``output.prediction`` is a ``Coded``."""
        coded = output.prediction
        reconstruction, commitment = vqkd_terms(
            coded.reconstruction, batch["targets"], coded.units, coded.nearest
        )
        return {
            "reconstruction": reconstruction,
            "commitment": self.config.commitment_weight * commitment,
        }

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Move codes toward the vectors of all ranks, and log the share of used codes.

        After the first step, set the codes by k-means instead.
        """
        quantizer = task.base_model.head.quantizer  # type: ignore[union-attr]
        config, pending = self.config, self.take_pending()
        if not pending:
            return
        units, codes = (torch.cat(parts) for parts in zip(*pending, strict=True))
        if task.steps_done == 0:
            draws = torch.Generator().manual_seed(hash_words(task.config.train.seed, _CODES))
            centroids, _ = spherical_kmeans(
                torch.cat([all_gather_cat(rows) for rows, _ in pending]),
                config.num_codes,
                iterations=config.kmeans_iterations,
                generator=draws,
            )
            quantizer.codebook.copy_(centroids)
            return
        sums, counts = cluster_sums(units, codes, config.num_codes)
        moved = all_reduce_sum(torch.cat([sums, counts[:, None]], dim=1))  # (K, D + 1)
        quantizer.update(moved[:, :-1], moved[:, -1], momentum=config.codebook_momentum)
        task.log("used_codes", (moved[:, -1] > 0).float().mean())

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Load the head, which scores codes by cosine; the best code is a patch's token."""
        head = self.build_head(embed_dim)
        load_part(head, checkpoint, "model.head")
        return Scores(head, patches=Scores(head))


class Coded(NamedTuple):
    """Output of the tokenizer for patches."""

    units: Tensor
    """(B, N, D), unit vectors of the patches."""
    codes: Tensor
    """(B, N), index of the nearest code."""
    nearest: Tensor
    """(B, N, D), the nearest code, without gradient."""
    reconstruction: Tensor
    """(B, N, T), features that the decoder computes from the codes."""


class TokenizerHead(nn.Module):
    """Patches (..., E) -> cosines with the codes (..., K); ``encode`` returns unit vectors."""

    def __init__(self, embed_dim: int, num_codes: int, dim: int) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.Linear(embed_dim, embed_dim), nn.Tanh(), nn.Linear(embed_dim, dim)
        )
        self.quantizer = VectorQuantizer(num_codes, dim)

    def encode(self, patches: Tensor) -> Tensor:
        """Return unit vectors (..., D) of patches (..., E)."""
        return F.normalize(to_float32(self.project(patches)), dim=-1)

    def forward(self, patches: Tensor) -> Tensor:
        return self.quantizer.scores(self.encode(patches))


class TokenizerNetwork(Network):
    """Encoder, codebook and decoder, with straight-through gradients past the codebook."""

    head: TokenizerHead

    def __init__(self, backbone: nn.Module, head: TokenizerHead, decoder: nn.Module) -> None:
        super().__init__(backbone, head)
        self.decoder = decoder

    def forward(self, images: Tensor) -> PatchOutput:  # type: ignore[override]
        """Return the output for images (B, C, H, W); its ``prediction`` is ``Coded``."""
        features = self.extract(images)
        units = self.head.encode(features.patches)
        codes = self.head.quantizer(units)
        nearest = self.head.quantizer.codebook[codes].to(units.dtype)
        passed = units + (nearest - units).detach()
        reconstruction = self.decoder(passed, features.tokens.grid)
        return PatchOutput(Coded(units, codes, nearest, reconstruction), features)


@in_full_precision
def vqkd_terms(
    reconstruction: Tensor, targets: Tensor, units: Tensor, nearest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return 1 - mean cosine of the reconstruction, and the mean squared error of the codes.

    Args:
        reconstruction: Features that the decoder returns, (B, N, T).
        targets: Features of the teacher, (B, N, T).
        units: Unit vectors of patches, (B, N, D).
        nearest: Nearest codes of these vectors, (B, N, D); detached.
    """
    cosines = F.cosine_similarity(reconstruction, targets, dim=-1)
    return 1 - cosines.mean(), F.mse_loss(units, nearest.detach())
