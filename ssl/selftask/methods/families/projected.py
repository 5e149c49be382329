"""Methods that spread or decorrelate features after a projector of three layers, like VICReg."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from selftask.methods.base import Method
from selftask.models.heads import mlp


class Projected(Method):
    """Method with a projector of three layers; the last has no BatchNorm or activation.

    The config has ``hidden_dim``, the width of both hidden layers, and ``out_dim``.
    """

    head_options: ClassVar[dict[str, Any]] = {}
    """Arguments of ``mlp``, such as ``{"bias": False}``."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projector."""
        hidden = self.config.hidden_dim
        return mlp(embed_dim, hidden, hidden, self.config.out_dim, **self.head_options)
