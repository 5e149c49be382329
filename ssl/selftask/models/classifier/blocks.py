"""Blocks of a classifier's head, by name: ``method.head=[{name: mlp, hidden_dims: [512]}]``.

A block is a dataclass of options with a method ``build``. Blocks in a list are applied in order;
the last one has as many outputs as there are classes.

N images, E features in, D features out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.models.features.tokens import Features
from selftask.models.heads import mlp
from selftask.registry import register_head_block


class HeadBlock(ABC):
    """Base class of head blocks."""

    takes_tokens: ClassVar[bool] = False
    """True if the module takes ``Features`` with patch tokens instead of features (N, E). Such a
    block must be the first of its list.
    """

    @abstractmethod
    def build(self, width: int, num_classes: int) -> tuple[nn.Module, int]:
        """Return the module and its number of output features, D.

        The module maps features (N, E) to (N, D). That of a first block may take ``Features``
        instead (``takes_tokens``), or features of several views, (V, N, E).

        Args:
            width: Number of input features, E.
            num_classes: Number of classes.
        """


@register_head_block("linear")
@dataclass(frozen=True, kw_only=True)
class LinearBlock(HeadBlock):
    """One linear layer."""

    out_dim: int | None = setting(None, min=1)
    """Number of outputs; null: the number of classes."""

    def build(self, width: int, num_classes: int) -> tuple[nn.Module, int]:
        out_dim = self.out_dim or num_classes
        return nn.Linear(width, out_dim), out_dim


@register_head_block("bn_linear")
@dataclass(frozen=True, kw_only=True)
class BatchNormLinear(HeadBlock):
    """BatchNorm without scale and shift, then a linear layer: MAE's probe (arXiv:2111.06377).

    The initial weights have a standard deviation of 0.01, as in MAE's code.
    """

    out_dim: int | None = setting(None, min=1)
    """Number of outputs; null: the number of classes."""

    def build(self, width: int, num_classes: int) -> tuple[nn.Module, int]:
        out_dim = self.out_dim or num_classes
        linear = nn.Linear(width, out_dim)
        nn.init.trunc_normal_(linear.weight, std=0.01)
        return nn.Sequential(nn.BatchNorm1d(width, affine=False, eps=1e-6), linear), out_dim


@register_head_block("mlp")
@dataclass(frozen=True, kw_only=True)
class MLPBlock(HeadBlock):
    """Linear layers with ReLU between them."""

    hidden_dims: list[int] = setting([2048], min=1)
    """Widths of the hidden layers."""
    out_dim: int | None = setting(None, min=1)
    """Number of outputs; null: the number of classes."""
    norm: bool = False
    """Whether there is BatchNorm before each ReLU."""

    def build(self, width: int, num_classes: int) -> tuple[nn.Module, int]:
        out_dim = self.out_dim or num_classes
        return mlp(width, *self.hidden_dims, out_dim, norm=self.norm), out_dim


@register_head_block("residual_mlp")
@dataclass(frozen=True, kw_only=True)
class ResidualMLPBlock(HeadBlock):
    """Two linear layers with ReLU between them and a shortcut; keeps the number of features."""

    hidden_dim: int = setting(2048, min=1)
    """Width of the hidden layer."""
    norm: bool = True
    """Whether there is BatchNorm before the ReLU."""

    def build(self, width: int, num_classes: int) -> tuple[nn.Module, int]:
        return Residual(mlp(width, self.hidden_dim, width, norm=self.norm)), width


@register_head_block("pooled_tokens")
@dataclass(frozen=True, kw_only=True)
class PooledTokensBlock(HeadBlock):
    """Class token and mean of the patch tokens, 2E features: DINOv2's probe (arXiv:2304.07193).

    If the backbone has no class token, pooled features replace it.
    """

    takes_tokens: ClassVar[bool] = True

    def build(self, width: int, num_classes: int) -> tuple[nn.Module, int]:
        return PooledTokens(), 2 * width


@register_head_block("concat_views")
@dataclass(frozen=True, kw_only=True)
class ConcatViewsBlock(HeadBlock):
    """Concatenated features of several views of an image, such as pairs or tiles."""

    num_views: int = setting(2, min=2)
    """Number of views, V; must equal the number of views of the recipe."""

    def build(self, width: int, num_classes: int) -> tuple[nn.Module, int]:
        return ConcatViews(), self.num_views * width


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class ConcatViews(nn.Module):
    """Features (V, N, E) -> (N, V * E)."""

    def forward(self, features: Tensor) -> Tensor:
        return features.transpose(0, 1).flatten(1)


class PooledTokens(nn.Module):
    """Features with tokens -> class token and mean of the patch tokens, (N, 2 * E)."""

    def forward(self, features: Features) -> Tensor:
        tokens = features.tokens
        first = tokens.prefix[:, 0] if tokens.prefix.shape[1] else features.pooled
        return torch.cat([first, tokens.patches.mean(dim=1)], dim=1)
