"""Pooled features of several hidden layers, for evaluations layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import adapter_of, extract
from selftask.models.features.tokens import Tokens

Pool: TypeAlias = Literal["mean", "prefix", "both"]


class PooledLayers(nn.Module):
    """Wrapper that returns the concatenated pooled outputs of several hidden layers.

    Args:
        backbone: Backbone with ``"hidden"`` in its ``offers``.
        layers: Numbers of the layers; negative ones count from the last.
        pool: ``"mean"``: mean over the patches, ``"prefix"``: the concatenated prefix tokens (class
            token and registers), ``"both"``: prefix tokens, then the mean.

    Attributes:
        numbers: Numbers of the layers, none negative.
        widths: Number of features of each layer; empty before the first forward pass.

    Raises:
        UserError: If the backbone has no such layer; in ``forward``, if it has no prefix tokens to
            pool.
    """

    def __init__(self, backbone: nn.Module, layers: Sequence[int], pool: Pool = "mean") -> None:
        super().__init__()
        self.backbone = backbone
        self.numbers = adapter_of(backbone).layer_numbers(layers, "eval.layers")
        self.pool = pool
        self.widths: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, sum of ``widths``) of images (B, C, H, W)."""
        hidden = extract(self.backbone, images, layers=self.numbers).hidden
        pooled = [self._pool(hidden[number]) for number in self.numbers]
        self.widths = [part.shape[1] for part in pooled]
        return torch.cat(pooled, dim=1)

    def _pool(self, tokens: Tokens) -> Tensor:
        if self.pool != "mean" and not tokens.prefix.shape[1]:
            raise UserError(
                f"eval.pool: {self.pool}; a {type(self.backbone).__name__} has no prefix tokens, "
                "only eval.pool=mean"
            )
        prefix, mean = tokens.prefix.flatten(1), tokens.patches.mean(dim=1)
        return {"mean": mean, "prefix": prefix, "both": torch.cat([prefix, mean], dim=1)}[self.pool]
