"""Methods that assign images, or patches, to prototypes.

``PrototypeHeads`` (DINO): the head of the network ends in the prototypes, and a teacher's scores
are the targets. ``PrototypeLayer`` (SwAV): prototypes are a layer of the method itself.

B: images per rank, N: rows, E: width of the backbone, D: width of the head, K: prototypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.run_length import RunLength
from selftask.config.schema.optimizer import GroupRule
from selftask.distributed.collectives import all_reduce_mean
from selftask.methods.base import Method, Task
from selftask.models.clustering import sinkhorn_knopp
from selftask.models.heads import DINOHead, UnitLength
from selftask.models.precision import to_float32
from selftask.models.weights.load import load_part
from selftask.models.weights.trained import Scores, Targets
from selftask.optim.schedules import build_schedule, last_value


def target_entropy(targets: Tensor) -> Tensor:
    """Return the mean entropy of targets: ``-mean_i sum_k p_ik ln p_ik``, in nats.

    This is the teacher's entropy in figure 7 of DINO (arXiv:2104.14294). It needs no labels. A
    value of 0 means collapse to one prototype. A value of ln K means collapse to equal
    probabilities, if the student's divergence is 0.

    Args:
        targets: Probabilities of K prototypes (..., K), of images, not of patches.
    """
    return torch.special.entr(targets.detach()).sum(dim=-1).mean()


def log_target_entropy(targets: Tensor, task: Task) -> None:
    """Log the mean of ``target_entropy`` over ranks, if the step is logged.

    Use it for losses of which it is not a separate term. Every rank must call this function.
    """
    if task.should_log:
        task.log("target_entropy", all_reduce_mean(target_entropy(targets)))


class PrototypeHeads(Method):
    """Method whose heads end in K prototypes; combine it with ``EMATeacher`` for targets."""

    head_names: ClassVar[tuple[str, ...]] = ("head",)
    """Names of the heads in the network."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(65_536, min=1, tiny=16)
        """Number of prototypes, K."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the hidden layers of a head."""
        bottleneck: int = setting(256, min=1, tiny=16)
        """Width of a head before its last layer."""
        num_layers: int = setting(3, min=1, max=100)
        """Number of layers of a head including the bottleneck, without the last layer."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the student."""
        teacher_temperature: float | dict[str, Any] = setting(
            {"name": "constant", "start": 0.07, "warmup": "30 epochs", "warmup_start": 0.04},
            of="schedules",
            above=0,
        )
        """Temperature of the teacher; a constant 0.04 is safer if training diverges."""
        center_momentum: float = setting(0.9, min=0, max=1)
        """Weight of the old center of the teacher's scores at each step."""
        freeze_last_layer: int | str = setting("1 epoch", duration=True)
        """Duration for which the last layer, the prototypes, is not trained."""

    def build_head(self, embed_dim: int) -> nn.Module:
        return self.prototype_head(embed_dim)

    def prototype_head(
        self, embed_dim: int, *, norm: bool = False, trained_length: bool = False
    ) -> DINOHead:
        """Build a head: features (N, E) -> scores (N, K).

        Args:
            embed_dim: Number of features, E.
            norm: Whether to add BatchNorm to the MLP; see ``DINOHead``.
            trained_length: Whether to train the prototypes' lengths; see ``WeightNormLinear``.
        """
        config = self.config
        return DINOHead(
            embed_dim,
            config.out_dim,
            hidden=config.hidden_dim,
            bottleneck=config.bottleneck,
            num_layers=config.num_layers,
            norm=norm,
            trained_length=trained_length,
        )

    def group_rules(self) -> list[GroupRule]:
        """Freeze the prototypes at first, while the teacher is random."""
        layers = [f"network.{head}.last_layer" for head in self.head_names]
        return [GroupRule(match=layers, freeze=self.config.freeze_last_layer)]

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.teacher_temperature_at = build_schedule(self.config.teacher_temperature, task.length)

    def log_probs(self, scores: Tensor) -> Tensor:
        """Return the student's log-probabilities of prototypes, given its scores (..., K)."""
        return F.log_softmax(to_float32(scores) / self.config.temperature, dim=-1)

    def teacher_scores(
        self, embed_dim: int, checkpoint: Mapping[str, Any], center: Tensor, *, head: str = "head"
    ) -> Scores:
        """Load a trained head of the teacher, with its last temperature; used by ``load_scores``.

        Args:
            embed_dim: Number of features of the backbone, E.
            checkpoint: Checkpoint of a run.
            center: Center of the teacher's scores, (K,).
            head: Name of the head in the network; ``self.build_NAME`` builds it.
        """
        trained = getattr(self, f"build_{head}")(embed_dim)
        load_part(trained, checkpoint, f"method.teacher.network.{head}")
        length = RunLength(**checkpoint["length"])
        temperature = last_value(self.config.teacher_temperature, length)
        targets: Targets = getattr(self.config, "targets", "centering")
        return Scores(trained, temperature, targets, center)


class PrototypeLayer(Method):
    """Method with ``self.prototypes``, a layer from unit vectors (..., D) to scores (..., K)."""

    prototypes: nn.Module

    @dataclass(frozen=True, kw_only=True)
    class Config:
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the head's hidden layers."""
        norm: bool = True
        """Whether the head has BatchNorm."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the softmax over prototypes."""
        power: float = setting(0.0, min=0)
        """Exponent of the prototypes' shares: prototype k gets a share of the images proportional
        to k ** -power; 0: equal shares. Above 0 for data whose classes have a long tail.
        """

    def scores(self, features: Tensor) -> Tensor:
        """Return the cosines (..., K) of features (..., D), in full precision."""
        with torch.autocast(features.device.type, enabled=False):
            cosines: Tensor = self.prototypes(F.normalize(to_float32(features), dim=-1))
        return cosines

    def balanced(self, scores: Tensor, epsilon: float) -> Tensor:
        """Return this rank's assignments (B, K), balanced over all ranks by Sinkhorn-Knopp.

        The config of the subclass must have ``sinkhorn_iterations``.

        Args:
            scores: (B, K).
            epsilon: Weight of the entropy; smaller values give harder assignments.
        """
        iterations, power = self.config.sinkhorn_iterations, self.config.power
        return sinkhorn_knopp(scores, epsilon=epsilon, iterations=iterations, power=power)

    def trained_scores(
        self,
        embed_dim: int,
        checkpoint: Mapping[str, Any],
        part: str,
        temperature: float,
        targets: Targets = "sinkhorn",
    ) -> Scores:
        """Load a trained head and the prototypes; used by ``load_scores``.

        Args:
            embed_dim: Number of features of the backbone, E.
            checkpoint: Checkpoint of a run.
            part: Path of the head in the checkpoint, such as ``model.head``.
            temperature: Temperature of the targets.
            targets: How scores become probabilities, see ``Scores``.
        """
        head = self.build_head(embed_dim)
        load_part(head, checkpoint, part)
        load_part(self.prototypes, checkpoint, "method.prototypes")
        scores = CosineScores(head, UnitLength(), self.prototypes)
        return Scores(scores, temperature, targets, power=self.config.power)


class CosineScores(nn.Sequential):
    """A head, ``UnitLength``, and prototypes, which are applied in full precision as in training.

    Scores in bfloat16 have three digits, and are divided by small temperatures.
    """

    def forward(self, features: Tensor) -> Tensor:
        head, unit_length, prototypes = self
        units = unit_length(head(features))
        with torch.autocast(units.device.type, enabled=False):
            scores: Tensor = prototypes(to_float32(units))
        return scores
