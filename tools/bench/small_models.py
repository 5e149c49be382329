"""Models for ``step_overhead.py``, and batches that record times."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.methods.simclr import info_nce
from selftask.models.heads import mlp
from selftask.registry import register_backbone

WARM_UP = 20  # steps at the start of each turn that do not count


class Tiny(nn.Module):
    """3072 -> 16 features; so small that overhead dominates."""

    embed_dim = 16

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3072, 16)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.linear(images.flatten(1)))


class Conv(nn.Module):
    """Images of 32 pixels -> 32 features by two convolutions of stride 4."""

    embed_dim = 32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 32, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images)))).mean(dim=(2, 3))


@register_backbone("bench_tiny")
@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """The backbone of the MLP."""

    def build(self) -> nn.Module:
        return Tiny()


@register_backbone("bench_conv")
@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """The small convolutional backbone."""

    def build(self) -> nn.Module:
        return Conv()


@register_backbone("bench_vit")
@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The small transformer."""

    def build(self) -> nn.Module:
        return _vit_tiny()


@dataclass(frozen=True)
class Model:
    """One training, defined for the bare loop and for selftask."""

    about: str
    backbone: str  # selftask's name
    method: str  # supervised: one view; simclr: two
    batch_size: int
    steps: int  # per turn

    @property
    def num_views(self) -> int:
        return 2 if self.method == "simclr" else 1

    def build(self) -> nn.Module:
        """Return the network that selftask builds for that method, as a script would write it."""
        if self.method == "supervised":
            return nn.Sequential(Tiny(), nn.Linear(Tiny.embed_dim, 10))
        backbone = _BUILD[self.backbone]()
        dim = backbone.embed_dim
        return TwoViews(backbone, mlp(dim, dim, 128, last_norm=True, bias=False, last_bias=False))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss, with the same function for all trainers."""
        if self.method == "supervised":
            return F.cross_entropy(output, target)
        return info_nce(*output.chunk(2), temperature=0.1)

    def batches(self) -> list[dict[str, Any]]:
        """Return eight batches, which are used repeatedly."""
        draws = torch.Generator().manual_seed(0)
        size = (self.batch_size, 3, 32, 32)
        return [
            {
                "views": [torch.randn(size, generator=draws) for _ in range(self.num_views)],
                "target": torch.randint(0, 10, (self.batch_size,), generator=draws),
            }
            for _ in range(8)
        ]


MODELS = {
    "mlp": Model("MLP 3072-16-10, batch 32, cross-entropy", "bench_tiny", "supervised", 32, 800),
    "conv": Model("two convolutions, SimCLR, 2 x 64 of 32x32", "bench_conv", "simclr", 64, 120),
    "resnet18": Model("ResNet-18, SimCLR, 2 x 64 of 32x32", "resnet18", "simclr", 64, 7),
    "vit_tiny": Model("ViT-tiny/4, SimCLR, 2 x 32 of 32x32", "bench_vit", "simclr", 32, 7),
}


class TwoViews(nn.Module):
    """Network of both views in one pass, (2B, D)."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: list[Tensor]) -> Tensor:
        output: Tensor = self.head(self.backbone(torch.cat(views)))
        return output


def _resnet18() -> Any:
    import torchvision

    model = torchvision.models.resnet18()
    model.fc, model.embed_dim = nn.Identity(), 512
    return model


def _vit_tiny() -> Any:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=0)
    model.embed_dim = model.num_features
    return model


_BUILD = {"bench_conv": Conv, "resnet18": _resnet18, "bench_vit": _vit_tiny}


class Stamped:
    """``steps`` batches as pairs (input, target); records wall and CPU time at each request."""

    draws: dict[str, Any] = {}  # of views, for methods that ask for them

    def __init__(self, model: Model, steps: int) -> None:
        self.pool = [_pair(model, sample) for sample in model.batches()]
        self.steps = steps
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for step in range(self.steps):
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())
            yield self.pool[step % len(self.pool)]

    def step_times(self) -> tuple[np.ndarray, np.ndarray]:
        """Return wall and CPU seconds of the steps that count."""
        skip = min(WARM_UP, self.steps // 4)
        return np.diff(self.wall)[skip:], np.diff(self.cpu)[skip:]


def _pair(model: Model, sample: dict[str, Any]) -> tuple[Any, Tensor]:
    views = sample["views"]
    return (views[0] if model.num_views == 1 else views), sample["target"]
