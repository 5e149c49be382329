"""Masks of patches, drawn for each sample from its key, independent of ranks and resumes.

B images, N patches of an image (row by row), K: maximum number of patches in a context, M target
blocks, Q: maximum number of patches in a target block, S squares.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.errors import UserError
from selftask.random.keyed import uniform

Range = tuple[float, float]
Indices = tuple[Tensor, Tensor]
"""Indices of patches, and a bool tensor that is True for padding."""

_SQUARE = (1.0, 1.0)  # the aspect ratio of the image
_DRAWS = 4  # per block: area, shape, row, column
_HINTS = 10  # one of ten masked patches is revealed, among the tenth of the highest attention


class MultiBlockMask:
    """Sampler of several target blocks and one context block for each image, as in I-JEPA.

    The published code draws one size for a whole batch and then truncates every block to the
    smallest block of the batch. In the paper this leaves a quarter of the patches in a context
    (table 6). Here the blocks of an image do not depend on other images. Tensors are padded to the
    largest possible block, or to ``max_context``.

    Args:
        grid: Rows and columns of patches.
        num_targets: Number M of target blocks.
        target_scale: Smallest and largest area of a target, as a fraction of the image.
        target_ratio: Smallest and largest height / width of a target, relative to the image's.
        context_scale: Like ``target_scale``, for the context before the targets are cut out.
        min_context: Minimum number of patches in a context; if fewer remain, the last targets may
            overlap it.
        max_context: Maximum fraction of patches in a context; random excess patches are dropped.

    Raises:
        UserError: If a block may be smaller than a patch.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        *,
        num_targets: int,
        target_scale: Range,
        target_ratio: Range,
        context_scale: Range,
        min_context: int,
        max_context: float,
    ) -> None:
        self.grid, self.num_targets, self.min_context = grid, num_targets, min_context
        self.target_scale, self.target_ratio = target_scale, target_ratio
        self.context_scale = context_scale
        self.num_patches = grid[0] * grid[1]  # N
        areas = possible_areas(target_scale, target_ratio, grid, "target_scale")
        contexts = possible_areas(context_scale, _SQUARE, grid, "context_scale")
        most_left = min(max(contexts), self.num_patches - min(areas))
        self.most_target = max(areas)  # Q
        self.most_context = max(1, min(most_left, int(max_context * self.num_patches)))  # K

    def draw(self, seed: int, key: Tensor) -> tuple[Indices, Indices]:
        """Draw the patches of the context and of the targets of each image.

        Args:
            seed: Seed of the run.
            key: int64 (B, 2), see ``random.keyed``.

        Returns:
            Indices and padding of the context, (B, K) each, and of the targets, (B, M, Q) each.
        """
        num_blocks = self.num_targets + 1
        draws = uniform(seed, key, _DRAWS * num_blocks + self.num_patches)
        of_block = draws[:, : _DRAWS * num_blocks].view(-1, num_blocks, _DRAWS)
        area, shape, down, right = of_block.unbind(dim=2)  # (B, M + 1) each, the context first
        area = _scaled(area, self.context_scale, self.target_scale)
        shape = _scaled(shape, _SQUARE, self.target_ratio)
        blocks = rectangles(area, shape, down, right, self.grid)  # (B, M + 1, N)
        block, targets = blocks[:, 0], blocks[:, 1:]
        context = cut_out(block, targets, least=self.min_context)
        return (
            padded_indices(context, self.most_context, draws[:, _DRAWS * num_blocks :]),
            padded_indices(targets, self.most_target),
        )


def _scaled(draws: Tensor, context: Range, targets: Range) -> Tensor:
    """Map draws (B, M + 1) from [0, 1): column 0 to the context's range, others to the targets'."""
    parts = zip(draws.split([1, draws.shape[1] - 1], dim=1), (context, targets), strict=True)
    return torch.cat([low + (high - low) * part for part, (low, high) in parts], dim=1)


