"""Heads for a grid of learning rates and weight decays, trained simultaneously as stacked tensors.

B images, N patches, E features, C classes, G heads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.registry import OPTIMIZERS

_HEAD_WIDTH = 64  # features of an attention head
_STD = 0.01  # of the initial weights of the linear layer, as in MoCo, MAE and DINOv2


class LinearHead(nn.Module):
    """Linear classifier of features (B, E).

    Args:
        width: Number of features, E.
        num_classes: Number of classes, C.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, num_classes)
        nn.init.normal_(self.linear.weight, std=_STD)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, C) of features (B, E)."""
        return self.linear(features)


class AttentiveHead(LinearHead):
    """Linear classifier of patches pooled by cross-attention (AIM, arXiv:2401.08541, section 3).

    Learned queries attend to keys and values, which are linear projections of the patches; queries
    and result are not projected. The results of several queries are averaged. Each attention head
    has 64 features; if E is not a multiple of 64, there is a single head.

    Args:
        width: Number of features, E.
        num_classes: Number of classes, C.
        queries: Number of queries.
    """

    def __init__(self, width: int, num_classes: int, queries: int = 1) -> None:
        super().__init__(width, num_classes)
        self.query = nn.Parameter(0.02 * torch.randn(queries, width))
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.head_width = width if width % _HEAD_WIDTH else _HEAD_WIDTH

    def forward(self, patches: Tensor) -> Tensor:
        """Return logits (B, C) of patches (B, N, E)."""
        query, key, value = (
            x.unflatten(-1, (-1, self.head_width)).transpose(-2, -3)  # (..., heads, N, E / heads)
            for x in (self.query, self.key(patches), self.value(patches))
        )
        attention = (query @ key.mT * self.head_width**-0.5).softmax(dim=-1)
        pooled = (attention @ value).transpose(-2, -3).flatten(-2)  # (B, queries, E)
        return super().forward(pooled.mean(dim=-2))


def normalization(kind: Literal["none", "batch", "layer"], width: int) -> nn.Module:
    """Return a normalization of features (M, E) without learned parameters.

    Args:
        kind: ``none``; ``batch`` for BatchNorm; ``layer`` for LayerNorm.
        width: Number of features, E.
    """
    if kind == "batch":
        return nn.BatchNorm1d(width, affine=False, eps=1e-6)
    return nn.Identity() if kind == "none" else nn.LayerNorm(width, elementwise_affine=False)


class HeadGrid(nn.Module):
    """Heads on the same features, with equal initial weights and one optimizer setting each.

    The parameters of all heads are stacked into tensors (G, ...), so that one step of all heads
    takes one forward and one backward pass. No head depends on the others. Biases are not decayed,
    and LARS does not adapt them.

    Args:
        head: The initial head.
        norm: Normalization of the features, shared by the heads.
        settings: Learning rate and weight decay of each of the G heads.
        optimizer: Registered name of the optimizer.
        options: Fields of the optimizer's config.
    """

    def __init__(
        self,
        head: nn.Module,
        norm: nn.Module,
        settings: Sequence[tuple[float, float]],
        optimizer: str,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.norm = norm
        self.settings = settings
        self._head = [copy.deepcopy(head).to("meta")]  # a list, since it is not part of the state
        self.stacked = {
            name: torch.stack([value.detach()] * len(settings)).requires_grad_()
            for name, value in head.named_parameters()
        }
        # Views of the stacked tensors, so that torch's optimizers treat each head on its own.
        self._parts = {name: value.detach().unbind() for name, value in self.stacked.items()}
        groups = []
        for number, (rate, decay) in enumerate(settings):
            parts = [part[number] for part in self._parts.values()]
            for is_bias in (False, True):
                groups.append(
                    {
                        "params": [part for part in parts if (part.ndim == 1) == is_bias],
                        "lr": rate,
                        "weight_decay": 0.0 if is_bias else decay,
                        "adapt": not is_bias,
                    }
                )
        self._optimizer: torch.optim.Optimizer = OPTIMIZERS[optimizer](**options).build(groups)
        self._rates: list[float] = [group["lr"] for group in self._optimizer.param_groups]

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (G, B, C) of features (B, E) or (B, N, E)."""
        rows = self.norm(features.flatten(0, -2)).view_as(features)

        def logits(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self._head[0], parameters, (rows,))

        return torch.func.vmap(logits)(self.stacked)

    def fit(self, features: Tensor, targets: Tensor, factor: float) -> None:
        """Take one step on the mean cross-entropy of each head, in train mode.

        Args:
            features: (B, E) or (B, N, E).
            targets: Class numbers (B,) from 0, int64.
            factor: Factor of the learning rates.
        """
        with torch.enable_grad():
            logits = self.train()(features)
            repeated = targets.expand(len(logits), -1).flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), repeated, reduction="sum") / len(targets)
            gradients = torch.autograd.grad(loss, list(self.stacked.values()))
        for parts, gradient in zip(self._parts.values(), gradients, strict=True):
            # torch's fused steps read weights and gradients in the order of memory.
            for part, row in zip(parts, gradient.contiguous().unbind(), strict=True):
                part.grad = row
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._optimizer.step()

    @torch.no_grad()
    def hits(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return whether each head predicts the target of each image, (G, B) bool, in eval mode.

        Args:
            features: (B, E) or (B, N, E).
            targets: Class numbers (B,); -1 is never predicted.
        """
        return self.eval()(features).argmax(dim=2) == targets
