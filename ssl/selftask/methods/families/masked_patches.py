"""Methods that hide patches of an image and predict targets for them.

Hidden patches are replaced by a mask token (``MaskedNetwork``, requires ``"tokens"``), or removed
and predicted from the others (``KeptNetwork``, requires ``"subset"``).

B: images per rank, N = h * w: patches of an image, K: patches that are kept, M: groups of Q patches
to predict, H: maximum number of hidden patches of an image, E: width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method, Task
from selftask.models.block_mask import BlockMask
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.masks import hide_patches, padded_indices
from selftask.models.network import Network, PatchOutput
from selftask.models.predictors.patch_predictor import PatchPredictor, fix_sincos_positions
from selftask.models.weights.lora import base_weight
from selftask.random.keyed import uniform


class MaskedPatches(Method):
    """Method that draws ``batch["mask"]`` for the first view; the network gets ``(images, mask)``.

    ``build_network`` calls ``check_grid`` for the grid of patches that the backbone is built for.
    """

    loss_reduction: ClassVar[Literal["samples", "gathered", "statistics"]] = "samples"
    sample_dim: ClassVar[int | None] = 0
    views = 1
    requires: ClassVar[tuple[str, ...]] = ("tokens",)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return a network that applies the head to the patches of the masked image."""
        self.check_backbone(backbone)
        self.check_grid(adapter_of(backbone).built_grid)
        return MaskedNetwork(backbone, self.build_head(embed_dim(backbone)))

    def check_grid(self, grid: Grid) -> None:
        """Raise UserError if no masks can be drawn for a grid of patches; by default never."""

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.grid_of = adapter_of(task.base_model.backbone).grid  # type: ignore[arg-type]

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Any:
        return self.draw_mask(seed, key, self.grid_of(*sizes[0]))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        batch["mask"] = self.drawn(batch, task)
        batch.input = (batch.all_views[0], batch["mask"])

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Any:
        """Draw masks of images; subclasses override this method.

        Args:
            seed: Seed of the run.
            key: (B, 2) on the CPU, see ``random.keyed``.
            grid: Rows and columns of patches.

        Returns:
            bool (B, N) or (B, h, w), True for hidden patches; or what the method's network takes
            in place of it, such as ``Kept``.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no masks")

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the images, and copies with hidden patches set to 0."""
        (images,) = batch.all_views
        return {"image": images, "masked": hide_patches(images, batch["mask"].flatten(1))}


class MaskedNetwork(Network):
    """Backbone in which a trained token replaces hidden patches, followed by a head.

    It takes images (B, C, height, width) and a mask (B, h, w) or (B, N), True for hidden patches.

    Args:
        backbone: Backbone with ``"tokens"`` in its ``offers``.
        head: Patches (B, N, E) -> predictions.
        takes_map: Whether the head takes a map (B, E, h, w) instead.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, *, takes_map: bool = False) -> None:
        super().__init__(backbone, head)
        self.takes_map = takes_map
        self.mask_token = nn.Parameter(torch.empty(adapter_of(backbone).mask_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        features = self.extract(images, mask=mask.flatten(1), mask_token=self.mask_token)
        shown = features.tokens.map if self.takes_map else features.patches
        return PatchOutput(self.head(shown), features, mask)


def check_num_hidden(num_hidden: int, num_patches: int, ratio: float) -> None:
    """Raise UserError if ``method.mask_ratio`` hides none or all of the patches of an image."""
    if not 0 < num_hidden < num_patches:
        change = "raise" if num_hidden <= 0 else "lower"
        raise UserError(
            f"method.mask_ratio={ratio} hides {num_hidden} of the {num_patches} patches of an "
            f"image; at least one must be hidden, and one visible: {change} it, or take larger "
            "images or smaller patches"
        )


class BlockMasks(MaskedPatches):
    """Method that hides blocks of patches, as BEiT does."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = setting(0.4, above=0, below=1)
        """Maximum share of the patches of an image that are masked, in blocks."""
        min_block: int = setting(16, min=1, tiny=2)
        """Smallest area of a masked block, in patches, unless fewer remain to be masked."""

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError unless each patch that can be masked has a token in the last layer."""
        adapter = adapter_of(backbone)
        if adapter.stride != adapter.patch_size[0]:
            raise UserError(
                f"backbone: a {type(backbone).__name__} merges the patches that are masked, and "
                "the method predicts each of them; take a vision transformer"
            )

    def check_grid(self, grid: Grid) -> None:
        """Raise UserError if ``min_block`` is too large."""
        hidden, least = self.num_hidden(grid), self.config.min_block
        if hidden < least:
            raise UserError(
                f"method.min_block={least} is more than the {hidden} patches that method.mask_ratio"
                f"={self.config.mask_ratio} masks of {grid[0]}x{grid[1]}"
            )

    def num_hidden(self, grid: Grid) -> int:
        """Return the maximum number of hidden patches, H."""
        return int(self.config.mask_ratio * grid[0] * grid[1])

    def block_mask(self, grid: Grid) -> BlockMask:
        """Return the sampler of masks for a grid of patches."""
        return BlockMask(grid, min_patches=self.config.min_block, max_patches=grid[0] * grid[1])

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Tensor:
        """Return BEiT's block masks, (B, N)."""
        self.check_grid(grid)
        counts = torch.full_like(key[:, 0], self.num_hidden(grid))
        return self.block_mask(grid).draw(seed, key, counts)