def rectangles(
    area: Tensor, shape: Tensor, down: Tensor, right: Tensor, grid: tuple[int, int]
) -> Tensor:
    """Return rectangles of patches.

    Args:
        area: Area of each rectangle (...), as a fraction of the image.
        shape: Height / width (...), relative to the image's.
        down: Vertical position (...), from 0 at the top to 1 at the bottom.
        right: Horizontal position (...), from 0 at the left to 1 at the right.
        grid: Rows and columns of patches.

    Returns:
        (..., N) bool, True inside the rectangle.
    """
    rows = _stretch((area * shape).sqrt(), down, grid[0])  # (..., rows)
    columns = _stretch((area / shape).sqrt(), right, grid[1])  # (..., columns)
    return (rows[..., :, None] & columns[..., None, :]).flatten(-2)


def _stretch(share: Tensor, draw: Tensor, length: int) -> Tensor:
    """Return a mask of ``share * length`` consecutive positions at a drawn offset."""
    size = (share * length).round()
    rest = length - size
    first = (draw * (rest + 1)).floor().minimum(rest)[..., None]  # minimum: rounding
    positions = torch.arange(length, device=share.device)
    return (positions >= first) & (positions < first + size[..., None])


def possible_areas(scale: Range, ratio: Range, grid: tuple[int, int], name: str) -> list[int]:
    """Return the possible areas of ``rectangles``, in patches, which determine tensor sizes.

    A side of h patches is the rounded value of a length between h - 1/2 and h + 1/2.

    Args:
        scale: Smallest and largest area, as a fraction of the image.
        ratio: Smallest and largest height / width, relative to the image's.
        grid: Rows and columns of patches.
        name: Key of ``scale`` in the config, for the error.

    Raises:
        UserError: If a side may be rounded to zero.
    """
    rows, columns = grid
    shortest = min(grid) * (scale[0] * min(ratio[0], 1 / ratio[1])) ** 0.5
    if shortest <= 0.5:
        raise UserError(
            f"method: blocks of {scale[0]:.0%} of the image are smaller than a patch where there "
            f"are {rows}x{columns}; raise {name} or take a smaller backbone.patch_size"
        )
    heights = _possible_sides(rows, scale[0] * ratio[0], scale[1] * ratio[1])
    widths = _possible_sides(columns, scale[0] / ratio[1], scale[1] / ratio[0])
    return [
        height * width
        for height in heights
        for width in widths
        if (height - 0.5) * (width - 0.5) <= scale[1] * rows * columns
        and (height + 0.5) * (width + 0.5) >= scale[0] * rows * columns
        and (height - 0.5) / rows <= ratio[1] * (width + 0.5) / columns
        and (height + 0.5) / rows >= ratio[0] * (width - 0.5) / columns
    ]


def _possible_sides(length: int, least: float, most: float) -> range:
    return range(math.ceil(length * least**0.5 - 0.5), math.floor(length * most**0.5 + 0.5) + 1)


def cut_out(block: Tensor, targets: Tensor, *, least: int) -> Tensor:
    """Remove the patches of targets from a block.

    If fewer than ``least`` remain, the last target is not removed, then the last two are not, and
    so on. The published code tries other positions of the block first.

    Args:
        block: (B, N) bool.
        targets: (B, M, N) bool.
        least: Minimum number of patches that must remain.

    Returns:
        The context, (B, N) bool.
    """
    covered = F.pad(targets.int(), (0, 0, 1, 0)).cumsum(dim=1) > 0  # by the first 0, 1, ... M
    remaining = block[:, None] & ~covered  # (B, M + 1, N)
    enough = remaining.sum(dim=2) >= least  # (B, M + 1)
    number = (enough * torch.arange(enough.shape[1], device=block.device)).amax(dim=1)  # (B,)
    return remaining[torch.arange(len(remaining), device=block.device), number]


