"""MixMIM: reconstruct two images that are mixed into one.

B: images per rank, N: squares of an image, K of which it keeps in the mixed image and M of which
its partner fills, P: values in a square (its pixels times the channels), E: width of the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import world_size
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.masked_patches import Kept, KeptPatches, initialize_as_mae
from selftask.methods.mae import normalize, patchify
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.masks import hide_patches, is_hidden
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import to_float32
from selftask.models.predictors.patch_predictor import PatchPredictor, fix_sincos_positions
from selftask.registry import register_method


@register_method("mixmim")
class MixMIM(KeptPatches):
    """MixMIM (arXiv:2205.13137): reconstructs the two images that are mixed in its input; for Swin.

    Squares of one image are filled with those of another instead of mask tokens, so that the
    whole backbone, even a hierarchical one, processes only real patches. The patches of each image
    attend only to one another. The later title of the paper is MixMAE.

    Loss: ``mean (x - x')^2`` of the standardized squares x of each image that are missing in the
    mixed image, and their predictions x'.

    Published: ImageNet fine-tuned top-1 after 600 epochs of Swin-B 85.1, Swin-L 85.9 (authors'
    README).

    Use it in place of ``mae`` for a Swin transformer. With a plain transformer it amounts to
    ``mae`` with half the patches; build it without a class token, to which no patch would attend.

    Differs from the authors' code:

    * Neighbors in the batch are mixed, and each pair has its own squares, so that results do not
      depend on the number of ranks; the authors' code mixes an image with the one at the mirrored
      position in the batch of a GPU, and all pairs have the same squares.
    * The backbone is timm's Swin, with shifted windows and without absolute positions; the authors'
      Swin has no shifts, and sine-cosine positions.
    """

    paper = (
        "Liu et al., MixMAE: Mixed and Masked Autoencoder for Efficient Pretraining of "
        "Hierarchical Vision Transformers, CVPR 2023"
    )
    requires = ("groups",)
    sample_dim = None  # pairs belong together
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(KeptPatches.Config):
        mask_ratio: float = setting(0.5, above=0, below=1)
        """Share of the squares that the partner fills."""
        normalize_pixels: bool = True
        """Whether each target square is normalized to mean 0 and variance 1."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build backbone and decoder, initialized as in MAE; a loaded backbone keeps its weights.

        Raises:
            UserError: If a rank has an odd number of images, if images cannot be divided into
                squares, or if ``mask_ratio`` fills none or all of them.
        """
        if task.length.batch_size // world_size() % 2:
            raise UserError(
                f"train.batch_size={task.length.batch_size}: mixmim mixes pairs of images; take an "
                "even number of images per rank"
            )
        adapter = adapter_of(backbone)
        self.side, self.patches_per_side = adapter.stride, adapter.stride // adapter.patch_size[0]
        grid = self.squares(adapter.built_grid)
        self.num_kept(grid)
        decoder = PatchPredictor(
            embed_dim(backbone),
            grid,
            num_out=task.data_module.channels * self.side**2,
            **self.config.decoder_sizes,
        )
        initialize_as_mae(decoder)
        if task.config.init.backbone is None:
            if adapter.positions is not None:
                fix_sincos_positions(backbone)
            initialize_as_mae(backbone)
        return MixedNetwork(backbone, decoder)

    def squares(self, grid: Grid) -> Grid:
        """Return the rows and columns of squares in an image, from those of its patches.

        The side of a square is the total stride of the backbone.

        Raises:
            UserError: If the image cannot be divided into such squares.
        """
        if any(length % self.patches_per_side for length in grid):
            rows, columns = (length * self.side // self.patches_per_side for length in grid)
            raise UserError(
                f"views: images of {rows}x{columns} pixels cannot be divided into squares of "
                f"{self.side} pixels, the total stride of the backbone"
            )
        return grid[0] // self.patches_per_side, grid[1] // self.patches_per_side

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Kept:
        """Draw the squares that an image keeps, equal for both images of a pair."""
        first = torch.arange(len(key)) // 2 * 2
        return super().draw_mask(seed, key[first], self.squares(grid))

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["pixels"]`` (B, N, P), in the order of the predictions."""
        batch = task.last_batch
        pixels, mask = patchify(batch.all_views[0], self.side), batch["mask"]
        if self.config.normalize_pixels:
            pixels = normalize(pixels)
        hidden = gather_tokens(pixels, mask.predict[:, 0])
        of_partner = gather_tokens(partners(pixels), mask.keep)
        batch["pixels"] = torch.cat([hidden, of_partner], dim=1)

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean squared error; each square of an image is predicted once.

        ``output.prediction`` is (B, N, P).
        """
        return F.mse_loss(to_float32(output.prediction), batch["pixels"])

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image and the mixed image."""
        images, mask = batch.input
        return {"image": images, "mixed": mix(images, hidden_squares(mask))}

    @property
    def chance_loss(self) -> float | None:
        """Loss of predicting the mean of each square, its variance: 1, with ``normalize_pixels``.

        None without it.
        """
        return 1.0 if self.config.normalize_pixels else None


class MixedNetwork(Network):
    """Backbone for mixed images, and a decoder that predicts the missing squares of both images.

    ``prediction`` of its output is (B, N, P): the M squares that the image lacks in its mixed
    image, then the K squares that its partner lacks there.
    """

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        keep, filled, hidden = mask.keep, mask.predict[:, 0], hidden_squares(mask)
        features = self.extract(mix(images, hidden), groups=hidden)
        patches, grid = features.patches, features.tokens.grid
        predicted = [
            self.head(gather_tokens(patches, seen), seen, predict[:, None], grid=grid)[:, 0]
            for seen, predict in ((keep, filled), (filled, keep))
        ]
        return PatchOutput(torch.cat(predicted, dim=1), features, mask)


def partners(rows: Tensor) -> Tensor:
    """Exchange the neighbors in a batch (B, ...): 0 and 1, 2 and 3, ...; an odd last one stays."""
    index = torch.arange(len(rows), device=rows.device)
    return rows[(index ^ 1).clamp(max=len(rows) - 1)]


def hidden_squares(mask: Kept) -> Tensor:
    """Return (B, N) bool, True for the squares that the partner fills."""
    return is_hidden(mask.keep, mask.keep.shape[1] + mask.predict.shape[2])


def mix(images: Tensor, hidden: Tensor) -> Tensor:
    """Fill the squares of images (B, C, H, W) that are True in (B, N) with those of partners."""
    return hide_patches(images, hidden) + hide_patches(partners(images), ~hidden)