class BlockMaskedPatches(BlockMasks):
    """Method whose loss is computed on hidden patches only.

    The network gets ``(images, mask, indices)``, and its head the hidden patches (B, H, E).
    """

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return a network that applies the head to the hidden patches."""
        self.check_backbone(backbone)
        self.check_grid(adapter_of(backbone).built_grid)
        return HiddenPatchNetwork(backbone, self.build_head(embed_dim(backbone)))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Draw masks and set the input.

        Sets ``batch["grid"]``, rows and columns of patches, and ``batch["hidden"]``, the indices
        (B, H) of hidden patches and their padding (B, H).
        """
        super().prepare_batch(batch, task)
        images, mask = batch.input
        batch["grid"] = self.grid_of(*images.shape[-2:])
        batch["hidden"] = padded_indices(mask, self.num_hidden(batch["grid"]))
        batch.input = (images, mask, batch["hidden"][0])


class HiddenPatchNetwork(MaskedNetwork):
    """Backbone in which a trained token replaces hidden patches, with a head for these patches.

    It takes images, a mask (B, N), and the indices (B, H) of the patches that the head gets.
    """

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> PatchOutput:  # type: ignore[override]
        images, mask, indices = inputs
        features = self.extract(images, mask=mask, mask_token=self.mask_token)
        return PatchOutput(self.head(gather_tokens(features.patches, indices)), features, mask)


def mean_of_hidden(losses: Tensor, padding: Tensor) -> Tensor:
    """Return the mean over the hidden patches of each image, averaged over images.

    Args:
        losses: (B, H).
        padding: (B, H) bool, True for padding, which is ignored.
    """
    of_image = losses.masked_fill(padding, 0.0).sum(dim=1) / (~padding).sum(dim=1).clamp(min=1)
    return of_image.mean()


class Kept(NamedTuple):
    """Patches that are encoded, and patches to predict from them."""

    keep: Tensor
    """(B, K), indices of the encoded patches."""
    predict: Tensor
    """(B, M, Q), indices of the patches to predict."""
    padding: Tensor | None = None
    """(B, K) bool, True for padding in ``keep``."""
    predict_padding: Tensor | None = None
    """(B, M, Q) bool, True for padding in ``predict``."""


