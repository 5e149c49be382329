"""Features in a common form, and operations on tokens.

B images, P prefix tokens (class, registers), N patches in a grid of h x w, K of them kept, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.models.precision import in_full_precision, to_float32

Grid = tuple[int, int]
"""Rows and columns of patches."""


class Tokens(NamedTuple):
    """Output of one layer. A tuple, so that DDP, FSDP and torch.compile find its tensors."""

    patches: Tensor
    """(B, N, E), row by row; (B, K, E) if only some patches were encoded."""
    grid: Grid | None
    """(h, w), or None if only some patches were encoded."""
    prefix: Tensor
    """(B, P, E); P is 0 for backbones without a class token."""

    @property
    def map(self) -> Tensor:
        """The patches as a dense map (B, E, h, w); ValueError if only some were encoded."""
        if self.grid is None:
            raise ValueError("some of the patches only: they form no map")
        return self.patches.transpose(1, 2).unflatten(2, self.grid)

    @property
    def sequence(self) -> Tensor:
        """Prefix tokens, then patches: (B, P + N, E)."""
        return torch.cat([self.prefix, self.patches], dim=1)

    def map_sequence(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply a function to the sequence (B, P + N, E), such as a norm; return the new tokens."""
        return from_sequence(function(self.sequence), self.prefix.shape[1], self.grid)

    @property
    def class_token(self) -> Tensor:
        """The first prefix token (B, 1, E), or the mean of the patches if there is none."""
        if self.prefix.shape[1]:
            return self.prefix[:, :1]
        return self.patches.mean(dim=1, keepdim=True)


class Features(NamedTuple):
    """Result of ``extract``."""

    pooled: Tensor
    """(B, E), as returned by the backbone itself."""
    tokens: Tokens
    """Tokens of the last layer, after the backbone's final norm if it has one."""
    hidden: dict[int, Tokens]
    """Outputs of the requested layers by number, without the final norm."""

    @property
    def patches(self) -> Tensor:
        """Patch tokens of the last layer, (B, N, E), or (B, K, E) if only some were encoded."""
        return self.tokens.patches

    @property
    def prefix(self) -> Tensor:
        """Prefix tokens of the last layer, (B, P, E)."""
        return self.tokens.prefix


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of ``extract``, which describes them; None: not requested."""

    mask: Tensor | None = None
    mask_token: Tensor | None = None
    keep: Tensor | None = None
    padding: Tensor | None = None
    attend: Tensor | None = None
    groups: Tensor | None = None
    visible: Tensor | None = None
    layers: tuple[int, ...] = ()

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return {
            name: value for name, value in vars(self).items() if value is not None and value != ()
        }

    def attending(self) -> Tensor | None:
        """Return which patches may attend to which, bool (B, N, N), or None without a limit.

        With ``groups``, these are the pairs of patches of the same group.
        """
        groups = self.groups
        return self.attend if groups is None else groups[:, :, None] == groups[:, None]

    def replace_masked(self, x: Tensor, *, channels_last: bool = True) -> Tensor:
        """Replace masked patches by the mask token, if both mask and token are set.

        Args:
            x: Patch embeddings (B, N, E), (B, h, w, E), or (B, E, h, w) if not ``channels_last``.
            channels_last: Whether E is the last axis of ``x``.

        Returns:
            A tensor of the shape of ``x``.
        """
        if self.mask is None or self.mask_token is None:
            return x
        token = self.mask_token.to(x.dtype)
        if channels_last:
            return torch.where(self.mask.view(*x.shape[:-1], 1), token, x)
        return torch.where(self.mask.view(len(x), 1, *x.shape[2:]), token[:, None, None], x)


def from_map(x: Tensor) -> Tokens:
    """Return the tokens of a dense map (B, E, h, w)."""
    rows, columns = x.shape[2:]
    return Tokens(x.flatten(2).transpose(1, 2), (rows, columns), x.new_empty(len(x), 0, x.shape[1]))


def from_sequence(x: Tensor, num_prefix: int, grid: Grid | None) -> Tokens:
    """Split a sequence of tokens into prefix tokens and patches.

    Args:
        x: (B, P + N, E), prefix tokens first.
        num_prefix: Number of prefix tokens, P.
        grid: Rows and columns of patches; None if only some patches were encoded.
    """
    return Tokens(x[:, num_prefix:], grid, x[:, :num_prefix])


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Select the tokens of (B, N, E) at the indices, int64 (B, K), of each image: (B, K, E)."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))


def mean_token(tokens: Tensor, padding: Tensor) -> Tensor:
    """Return the mean (B, E) of the tokens (B, K, E) that are not padding, bool (B, K)."""
    inside = ~padding[..., None]
    return (tokens * inside).sum(dim=1) / inside.sum(dim=1)


def resample(
    positions: Tensor, built: Sequence[int], grid: Sequence[int], *, num_prefix: int = 0
) -> Tensor:
    """Interpolate learned positions from one grid of patches to another.

    The interpolation is bicubic with antialiasing, like ``timm.layers.resample_abs_pos_embed``.
    That function rounds float64 to float32, so results would depend on the number of ranks.
    Interpolation along an axis is a matrix product, whose backward pass is deterministic on CUDA,
    unlike torch's kernel.

    Args:
        positions: (1, P + N, E), prefix tokens first.
        built: Rows and columns of the N patches.
        grid: Rows and columns of M patches.
        num_prefix: Number P of prefix tokens, whose positions are unchanged.

    Returns:
        (1, P + M, E).
    """
    prefix, patches = positions[:, :num_prefix], positions[:, num_prefix:]
    as_map = to_float32(patches)[0].unflatten(0, tuple(built))  # (h, w, E)
    down, across = (
        _interpolation_matrix(as_map, *sizes) for sizes in zip(built, grid, strict=True)
    )
    resized = _multiply(as_map, down, across).flatten(0, 1)[None]  # (1, M, E)
    return torch.cat([prefix, resized.to(positions.dtype)], dim=1)


@in_full_precision
def _multiply(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Interpolate along both axes: (h, w, E), (h', h), (w', w) -> (h', w', E)."""
    rows = (down @ x.flatten(1)).unflatten(1, x.shape[1:])  # (h', w, E)
    return across @ rows


