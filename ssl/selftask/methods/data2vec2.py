"""data2vec 2.0: predict a teacher's features of an image under several masks.

B: images per rank, M: masks of an image, N: patches of an image, K of them visible, E: width of
the backbone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.masked_patches import MaskedPatches, check_num_hidden
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.mlp_outputs import MLPOutputs
from selftask.models.features.tokens import Grid
from selftask.models.masks import hide_patches, is_hidden, padded_indices, scattered_squares
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.models.predictors.conv_decoder import ConvDecoder
from selftask.models.predictors.patch_predictor import fix_sincos_positions
from selftask.random.keyed import uniform
from selftask.registry import register_method


class Inputs(NamedTuple):
    """Argument of the network."""

    images: Tensor
    """(B, C, H, W)."""
    keep: Tensor
    """(B, M, K), indices of the visible patches."""
    noise: Tensor
    """(B, N, E), input of the decoder at hidden patches."""


class Predictions(NamedTuple):
    """Outputs of the network."""

    patches: Tensor
    """(M, B, N, E)."""
    images: Tensor
    """(M, B, E), the class tokens; (M, B, 0) without one."""


@register_method("data2vec2")
class Data2Vec2(MaskedPatches, EMATeacher):
    """data2vec 2.0 (arXiv:2212.07525): predicts a teacher's features under many masks of an image.

    Loss: ``|p - y|^2 / sqrt(E)`` of hidden patches, with predictions p and the teacher's E features
    y, for each of several masks of an image; the teacher runs once for all. A second term compares
    the class token with the mean of y over patches.

    Use it in place of ``data2vec`` if the teacher's forward passes take most of the time.

    Differs from the authors' code:

    * Transformers are timm's, with norms before each part of a block; in the authors' code, after
      it.
    * ``image_weight`` is the weight of a mean over images and masks. In the authors' code it is the
      weight of a sum over the images and masks of a GPU: 0.01 there equals 2.56 here, for 16 images
      with 16 masks each.
    * Noise at hidden patches is uniform, and shared by the masks of an image; in the authors' code
      it is normal.
    * At least one square is visible; the class token starts with a standard deviation of 0.02, in
      the authors' code 1.
    """

    paper = (
        "Baevski et al., Efficient Self-supervised Learning with Contextualized Target "
        "Representations for Vision, Speech and Language, ICML 2023"
    )
    columns = {
        "hidden_patches": "Term of the loss: hidden patches.",
        "class_token": "Term of the loss: the class token and the mean of the teacher's patches.",
    }
    sample_dim = None
    requires = ("subset",)
    teacher_drop_path = False

    @dataclass(frozen=True, kw_only=True)
    class Config(EMATeacher.Config):
        num_masks: int = setting(16, min=1, tiny=2)
        """Number of masks of an image, M, which share one pass of the teacher."""
        mask_ratio: float = setting(0.8, above=0, below=1)
        """Share of the patches that are hidden."""
        square: int = setting(3, min=1)
        """Side of the visible squares, in patches."""
        more_squares: float = setting(0.07, min=0, max=1)
        """Additional area of the squares, as a share of all patches, since squares overlap. Random
        patches are then hidden or shown to reach ``mask_ratio``.
        """
        top_blocks: int = setting(10, min=1, tiny=2)
        """Number of the teacher's last blocks whose mean is the target."""
        image_weight: float = setting(2.56, min=0)
        """Weight of the term of the class token."""
        noise: float = setting(0.01, min=0)
        """Standard deviation of the decoder's input at hidden patches."""
        decoder_dim: int = setting(768, min=1, tiny=16)
        """Width of the decoder."""
        decoder_depth: int = setting(6, min=1, tiny=1)
        """Number of convolutions of the decoder."""
        decoder_kernel: int = setting(3, min=1)
        """Side of the convolutions' kernels, odd."""
        decoder_groups: int = setting(16, min=1, tiny=2)
        """Number of groups of channels of the convolutions."""
        momentum: Schedule = teacher_momentum(
            {"name": "constant", "start": 0.99999, "warmup": "27%", "warmup_start": 0.9998}
        )
        """Momentum of the teacher, which rises linearly and then stays constant; smaller for short
        runs.
        """

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            backbone = config["backbone"]
            depth = backbone.get("depth")
            if isinstance(depth, int) and self.top_blocks > depth:
                yield f"top_blocks: {self.top_blocks}; the backbone has {depth} blocks"
            if self.image_weight and backbone.get("class_token") is False:
                yield f"image_weight: {self.image_weight:g}; needs backbone.class_token: true; or 0"
            if self.decoder_dim % self.decoder_groups:
                yield (
                    f"decoder_dim: {self.decoder_dim} must be divisible by "
                    f"decoder_groups={self.decoder_groups}"
                )
            if self.decoder_kernel % 2 == 0:
                yield f"decoder_kernel: {self.decoder_kernel} must be odd"

    def check_grid(self, grid: Grid) -> None:
        """Raise UserError if all patches or none are hidden."""
        num_patches = grid[0] * grid[1]
        num_hidden = num_patches - self.num_visible(grid)
        check_num_hidden(num_hidden, num_patches, self.config.mask_ratio)

    def num_visible(self, grid: Grid) -> int:
        return int((1 - self.config.mask_ratio) * grid[0] * grid[1])

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network, with fixed positions unless the backbone was loaded.

        Raises:
            UserError: If all patches or none are hidden, if ``decoder_groups`` does not divide the
                width of the backbone, if a backbone that was not loaded has no positions, or if
                ``image_weight`` needs a class token that the backbone lacks.
        """
        config, width = self.config, embed_dim(backbone)
        self.check_grid(adapter_of(backbone).built_grid)
        if width % config.decoder_groups:
            raise UserError(
                f"method.decoder_groups={config.decoder_groups}: the {width} features of the "
                "backbone cannot be divided into as many groups"
            )
        if task.config.init.backbone is None:
            fix_sincos_positions(backbone)
        decoder = ConvDecoder(
            width,
            dim=config.decoder_dim,
            depth=config.decoder_depth,
            kernel=config.decoder_kernel,
            groups=config.decoder_groups,
        )
        self.width = width
        network = Data2Vec2Network(backbone, decoder)
        if config.image_weight and not network.has_class_token:
            raise UserError(
                f"method.image_weight={config.image_weight:g}: the backbone has no class token; "
                "set it to 0"
            )
        return network

    def averaged(self, network: Any) -> nn.Module:
        return MLPOutputs(network.backbone, self.config.top_blocks)

    def setup(self, task: Task) -> None:
        super().setup(task)
        outputs: Any = self.teacher.network
        outputs.record()

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Draw masks and the noise at hidden patches, and set the input, see ``Inputs``."""
        super().prepare_batch(batch, task)
        images, keep = batch.input
        num_patches = math.prod(adapter_of(task.base_model.backbone).grid(*images.shape[-2:]))
        key = batch.key.to(images.device, non_blocking=True)
        draws = uniform(task.config.train.seed ^ 1, key, num_patches * self.width)
        noise = (draws - 0.5) * (12**0.5 * self.config.noise)
        batch.input = Inputs(images, keep, noise.unflatten(1, (num_patches, -1)))

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Tensor:
        """Return the indices of the visible patches, (B, M, K)."""
        self.check_grid(grid)
        config, num_patches = self.config, grid[0] * grid[1]
        share = 1 - config.mask_ratio + config.more_squares
        num_squares = max(1, int(num_patches * share / config.square**2))
        draws = uniform(seed, key, config.num_masks * (num_squares + num_patches))
        draws = draws.unflatten(1, (config.num_masks, -1))
        squares = scattered_squares(draws[..., :num_squares], config.square, grid)  # (B, M, N)
        keep, _ = padded_indices(squares, self.num_visible(grid), draws[..., num_squares:])
        return keep

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, N, E) from the teacher's layers for whole images."""
        batch = task.last_batch
        batch["targets"] = contextual_targets(self.teacher(batch.all_views[0]))

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the terms, means over masks and images; ``class_token`` only if it has a weight.

        ``output.prediction`` is a ``Predictions``.
        """
        targets, predicted = batch["targets"], output.prediction
        distance = scaled_distance(predicted.patches, targets)  # (M, B, N)
        hidden = is_hidden(batch["mask"], targets.shape[1]).transpose(0, 1)
        terms = {"hidden_patches": (distance * hidden).sum() / hidden.sum()}
        if weight := self.config.image_weight:
            image = scaled_distance(predicted.images, targets.mean(dim=1))  # (M, B)
            terms["class_token"] = weight * image.mean()
        return terms

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, and the visible patches of its first four masks."""
        images, keep = batch.input[:2]
        hidden = is_hidden(keep[:, :4], batch["targets"].shape[1]).unbind(dim=1)
        shown = {f"mask {n}": hide_patches(images, mask) for n, mask in enumerate(hidden, start=1)}
        return {"image": images, **shown}


