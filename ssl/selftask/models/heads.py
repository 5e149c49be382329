"""What heads are made of. Each method builds its own head from these, in its own file.

N rows, E features in, D features out, K prototypes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.models.precision import to_float32


def mlp(
    *sizes: int,
    norm: bool = True,
    bias: bool = True,
    last_norm: bool = False,
    last_affine: bool = True,
    last_bias: bool = True,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Linear layers of the given sizes: a projector ``mlp(512, 2048, 128)`` or a predictor.

    Between two layers stand BatchNorm (``norm``) and the activation; after the last one stands
    BatchNorm if ``last_norm`` is set, scaled and shifted only if ``last_affine`` is too. ``bias``
    is that of the layers before the last, which a BatchNorm behind them makes idle (SimCLR keeps
    it, Barlow Twins and SimSiam do not); ``last_bias`` that of the last.

    ====================  =====================================================================
    SimCLR                ``mlp(E, E, 128, bias=False, last_bias=False, last_norm=True)``
    MoCo v2               ``mlp(E, E, 128, norm=False)``
    BYOL                  ``mlp(E, 4096, 256)``
    SimSiam               ``mlp(E, E, E, D, bias=False, last_norm=True, last_affine=False)``
    Barlow Twins          ``mlp(E, 8192, 8192, 8192, bias=False, last_bias=False)``
    ====================  =====================================================================
    """
    if len(sizes) < 2:
        raise ValueError(f"an mlp needs the sizes of its input and its output, got {sizes}")
    layers: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(sizes[:-1]):
        layers.append(nn.Linear(num_in, num_out, bias=bias))
        if norm:
            layers.append(nn.BatchNorm1d(num_out))
        layers.append(activation())
    layers.append(nn.Linear(sizes[-2], sizes[-1], bias=last_bias))
    if last_norm:
        layers.append(nn.BatchNorm1d(sizes[-1], affine=last_affine))
    return nn.Sequential(*layers)


class ProjectorPredictor(nn.Module):
    """A projector and, on top of it, a predictor; both outputs side by side.

    As a method's head: features (N, E) -> (N, 2, D), so that the network returns (V, B, 2, D) and
    ``projection, prediction = output.unbind(2)``. A predictor with BatchNorm belongs here and not
    into the loss, which would move its running statistics at every call.
    """

    def __init__(self, projector: nn.Module, predictor: nn.Module) -> None:
        super().__init__()
        self.projector = projector
        self.predictor = predictor

    def forward(self, features: Tensor) -> Tensor:
        projection = self.projector(features)  # (N, D)
        return torch.stack([projection, self.predictor(projection)], dim=1)


class Prototypes(nn.Module):
    """K trained directions; features (..., D), best of unit length, -> scores (..., K).

    The rows start on the unit sphere. They leave it as they are trained: a method whose scores are
    cosines, as SwAV's, calls ``normalize_`` after each step.
    """

    def __init__(self, dim: int, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(num, dim), dim=1))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight)

    @torch.no_grad()
    def normalize_(self) -> None:
        """Put every row back on the unit sphere, in place."""
        self.weight.copy_(F.normalize(self.weight, dim=1))


class WeightNormLinear(nn.Module):
    """A linear layer whose rows have length one whatever its parameter is.

    Weight normalisation (arXiv:1602.07868) with the length g fixed to 1, which is how DINO keeps
    its last layer. The length is taken out in the forward pass: a plain parameter and no hook, so
    that it can be copied, pickled and exported.
    """

    def __init__(self, dim: int, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, dim))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # nn.Linear's own: sets the effective lr

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, F.normalize(self.weight, dim=1))


class DINOHead(nn.Module):
    """mlp with GELU -> bottleneck on the unit sphere -> weight-normalised prototypes.

    DINO (arXiv:2104.14294), appendix C: (N, E) -> (N, K) scores in [-1, 1]. ``num_layers`` counts
    the layers of the mlp, the bottleneck's included; ``norm`` puts BatchNorm into the mlp, which
    the paper does for convolutional networks only.
    """

    def __init__(
        self,
        embed_dim: int,
        num_prototypes: int,
        *,
        hidden: int = 2048,
        bottleneck: int = 256,
        num_layers: int = 3,
        norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = [embed_dim, *[hidden] * (num_layers - 1), bottleneck]
        self.mlp = mlp(*sizes, norm=norm, activation=nn.GELU)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = WeightNormLinear(bottleneck, num_prototypes)

    def forward(self, features: Tensor) -> Tensor:
        bottleneck = F.normalize(to_float32(self.mlp(features)), dim=-1)  # (N, bottleneck)
        scores: Tensor = self.last_layer(bottleneck)  # (N, K)
        return scores