_MATRICES: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}


def _interpolation_matrix(like: Tensor, size: int, new_size: int) -> Tensor:
    """Return the weights (new_size, size) of torch's interpolation along one axis.

    They are cached, except those of a compiled graph, whose memory the next call may overwrite, and
    those of fake tensors and other subclasses, which are valid in their context only.
    """
    if torch.compiler.is_compiling() or type(like.detach()) is not Tensor:
        return _interpolated_units(like, size, new_size)
    key = size, new_size, like.dtype, like.device
    if key not in _MATRICES:
        with torch.inference_mode(mode=False):  # autograd cannot save tensors of inference mode
            _MATRICES[key] = _interpolated_units(like, size, new_size)
    return _MATRICES[key]


@torch.no_grad()
def _interpolated_units(like: Tensor, size: int, new_size: int) -> Tensor:
    """Return the interpolation matrix, whose columns are the interpolated unit vectors."""
    units = torch.eye(size, dtype=like.dtype, device=like.device)[None, None]
    columns = F.interpolate(units, size=(size, new_size), mode="bicubic", antialias=True)
    return columns[0, 0].mT.contiguous()  # (new_size, size)


def attention_mask(padding: Tensor, num_prefix: int) -> Tensor:
    """Return the attention mask that hides padding.

    Args:
        padding: (B, K) bool, True for padding.
        num_prefix: Number of prefix tokens, P.

    Returns:
        (B, 1, P + K, P + K) bool, True for keys that a query may attend to.
    """
    keys = torch.cat([padding.new_ones(len(padding), num_prefix), ~padding], dim=1)  # (B, P + K)
    length = keys.shape[1]
    return keys[:, None, None, :].expand(-1, 1, length, length)


def with_prefix(attend: Tensor, num_prefix: int) -> Tensor:
    """Extend an attention mask of patches to prefix tokens, which attend to all tokens.

    Args:
        attend: (B, N, N) bool, True for patches that a patch attends to.
        num_prefix: Number of prefix tokens, P, which no patch attends to.

    Returns:
        (B, 1, P + N, P + N) bool, True for keys that a query may attend to.
    """
    length = num_prefix + attend.shape[1]
    mask = attend.new_ones(len(attend), length, length)
    mask[:, num_prefix:, :num_prefix] = False
    mask[:, num_prefix:, num_prefix:] = attend
    return mask[:, None]
