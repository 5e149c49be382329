"""MSN: assign masked and small views to the prototypes of the whole, unmasked view.

With ``power`` above 0 it is PMSN, whose prototypes follow a power law: Assran et al., The Hidden
Uniform Cluster Prior in Self-Supervised Learning, ICLR 2023, arXiv:2210.07277.

V: views that the student sees, M of which are masked; B: images per rank; N: patches of a masked
view; D: width of the head; K: prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import total_views
from selftask.config.schema.optimizer import GroupRule
from selftask.distributed.collectives import sum_with_equal_grad, world_size
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.prototypes import PrototypeLayer, log_target_entropy
from selftask.models.build import embed_dim
from selftask.models.clustering import view_cross_entropy
from selftask.models.features.extract import adapter_of
from selftask.models.heads import WeightNormLinear, mlp
from selftask.models.masks import hide_patches, mask_of
from selftask.models.network import Network, PatchOutput
from selftask.models.weights.trained import Scores, Targets
from selftask.random.keyed import uniform
from selftask.registry import register_method

Inputs: TypeAlias = tuple[list[Tensor], Tensor | None, list[Tensor]]
"""Argument of the network.

* Views of one size, (B, C, H, W) each: the M masked ones, or the teacher's.
* (B, M, n), indices of their patches to encode; None: all, for the teacher.
* Focal views: small views of one size, of which all patches are encoded.
"""


@register_method("msn")
class MSN(PrototypeLayer, EMATeacher):
    """MSN (arXiv:2204.07141): assigns views with hidden patches to the clusters of the whole view.

    ``power`` above 0 gives PMSN (arXiv:2210.07277), whose cluster sizes follow a power law.

    Loss: ``CE(t, s) - lambda H(mean s)`` of the probabilities s of prototypes for masked views and
    the teacher's sharpened probabilities t; CE is the cross-entropy and H the entropy (eq. 2).

    Use it for transformers that are later trained on few labels.

    Differs from the authors' code:

    * Each image has its own mask; in the authors' code all images of a GPU share one.
    * Learning rate and weight decay are those of the current step; in the authors' code, those of
      the next step. Gradients of prototypes are clipped with the others.
    * Positions of the 96-pixel crops are interpolated with antialiasing, as in DINO.
    * With ``power`` above 0, Sinkhorn-Knopp also balances the targets by the power law. The
      authors' code of PMSN was not available.
    """

    paper = "Assran et al., Masked Siamese Networks for Label-Efficient Learning, ECCV 2022"
    columns = {
        "cross_entropy": "Term of the loss: masked views have the teacher's targets.",
        "me_max": (
            "Term of the loss: divergence of the mean prediction from the prior; 0 is "
            "all prototypes used as given by the prior."
        ),
    }
    loss_reduction = "statistics"  # the mean prediction, and the sizes of clusters
    views = (2, None)
    min_batch_size = 2  # BatchNorm in the head
    requires = ("subset",)
    exports_teacher = True  # which the paper evaluates

    @dataclass(frozen=True, kw_only=True)
    class Config(PrototypeLayer.Config, EMATeacher.Config):
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the head's output, D."""
        num_prototypes: int = setting(1024, min=2, tiny=12)
        """Number of prototypes, K."""
        masked_views: int = setting(1, min=1)
        """Number of masked views, M. The first view is the teacher's, the next M are masked, and
        the others are focal views.
        """
        mask_ratio: float = setting(0.15, min=0, below=1)
        """Share of the patches of a masked view that are dropped; at least one patch is kept."""
        sharpening: float = setting(0.25, above=0, max=1)
        """Temperature of the teacher relative to the student's, T in section 3."""
        sinkhorn_iterations: int = setting(3, min=0)
        """Number of iterations of Sinkhorn-Knopp, which balances the targets; 0: none."""
        me_max_weight: float = setting(1.0, min=0)
        """Weight of the divergence of the mean prediction from the prior, lambda in eq. 2."""
        momentum: Schedule = teacher_momentum({"name": "linear", "start": 0.996, "end": 1.0})
        """Momentum of the teacher."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            made = total_views(config["views"])
            if made < 1 + self.masked_views:
                yield (
                    f"masked_views: {self.masked_views}; with the teacher's view these are "
                    f"{1 + self.masked_views} views, and `views` makes {made}"
                )

    log_prior: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.prototypes = WeightNormLinear(config.out_dim, config.num_prototypes)  # trained
        numbers = torch.arange(1, config.num_prototypes + 1).to(torch.get_default_dtype())
        log_prior = F.log_softmax(-config.power * numbers.log(), dim=0)
        self.register_buffer("log_prior", log_prior, persistent=False)  # (K,)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        return MSNNetwork(backbone, self.build_head(embed_dim(backbone)))

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the head of the published code: three layers with GELU, weights with std 0.02."""
        hidden_dim, out_dim = self.config.hidden_dim, self.config.out_dim
        head = mlp(
            embed_dim, hidden_dim, hidden_dim, out_dim, norm=self.config.norm, activation=nn.GELU
        )
        for layer in head:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        return head

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.grid_of = adapter_of(task.base_model.backbone).grid  # type: ignore[arg-type]

    def group_rules(self) -> list[GroupRule]:
        """Exclude the prototypes from weight decay."""
        return [GroupRule(match="loss.prototypes", weight_decay=0.0)]

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """Draw the patches that are kept in each masked view, (B, M, n)."""
        count, num_patches = self.config.masked_views, math.prod(self.grid_of(*sizes[1]))
        num_kept = max(1, int(num_patches * (1 - self.config.mask_ratio)))
        draws = uniform(seed, key, count * num_patches).unflatten(1, (count, num_patches))
        return draws.argsort(dim=2, stable=True)[..., :num_kept]

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        _, *views = batch.all_views
        count = self.config.masked_views
        batch.input = (views[:count], self.drawn(batch, task), views[count:])

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, K) from the teacher's features of the first view.

        Their entropy is logged as ``target_entropy``.
        """
        batch = task.last_batch
        (features,) = self.teacher((batch.all_views[:1], None, [])).prediction  # (B, D)
        batch["targets"] = self.targets(features)
        log_target_entropy(batch["targets"], task)

    @torch.no_grad()
    def targets(self, features: Tensor) -> Tensor:
        """Turn the teacher's features (B, D) into sharpened probabilities (B, K).

        With ``sinkhorn_iterations``, they are balanced over the batch of all ranks.
        """
        log_probs = self.log_probs(features, self.config.temperature * self.config.sharpening)
        return self.balanced(log_probs, 1.0) if self.config.sinkhorn_iterations else log_probs.exp()

    def log_probs(self, features: Tensor, temperature: float) -> Tensor:
        """Return log-probabilities of prototypes (..., K) given features (..., D); eq. 1."""
        return F.log_softmax(self.scores(features) / temperature, dim=-1)

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of eq. 2 for ``output.prediction`` (V, B, D).

        ``me_max`` is the weighted KL divergence of the mean prediction over the views of all ranks
        from the prior; there is no such term if its weight is 0. For a uniform prior the divergence
        is log K minus the entropy, which MSN maximizes.
        """
        weight = self.config.me_max_weight
        log_probs = self.log_probs(output.prediction, self.config.temperature)  # (V, B, K)
        terms = {"cross_entropy": view_cross_entropy(batch["targets"][None], log_probs).mean()}
        if weight:
            mean = sum_with_equal_grad(log_probs.exp().mean(dim=(0, 1))) / world_size()  # (K,)
            terms["me_max"] = weight * (mean * (mean.log() - self.log_prior)).sum()
        return terms

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the teacher's view, and the first masked view of the student."""
        whole, masked = batch.all_views[:2]
        _, keep, _ = batch.input
        first = keep[:, 0]  # (B, n)
        num_patches = math.prod(self.grid_of(*masked.shape[-2:]))
        seen = mask_of(first, torch.zeros_like(first, dtype=torch.bool), num_patches)  # (B, N)
        return {"image": whole, "masked": hide_patches(masked, ~seen)}

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: ln(``num_prototypes``), with ``power: 0``.

        With a prior that is not uniform, ``me_max_weight`` times its divergence is added.
        """
        config, numbers = self.config, range(1, self.config.num_prototypes + 1)
        total = math.fsum(number**-config.power for number in numbers)
        mean_log = config.power * math.fsum(map(math.log, numbers)) / len(numbers)
        divergence = mean_log + math.log(total / len(numbers))  # of equal probabilities from prior
        return math.log(len(numbers)) + config.me_max_weight * divergence

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Return the teacher's head and the prototypes, with the temperature of the targets."""
        temperature = self.config.temperature * self.config.sharpening
        targets: Targets = "sinkhorn" if self.config.sinkhorn_iterations else "softmax"
        part = "method.teacher.network.head"
        return self.trained_scores(embed_dim, checkpoint, part, temperature, targets)


class MSNNetwork(Network):
    """Backbone and head: views -> ``prediction`` (V, B, D) and features of the masked views.

    BatchNorm in the head has separate statistics for masked and focal views, as in the published
    code.
    """

    def forward(self, inputs: Inputs) -> PatchOutput:  # type: ignore[override]
        views, keep, focal = inputs
        if keep is not None:
            keep = keep.transpose(0, 1).flatten(0, 1)  # (M * B, n)
        features = self.extract(views, keep=keep)
        outputs = [self.head(features.pooled)]  # (M * B, D)
        if focal:
            outputs.append(self.head(self.extract(focal).pooled))
        outputs = torch.cat(outputs).unflatten(0, (len(views) + len(focal), -1))
        return PatchOutput(outputs, features, keep)
