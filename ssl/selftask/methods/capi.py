"""CAPI: predict the clusters of hidden patches; a teacher's patches are clustered online.

B: images per rank, N: patches of an image, V of them visible, Q of the others predicted, E: width
of the backbone, K: clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema.optimizer import GroupRule
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.masked_patches import Kept, MaskedPatches, check_num_hidden
from selftask.models.backbones.rope import CapiRope
from selftask.models.build import embed_dim
from selftask.models.clustering import sinkhorn_knopp
from selftask.models.features.extract import FeatureExtractor, adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.heads import UnitLength, WeightNormLinear
from selftask.models.masks import hide_patches, is_hidden, padded_indices, rolled_rectangle
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision
from selftask.models.predictors.cross_predictor import CrossPredictor
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("capi")
class CAPI(MaskedPatches, EMATeacher):
    """CAPI (arXiv:2502.08769): predicts the clusters of hidden patches from the visible ones.

    Loss: ``-sum_k a_k log softmax(s/tau)_k`` of the scores s of hidden patches, with the
    assignments a of a teacher's patches to clusters k; the same loss trains the clusters.

    Published: ImageNet attentive probe of ViT-L/14 82.9, 83.8 from LVD-142M (authors' README).

    Use it for dense features of transformers, with much data and long runs.

    Differs from the authors' code:

    * There is one optimizer, with a separate parameter group for the clusters (``cluster_lr``); the
      authors' code has two optimizers.
    * Sinkhorn-Knopp works on logarithms. The authors' code adds 1e-8 to every sum; here it is added
      only to the sums of patches, since those of clusters are far larger.
    * Frequencies of the rotary positions are fixed, as in the published run, whose learning rate
      for them is 0. Backbones have LayerNorm and biases; the authors' have RMSNorm and no biases.
    * Warm-ups last one step longer. Stochastic depth skips each image at random; in the authors'
      code it skips a fixed share of a GPU's batch.
    """

    paper = (
        "Darcet et al., Cluster and Predict Latent Patches for Improved Masked Image Modeling, 2025"
    )
    columns = {
        "clustering": "Term of the loss: the teacher's patches fit the clusters.",
        "cluster_prediction": "Term of the loss: clusters of hidden patches are predicted.",
    }
    loss_reduction = "statistics"  # sizes of the clusters
    min_batch_size = 2
    requires = ("subset",)
    exports_teacher = True  # as in the paper's evaluations
    teacher_drop_path = False

    @dataclass(frozen=True, kw_only=True)
    class Config(EMATeacher.Config):
        num_clusters: int = setting(16_384, min=2, tiny=12)
        """Number of clusters, K."""
        mask_ratio: float = setting(0.65, above=0, below=1)
        """Share of the patches that are hidden; the others form a rectangle."""
        predicted: float = setting(0.05, above=0, max=1)
        """Share of the hidden patches that are predicted, at least one."""
        temperature: float = setting(0.12, above=0)
        """Temperature of the scores of clusters, in both terms of the loss."""
        target_temperature: float = setting(0.06, above=0)
        """Temperature of the assignments, epsilon of Sinkhorn-Knopp."""
        sinkhorn_iterations: int = setting(3, min=1)
        """Number of iterations of Sinkhorn-Knopp."""
        position_wise: bool = True
        """Whether clusters get equal shares of the images at each position; false: equal shares of
        all patches, for batches that are much smaller than the number of clusters.
        """
        cluster_lr: float = setting(0.5, min=0)
        """Learning rate of the clusters, as a factor of ``optimizer.lr``."""
        predictor_dim: int = setting(1024, min=1, tiny=16)
        """Width of the predictor."""
        predictor_depth: int = setting(12, min=1, tiny=1)
        """Number of blocks of the predictor."""
        predictor_heads: int = setting(16, min=1, tiny=2)
        """Number of attention heads of the predictor."""
        predictor_drop_path: float = setting(0.0, min=0, below=1)
        """Rate of stochastic depth in all blocks of the predictor."""
        momentum: Schedule = teacher_momentum(
            {
                "name": "cosine",
                "start": 0.999,
                "end": 1.0,
                "stretch": 1.225,
                "warmup": "10%",
                "warmup_start": 1.0,
            }
        )
        """Momentum of the teacher; by default 1 at first, since the teacher is then random."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if config["backbone"].get("pool") == "token":
                yield "backbone.pool: capi trains patches, not the class token; use pool: avg"
            if self.predictor_dim % (4 * self.predictor_heads):
                yield (
                    f"predictor_dim: {self.predictor_dim} must be divisible by 4 (its positions) "
                    f"times predictor_heads={self.predictor_heads}"
                )

    def check_grid(self, grid: Grid) -> None:
        """Raise UserError if no patch is hidden, or none is visible."""
        check_num_hidden(self.num_hidden(grid), grid[0] * grid[1], self.config.mask_ratio)

    def num_hidden(self, grid: Grid) -> int:
        return int(self.config.mask_ratio * grid[0] * grid[1])

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        config, grid, width = self.config, adapter_of(backbone).built_grid, embed_dim(backbone)
        self.check_grid(grid)
        rope = getattr(backbone, "rope", None)
        predictor = CrossPredictor(
            width,
            grid,
            dim=config.predictor_dim,
            depth=config.predictor_depth,
            num_heads=config.predictor_heads,
            num_registers=len(rope.border) if isinstance(rope, CapiRope) else 0,
            drop_path=config.predictor_drop_path,
        )
        self.clusters = nn.Linear(width, config.num_clusters)  # trained
        nn.init.normal_(self.clusters.weight)
        nn.init.zeros_(self.clusters.bias)
        return CAPINetwork(backbone, predictor, config.num_clusters)

    def averaged(self, network: Any) -> nn.Module:
        return FeatureExtractor(network.backbone)

    def group_rules(self) -> list[GroupRule]:
        """Set the learning rate and the weight decay of the clusters."""
        return [GroupRule(match="loss.clusters", lr=self.config.cluster_lr, weight_decay=0.01)]

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Kept:
        """Keep the patches of a random rectangle, and draw the ones to predict from the others."""
        self.check_grid(grid)
        num_hidden, num_patches = self.num_hidden(grid), grid[0] * grid[1]
        draws = uniform(seed, key, 3 + num_patches)
        visible = rolled_rectangle(draws[:, :3], num_patches - num_hidden, grid)  # (B, N)
        keep, _ = padded_indices(visible, num_patches - num_hidden)
        number = max(1, int(num_hidden * self.config.predicted))
        predict, _ = padded_indices(~visible, number, draws[:, 3:])
        return Kept(keep, predict[:, None])

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["patches"]`` (B, N, E), the teacher's patches of the whole image."""
        batch = task.last_batch
        batch["patches"] = self.teacher(batch.all_views[0]).patches

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return both cross-entropies with the assignments; ``output.prediction`` is (B, Q, K).

        The first term trains only the clusters, and the second only the network.
        """
        scores = cluster_scores(batch["patches"], self.clusters.weight, self.clusters.bias)
        assigned = self.assign(scores.detach())  # (B, N, K)
        targets = gather_tokens(assigned, batch["mask"].predict[:, 0])  # (B, Q, K)
        temperature = self.config.temperature
        return {
            "clustering": soft_cross_entropy(scores, assigned, temperature),
            "cluster_prediction": soft_cross_entropy(output.prediction, targets, temperature),
        }

    def assign(self, scores: Tensor) -> Tensor:
        """Return assignments (B, N, K) for the scores (B, N, K) of patches, by Sinkhorn-Knopp.

        They are balanced at each position, or over all patches; see ``position_wise``.
        """
        rows = scores if self.config.position_wise else scores.flatten(0, 1)
        assigned = sinkhorn_knopp(
            rows,
            epsilon=self.config.target_temperature,
            iterations=self.config.sinkhorn_iterations,
            smallest=1e-8,
        )
        return assigned.view_as(scores)

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image and its visible patches."""
        images, mask = batch.input
        hidden = is_hidden(mask.keep, batch["patches"].shape[1])
        return {"image": images, "visible": hide_patches(images, hidden)}

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: 2 * ln(``num_clusters``), for both terms together."""
        return 2 * math.log(self.config.num_clusters)


class CAPINetwork(Network):
    """Encoder of the visible patches, predictor, and head for the scores of clusters (B, Q, K).

    It takes images (B, C, H, W) and a ``Kept``.
    """

    def __init__(self, backbone: nn.Module, predictor: CrossPredictor, num_clusters: int) -> None:
        super().__init__(backbone, predictor)
        width = predictor.mask_token.shape[0]
        self.scores = nn.Sequential(
            UnitLength(), WeightNormLinear(width, num_clusters, trained_length=True)
        )

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        features = self.extract(images, keep=mask.keep)
        grid = adapter_of(self.backbone).grid(*images.shape[-2:])
        predicted = self.head(features.tokens.sequence, mask.keep, mask.predict[:, 0], grid)
        return PatchOutput(self.scores(predicted), features, mask)


@in_full_precision
def cluster_scores(patches: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the scores of clusters (B, N, K), a linear function of normalized patches.

    Args:
        patches: (B, N, E), not necessarily normalized.
        weight: (K, E).
        bias: (K,).
    """
    return F.linear(F.normalize(patches, dim=-1), weight, bias)


@in_full_precision
def soft_cross_entropy(scores: Tensor, probs: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy of scores / ``temperature`` with ``probs``, (..., K) each."""
    return F.cross_entropy(scores.flatten(0, -2) / temperature, probs.flatten(0, -2))
