"""Building blocks of heads. Each method builds its own head from them in its own file.

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
    norm: bool | Callable[[int], nn.Module] = True,
    bias: bool = True,
    last_norm: bool = False,
    last_affine: bool = True,
    last_bias: bool = True,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Build an MLP with the given sizes, such as a projector ``mlp(512, 2048, 128)``.

    Args:
        sizes: Numbers of features, from input to output.
        norm: Add BatchNorm before each activation. If a function, it builds the norm for a given
            number of features.
        bias: Add a bias to all layers except the last. It has no effect before a BatchNorm.
        last_norm: Add BatchNorm after the last layer.
        last_affine: Give this BatchNorm a scale and a shift.
        last_bias: Add a bias to the last layer.
        activation: Function that builds the activation between layers.

    Raises:
        ValueError: If there are fewer than two sizes.

    Examples:
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
            layers.append(nn.BatchNorm1d(num_out) if norm is True else norm(num_out))
        layers.append(activation())
    layers.append(nn.Linear(sizes[-2], sizes[-1], bias=last_bias))
    if last_norm:
        layers.append(nn.BatchNorm1d(sizes[-1], affine=last_affine))
    return nn.Sequential(*layers)


def pixel_decoder(embed_dim: int, channels: int, stride: int) -> nn.Sequential:
    """Build a linear layer from a map (B, E, h, w) to pixels (B, C, stride * h, stride * w)."""
    return nn.Sequential(nn.Conv2d(embed_dim, channels * stride**2, 1), nn.PixelShuffle(stride))


def transposed_decoder(
    embed_dim: int, dim: int, num_out: int, *, stride: int, out_stride: int = 1
) -> nn.Sequential:
    """Build transposed convolutions from a map (B, E, h, w) to a larger one (B, D, h', w').

    Each transposed convolution doubles the resolution and is followed by BatchNorm and ReLU. The
    last layer is a 1 x 1 convolution.

    Args:
        embed_dim: Width E of the map.
        dim: Width of the convolutions.
        num_out: Width D of the result.
        stride: Pixels between positions of the map.
        out_stride: Pixels between positions of the result, at most.
    """
    layers: list[nn.Module] = []
    width = embed_dim
    while stride > out_stride:
        enlarge = nn.ConvTranspose2d(width, dim, 4, stride=2, padding=1, bias=False)
        layers += [enlarge, nn.BatchNorm2d(dim), nn.ReLU()]
        width, stride = dim, stride // 2
    return nn.Sequential(*layers, nn.Conv2d(width, num_out, 1))


class ProjectorPredictor(nn.Module):
    """A projector followed by a predictor; returns both outputs.

    As a method's head it maps features (N, E) -> (N, 2, D). The network then returns (V, B, 2, D),
    and ``projection, prediction = output.unbind(2)``. A predictor with BatchNorm must be part of
    the network: in the loss, its running statistics would be updated at every call.
    """

    def __init__(self, projector: nn.Module, predictor: nn.Module) -> None:
        super().__init__()
        self.projector = projector
        self.predictor = predictor

    def forward(self, features: Tensor) -> Tensor:
        projection = self.projector(features)  # (N, D)
        return torch.stack([projection, self.predictor(projection)], dim=1)


class Prototypes(nn.Module):
    """K learned directions: features (..., D), preferably of unit length, -> scores (..., K).

    Rows have unit length initially, but not after updates. A method whose scores are cosines, such
    as SwAV, calls ``normalize_`` after each step.

    Args:
        dim: Number of features, D.
        num: Number of prototypes, K.
    """

    def __init__(self, dim: int, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(num, dim), dim=1))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight.to(features.dtype))

    @torch.no_grad()
    def normalize_(self) -> None:
        """Normalize every row to unit length, in place."""
        self.weight.copy_(F.normalize(to_float32(self.weight), dim=1))


class UnitLength(nn.Module):
    """Layer that scales features (..., D) to unit length, in at least float32."""

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(to_float32(features), dim=-1)


class WeightNormLinear(nn.Module):
    """Linear layer without bias whose rows have unit length, or a trained length that starts at 1.

    It maps features (..., D) to scores (..., K).

    Weight normalization (arXiv:1602.07868) with the length g fixed to 1, as in DINO's last layer,
    or as the parameter ``length``, as in DINOv2's. Rows are normalized in the forward pass. The
    layer has plain parameters and no hook, so it can be copied, pickled and exported.

    Args:
        dim: Number of features, D.
        num: Number of rows, K.
        trained_length: Whether the lengths of the rows are trained.
    """

    def __init__(self, dim: int, num: int, *, trained_length: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, dim))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear; scale sets effective lr
        # two dimensions, so that it gets weight decay as weights do
        self.length = nn.Parameter(torch.ones(num, 1)) if trained_length else None

    def forward(self, features: Tensor) -> Tensor:
        rows = F.normalize(to_float32(self.weight), dim=1)
        if self.length is not None:
            rows = rows * self.length
        return F.linear(features, rows.to(features.dtype))


class DINOHead(nn.Module):
    """DINO's head: MLP with GELU, bottleneck of unit length, weight-normalized prototypes.

    Features (N, E) -> scores (N, K), which are cosines unless ``trained_length``. See appendix C of
    DINO (arXiv:2104.14294).

    Args:
        embed_dim: Number of features, E.
        num_prototypes: Number of prototypes, K.
        hidden: Width of the hidden layers of the mlp.
        bottleneck: Width of its last layer.
        num_layers: Number of layers of the mlp, including the bottleneck.
        norm: Add BatchNorm to the mlp, as the paper does for convolutional networks only.
        trained_length: As in ``WeightNormLinear``.
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
        trained_length: bool = False,
    ) -> None:
        super().__init__()
        sizes = [embed_dim, *[hidden] * (num_layers - 1), bottleneck]
        self.mlp = mlp(*sizes, norm=norm, activation=nn.GELU)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = WeightNormLinear(
            bottleneck, num_prototypes, trained_length=trained_length
        )

    def forward(self, features: Tensor) -> Tensor:
        bottleneck = F.normalize(to_float32(self.mlp(features)), dim=-1)  # (N, bottleneck)
        return self.last_layer(bottleneck)  # (N, K)
