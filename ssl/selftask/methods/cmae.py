"""CMAE: MAE that also contrasts the image with a shifted view of it.

B: images per rank, N: patches of an image, K encoded and M masked ones, P: values in a patch, E:
width of the backbone, D: width of projector and predictor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.masked_patches import Kept, KeptNetwork, initialize_as_mae
from selftask.methods.mae import MAE
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.losses.contrast import gathered_cross_entropy
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision
from selftask.models.predictors.patch_predictor import PatchPredictor
from selftask.registry import register_method


class Predictions(NamedTuple):
    """Outputs for the first view."""

    pixels: Tensor
    """(B, 1, M, P), of the masked patches."""
    image: Tensor
    """(B, D), of the predictor."""


@register_method("cmae")
class CMAE(MAE, EMATeacher):
    """CMAE (arXiv:2207.13532): MAE that also contrasts its features with those of a shifted view.

    The first view is masked. An EMA teacher sees the whole second view: a crop shifted by some
    pixels, with different colors.

    Loss: ``mean (x - x')^2 + w 2 tau CE(p.t/tau)`` with masked patches x and their predictions x',
    the prediction p for an image, and the teacher's outputs t for all images.

    Published: ImageNet fine-tuned top-1 of ViT-B 83.8 after 300 epochs, 84.7 after 1600 (authors'
    README).

    Use it in place of ``mae`` before fine-tuning a transformer, at the cost of a teacher.

    Differs from the authors' code:

    * Masked patches are drawn one by one; in the authors' code, in squares of 2 x 2 patches.
    * The teacher's features are normalized by the backbone's last norm; in the authors' code they
      are not.
    * The feature decoder has the initial weights of MAE's decoder.
    """

    paper = "Huang et al., Contrastive Masked Autoencoders Are Stronger Vision Learners, TPAMI 2024"
    columns = {
        "image_contrast": "Term of the loss: contrast with the teacher's outputs of all images."
    }
    loss_reduction = "gathered"  # negatives are the teacher's outputs on all ranks
    sample_dim = None
    views = 2
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(MAE.Config, EMATeacher.Config):
        momentum: Schedule = teacher_momentum(0.996)
        """Momentum of the teacher."""
        feature_depth: int = setting(2, min=1, tiny=1)
        """Number of blocks of the feature decoder; its width and heads are the pixel decoder's."""
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the output of projector and predictor, D."""
        hidden_dim: int = setting(1536, min=1, tiny=32)
        """Width of the hidden layers of projector and predictor."""
        temperature: float = setting(0.07, above=0)
        """Temperature of the similarities, tau."""
        contrast_weight: float = setting(1.0, min=0)
        """Weight of the contrastive term, w."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build MAE's network, and a decoder, projector and predictor of features."""
        config, width = self.config, embed_dim(backbone)
        network: Any = super().build_network(backbone, task)
        decoder = FeatureDecoder(
            width,
            adapter_of(backbone).built_grid,
            num_out=width,
            **{**config.decoder_sizes, "depth": config.feature_depth},
        )
        initialize_as_mae(decoder)
        hidden, out = config.hidden_dim, config.out_dim
        head = ProjectorPredictor(mlp(width, hidden, out), mlp(out, hidden, out))
        return ContrastNetwork(network.backbone, network.head, decoder, head)

    def averaged(self, network: Any) -> nn.Module:
        """Return backbone and projector, for whole images; the teacher has no predictor."""
        return WholeImageNetwork(network.backbone, network.contrast_head.projector)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute MAE's pixels, and ``batch["target"]`` (B, D).

        The target is the teacher's output for the second view.
        """
        super().on_forward(task)
        task.last_batch["target"] = self.teacher(task.last_batch.all_views[1])  # (B, D)

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:  # type: ignore[override]
        """Return MAE's terms and ``image_contrast``; ``output.prediction`` is a ``Predictions``."""
        config = self.config
        contrast = contrast_loss(
            output.prediction.image, batch["target"], temperature=config.temperature
        )
        return {
            **self.terms(of_pixels(output), batch),
            "image_contrast": config.contrast_weight * contrast,
        }

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the images of MAE, and the teacher's view."""
        return {**super().visualize(of_pixels(output), batch), "teacher": batch.all_views[1]}

    @property
    def chance_loss(self) -> float | None:
        """Loss of patch means and equal similarities: 1 + ``contrast_weight`` * 2 * ``temperature``
        * ln(batch).

        None if the chance loss of ``mae`` is None.
        """
        pixels, config = super().chance_loss, self.config
        if pixels is None:
            return None
        return pixels + config.contrast_weight * 2 * config.temperature * math.log(self.batch_size)


class ContrastNetwork(KeptNetwork):
    """MAE's network with a second decoder, followed by a projector and a predictor.

    ``prediction`` of its output is ``Predictions``.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        feature_decoder: FeatureDecoder,
        contrast_head: ProjectorPredictor,
    ) -> None:
        super().__init__(backbone, head)
        self.feature_decoder = feature_decoder
        self.contrast_head = contrast_head

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        output = super().forward(inputs)
        images, mask = inputs
        grid = adapter_of(self.backbone).grid(*images.shape[-2:])
        encoded = output.features.tokens.sequence
        feature = self.feature_decoder(encoded, mask.keep, mask.predict, grid=grid)  # (B, E)
        _, predicted = self.contrast_head(feature).unbind(1)
        return output._replace(prediction=Predictions(output.prediction, predicted))


class FeatureDecoder(PatchPredictor):
    """Decoder that returns the mean over all patches, encoded and masked: (B, num_out)."""

    def read(self, tokens: Tensor, keep: Tensor, predict: Tensor) -> Tensor:
        patches = tokens[:, -(keep.shape[1] + predict.shape[2]) :]  # without prefix tokens
        return self.project(self.norm(patches).mean(dim=1))


class WholeImageNetwork(Network):
    """Backbone, then a head for the mean of the patches: images (B, C, H, W) -> (B, D)."""

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.extract(images).patches.mean(dim=1))


def of_pixels(output: PatchOutput) -> PatchOutput:
    """Return the output with the predicted pixels only, as ``MAE`` expects it."""
    return output._replace(prediction=output.prediction.pixels)


@in_full_precision
def contrast_loss(prediction: Tensor, target: Tensor, *, temperature: float) -> Tensor:
    """Return InfoNCE times 2 tau, a scalar.

    InfoNCE is the cross-entropy of each prediction with its target, among those of all ranks.

    Args:
        prediction: (B, D), not necessarily normalized.
        target: (B, D), not necessarily normalized; row b belongs to prediction b.
        temperature: tau.
    """
    queries, keys = F.normalize(prediction, dim=1), F.normalize(target, dim=1)
    return 2 * temperature * gathered_cross_entropy(queries, keys, scale=1 / temperature)