class KeptPatches(MaskedPatches):
    """Method that encodes some of the patches, and predicts the others with a decoder (MAE)."""

    requires: ClassVar[tuple[str, ...]] = ("subset",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = setting(0.75, above=0, below=1)
        """Share of the patches that are masked, drawn at random."""
        decoder_dim: int = setting(512, min=1, tiny=16)
        """Width of the decoder."""
        decoder_depth: int = setting(8, min=1, tiny=1)
        """Number of blocks of the decoder."""
        decoder_heads: int = setting(16, min=1, tiny=2)
        """Number of attention heads of the decoder."""

        @property
        def decoder_sizes(self) -> dict[str, int]:
            """Width, blocks and heads of the decoder, as arguments of ``PatchPredictor``."""
            names = {"dim": "decoder_dim", "depth": "decoder_depth", "num_heads": "decoder_heads"}
            return {argument: getattr(self, name) for argument, name in names.items()}

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
                yield (
                    f"decoder_dim: {self.decoder_dim} must be divisible by 4 (its positions) and "
                    f"by decoder_heads={self.decoder_heads}"
                )

    def build_kept(self, backbone: nn.Module, task: Task, num_out: int) -> KeptNetwork:
        """Return encoder and decoder, the latter with ``num_out`` outputs per patch.

        They are initialized as in MAE, except for an encoder that ``init`` loads.

        Raises:
            UserError: If ``mask_ratio`` keeps none or all of the patches, or if a backbone that
                ``init`` does not load has no positions.
        """
        self.num_kept(adapter_of(backbone).built_grid)
        return build_kept_network(backbone, task, num_out=num_out, **self.config.decoder_sizes)

    def num_kept(self, grid: Grid) -> int:
        """Return the number of encoded patches; raise UserError if none or all are encoded."""
        ratio, num_patches = self.config.mask_ratio, grid[0] * grid[1]
        kept = int(num_patches * (1 - ratio))
        check_num_hidden(num_patches - kept, num_patches, ratio)
        return kept

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Kept:
        """Draw the patches to keep; the others form one group to predict."""
        draws = uniform(seed, key, grid[0] * grid[1])  # (B, N)
        order = draws.argsort(dim=1, stable=True)
        num_kept = self.num_kept(grid)
        return Kept(order[:, :num_kept], order[:, None, num_kept:])

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the images, and copies in which patches that are not encoded are 0."""
        images, keep = batch.all_views[0], batch["mask"].keep
        num_patches = keep.shape[1] + batch["mask"].predict[0].numel()
        hidden = keep.new_ones(len(keep), num_patches, dtype=torch.bool).scatter(1, keep, False)
        return {"image": images, "masked": hide_patches(images, hidden)}


class KeptNetwork(Network):
    """Encoder of the kept patches, and a transformer that predicts others, (B, M, Q, outputs).

    It takes images (B, C, height, width) and a ``Kept``.
    """

    def forward(self, inputs: tuple[Tensor, Kept]) -> PatchOutput:  # type: ignore[override]
        images, mask = inputs
        features = self.extract(images, keep=mask.keep, padding=mask.padding)
        predicted: Tensor = self.head(
            features.tokens.sequence,
            mask.keep,
            mask.predict,
            padding=mask.padding,
            predict_padding=mask.predict_padding,
            grid=adapter_of(self.backbone).grid(*images.shape[-2:]),
        )
        return PatchOutput(predicted, features, mask)


@torch.no_grad()
def initialize_as_mae(module: nn.Module) -> None:
    """Initialize linear layers and the patch embedding with Xavier's uniform weights, in place.

    MAE (arXiv:2111.06377), appendix A.1. Biases of linear layers are set to zero, and the class
    token to normal values of standard deviation 0.02. The bias of the patch embedding keeps its
    value, as in the published code.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            weight = base_weight(part)
            nn.init.xavier_uniform_(weight.view(len(weight), -1))
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
    token = getattr(module, "cls_token", None)
    if token is not None:
        nn.init.normal_(token, std=0.02)


def initialize_network(
    backbone: nn.Module,
    head: nn.Module,
    task: Task,
    initialize: Callable[[nn.Module], None] = initialize_as_mae,
) -> None:
    """Initialize a head and, unless the config's ``init`` loads its weights, a backbone.

    A backbone that is initialized also gets fixed positions, see ``fix_sincos_positions``.

    Raises:
        UserError: If such a backbone has no positions.
    """
    initialize(head)
    if task.config.init.backbone is None:
        fix_sincos_positions(backbone)
        initialize(backbone)


def build_kept_network(
    backbone: nn.Module,
    task: Task,
    initialize: Callable[[nn.Module], None] = initialize_as_mae,
    *,
    num_out: int,
    dim: int,
    depth: int,
    num_heads: int,
) -> KeptNetwork:
    """Return a network of a backbone and a patch predictor, both with fixed sine-cosine positions.

    If ``init`` loads the backbone's weights, the backbone keeps them and its positions.

    Args:
        backbone: Backbone with ``"subset"`` in its ``offers``.
        task: The task.
        initialize: Function that sets the initial weights of a module in place.
        num_out: Number of outputs per patch.
        dim: Width of the predictor.
        depth: Blocks of the predictor.
        num_heads: Attention heads of a block.

    Raises:
        UserError: If a backbone that is not loaded has no positions.
    """
    grid, width = adapter_of(backbone).built_grid, embed_dim(backbone)
    predictor = PatchPredictor(
        width, grid, dim=dim, depth=depth, num_heads=num_heads, num_out=num_out
    )
    initialize_network(backbone, predictor, task, initialize)
    return KeptNetwork(backbone, predictor)