class AttentionMask:
    """Sampler of masks of the patches to which a class token attends most: AttMask.

    Kakogeorgiou et al., What to Hide from Your Students: Attention-Guided Masked Image Modeling,
    ECCV 2022, arXiv:2203.12719. Masks are drawn before the attention is known, for patches sorted
    by descending attention; ``in_image`` reorders them to the order of the image.

    Args:
        grid: Rows and columns of patches (h, w).
        hints: Whether some of the patches of the highest attention stay visible.
    """

    def __init__(self, grid: tuple[int, int], *, hints: bool) -> None:
        self.num_patches = grid[0] * grid[1]
        self.num_draws = self.num_patches // _HINTS if hints else 0

    def from_draws(self, draws: Tensor, counts: Tensor) -> Tensor:
        """Return masks (B, N) bool, True for the first ``counts`` patches except for hints.

        Args:
            draws: (B, ``num_draws``) in [0, 1).
            counts: int64 (B,), numbers of patches to mask, before some are revealed.
        """
        mask = torch.arange(self.num_patches) < counts[:, None]
        rank = draws.argsort(dim=1, stable=True).argsort(dim=1)
        mask[:, : self.num_draws] &= rank >= counts[:, None] // _HINTS
        return mask


def in_image(mask: Tensor, attention: Tensor) -> Tensor:
    """Reorder a mask of patches sorted by attention to the order of the image.

    Args:
        mask: (B, N) bool, of patches sorted by attention, the highest first.
        attention: (B, N), attention of the patches, in the order of the image.

    Returns:
        (B, N) bool.
    """
    order = attention.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(mask).scatter(1, order, mask)