class Data2Vec2Network(Network):
    """Encoder of the visible patches of each mask, and a decoder of all patches.

    It takes ``Inputs``; ``prediction`` of its output is ``Predictions``.
    """

    def __init__(self, backbone: nn.Module, decoder: ConvDecoder) -> None:
        super().__init__(backbone, decoder)
        self.has_class_token = getattr(backbone, "cls_token", None) is not None

    def forward(self, inputs: Inputs) -> PatchOutput:  # type: ignore[override]
        images, keep, noise = inputs
        num_masks = keep.shape[1]
        index = keep.transpose(0, 1).flatten(0, 1)  # (M * B, K), mask by mask, as views
        features = self.extract([images] * num_masks, keep=index)
        visible = features.patches  # (M * B, K, E)
        filled = noise.to(visible.dtype).repeat(num_masks, 1, 1)  # (M * B, N, E)
        filled = filled.scatter(1, index[..., None].expand_as(visible), visible)
        decoded = self.head(filled, adapter_of(self.backbone).grid(*images.shape[-2:]))
        tokens = features.prefix[:, 0] if self.has_class_token else features.pooled[:, :0]
        predictions = Predictions(*(x.unflatten(0, (num_masks, -1)) for x in (decoded, tokens)))
        return PatchOutput(predictions, features, keep)


@torch.no_grad()
def contextual_targets(layers: Sequence[Tensor]) -> Tensor:
    """Normalize layers (B, N, E) over N, average them, and normalize the mean over E."""
    normalized = [F.instance_norm(to_float32(layer).transpose(1, 2)) for layer in layers]
    mean = torch.stack(normalized).mean(dim=0).transpose(1, 2)
    return F.layer_norm(mean, mean.shape[-1:])


@in_full_precision
def scaled_distance(predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the squared distance of features (..., E), divided by sqrt(E): (...)."""
    return (predicted - targets).square().sum(dim=-1) / predicted.shape[-1] ** 0.5