def padded_indices(mask: Tensor, length: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the indices of True in each row of ``mask``, and their padding.

    The shape does not depend on the mask, so that the host does not wait for the device.

    Args:
        mask: (..., N) bool.
        length: Number of indices per row; the last ones of a longer row are dropped.
        order: (..., N) numbers in [0, 1) to sort the indices by; None for ascending indices.

    Returns:
        int64 indices (..., length), and (..., length) bool, True for padding.
    """
    late = (~mask).float() if order is None else (~mask) + order
    padding = torch.arange(length, device=mask.device) >= mask.sum(dim=-1, keepdim=True)
    return late.argsort(dim=-1, stable=True)[..., :length], padding


def random_mask(
    seed: int, key: Tensor, grid: tuple[int, int], *, ratio: float, unit: int = 1
) -> Tensor:
    """Draw masks of random squares: SimMIM, arXiv:2111.09886, section 3.2.

    Args:
        seed: Seed of the run.
        key: int64 (B, 2), see ``random.keyed``.
        grid: Rows and columns of patches; divisible by ``unit``.
        ratio: Fraction of squares to mask; their number is rounded up, as in the published code.
        unit: Side of a square in patches.

    Returns:
        (B, N) bool, True for masked patches; the same number in each image.
    """
    rows, columns = grid[0] // unit, grid[1] // unit
    draws = uniform(seed, key, rows * columns)
    mask = draws.argsort(dim=1, stable=True).argsort(dim=1) < math.ceil(rows * columns * ratio)
    squares = mask.view(-1, rows, columns)
    return squares.repeat_interleave(unit, dim=1).repeat_interleave(unit, dim=2).flatten(1)


def rolled_rectangle(draws: Tensor, count: int, grid: tuple[int, int]) -> Tensor:
    """Turn random draws into rectangles that are rolled over the edges of the image, as in CAPI.

    Height / width is drawn between 1/2 and 2, or as close to that as the image allows. Patches at
    the end of the last row that exceed ``count`` are dropped. The rectangle is shifted cyclically
    by rows and columns, so that each patch is inside equally often.

    Args:
        draws: (..., 3) in [0, 1): shape, shift of rows and of columns of each rectangle.
        count: Number of patches of a rectangle.
        grid: Rows and columns of patches.

    Returns:
        (..., N) bool, True inside the rectangle; ``count`` patches of each.
    """
    rows, columns = grid
    narrowest, widest = math.log(count / columns**2), math.log(rows**2 / count)
    low, high = (min(max(x, narrowest), widest) for x in (-math.log(2), math.log(2)))
    shape, down, right = draws[..., None].unbind(dim=-2)  # (..., 1) each
    aspect = torch.exp(low + (high - low) * shape)
    height = (count * aspect).sqrt().ceil().clamp(max=rows)
    width = (count / aspect).sqrt().ceil().clamp(max=columns)
    row = (torch.arange(rows, device=draws.device) - (down * rows).long()) % rows  # in rectangle
    column = (torch.arange(columns, device=draws.device) - (right * columns).long()) % columns
    number = row[..., :, None] * width[..., None] + column[..., None, :]
    inside = (row < height)[..., :, None] & (column < width)[..., None, :] & (number < count)
    return inside.flatten(-2)


def scattered_squares(draws: Tensor, side: int, grid: tuple[int, int]) -> Tensor:
    """Turn random draws into squares of patches that may overlap, as in data2vec 2.0.

    Args:
        draws: (..., S) in [0, 1): the center of each of S squares.
        side: Side of a square in patches; squares are cut at the edges of the image.
        grid: Rows and columns of patches.

    Returns:
        (..., N) bool, True inside any square.
    """
    rows, columns = grid
    center = (draws * (rows * columns)).long()[..., None]  # (..., S, 1)
    row = torch.arange(rows, device=draws.device) - center // columns + side // 2  # in the square
    column = torch.arange(columns, device=draws.device) - center % columns + side // 2
    in_row, in_column = ((x >= 0) & (x < side) for x in (row, column))
    return (in_row[..., :, None] & in_column[..., None, :]).any(dim=-3).flatten(-2)


def mask_of(indices: Tensor, padding: Tensor, num_patches: int) -> Tensor:
    """Return a mask that is True at the given indices, except for padding.

    Args:
        indices: int64 (B, K).
        padding: (B, K) bool, True for indices to ignore.
        num_patches: Number of patches, N.

    Returns:
        (B, N) bool.
    """
    mask = torch.zeros(len(indices), num_patches, dtype=torch.int32, device=indices.device)
    return mask.scatter_add_(1, indices, (~padding).int()) > 0


def is_hidden(keep: Tensor, num_patches: int) -> Tensor:
    """Return a bool mask (..., N) that is False at the indices ``keep``, int64 (..., K)."""
    hidden = torch.ones(*keep.shape[:-1], num_patches, dtype=torch.bool, device=keep.device)
    return hidden.scatter(-1, keep, False)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` (B, C, H, W) in the patches that ``mask`` (B, h, w) selects."""
    of_patch = split_patches(values, mask).mean(dim=(1, 3, 5))  # (B, h, w)
    return (of_patch * mask).sum() / mask.sum()


def split_patches(images: Tensor, mask: Tensor) -> Tensor:
    """Split images (B, C, H, W) into the patches of a mask (B, h, w): (B, C, h, p, w, p)."""
    rows, columns = mask.shape[1:]
    return images.unflatten(3, (columns, -1)).unflatten(2, (rows, -1))


def hide_patches(images: Tensor, mask: Tensor) -> Tensor:
    """Return images (B, C, H, W) whose masked patches, True in ``mask`` (B, N), are 0.

    Patches are square and ordered row by row.
    """
    height, width = images.shape[2:]
    rows = round(math.sqrt(mask.shape[1] * height / width))
    squares = mask.unflatten(1, (rows, -1))
    side = height // rows
    pixels = squares.repeat_interleave(side, dim=1).repeat_interleave(side, dim=2)
    return images.masked_fill(pixels[:, None], 0.0)
