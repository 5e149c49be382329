"""Features of a labelled data set by a frozen backbone, kept in memory for all evaluations.

N images, E features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.build import check_images
from selftask.models.eval_mode import in_eval_mode


@dataclass(frozen=True)
class Features:
    """Features and labels of images, one row for each, in the order in which they were read."""

    features: Tensor  # (N, E) float32
    targets: Tensor  # (N,) int64; -1 for images without a label
    indices: Tensor  # (N,) int64: number of the image in the data set

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device | str) -> Features:
        """Return a copy on another device."""
        return Features(*(x.to(device) for x in (self.features, self.targets, self.indices)))

    def __getitem__(self, rows: Tensor) -> Features:
        """Return a subset of the rows."""
        return Features(self.features[rows], self.targets[rows], self.indices[rows])

    def check_labels(self, what: str) -> None:
        """Raise UserError unless there are images and every one has a label."""
        check_targets(self.targets, what)


def check_targets(targets: Tensor, what: str) -> None:
    """Raise UserError unless there are targets and none is -1."""
    if not len(targets):
        raise UserError(f"{what}: there are no images to evaluate on")
    unlabelled = int((targets < 0).sum())
    if unlabelled:
        raise UserError(
            f"{what}: {unlabelled} of {len(targets)} images have no label; evaluations need a "
            f"labelled set, such as a folder with one sub-folder for each class"
        )


def extract_features(
    backbone: nn.Module, batches: Iterable[Mapping[str, Any]], *, device: torch.device | str
) -> Features:
    """Run the backbone over batches and collect its features on the CPU.

    Train or eval mode, BatchNorm statistics and torch's random state are left unchanged. (A
    DataLoader draws one random number when it starts.)

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        batches: Dicts with ``views`` (the first is used), ``target`` and ``index``.
        device: Device of the backbone.

    Raises:
        UserError: If features are not finite, or a vision transformer does not accept the size of
            the images.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad(), in_eval_mode(backbone), _keeping_random_state(device):
        for batch in batches:
            images = batch["views"][0].to(device, non_blocking=True)  # (B, C, H, W)
            if not parts:
                check_images(backbone, images)
            features = backbone(images).float().cpu()  # (B, E)
            parts.append((features, batch["target"].cpu(), batch["index"].cpu()))
    if not parts:
        raise UserError("there are no images to take features of")
    features, targets, indices = (torch.cat(column) for column in zip(*parts, strict=True))
    broken = int((~features.isfinite()).any(dim=1).sum())
    if broken:
        raise UserError(
            f"the features of {broken} of {len(features)} images are not finite: "
            f"the weights are damaged or training has diverged"
        )
    return Features(features, targets, indices)


@contextmanager
def _keeping_random_state(device: torch.device | str) -> Iterator[None]:
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        yield
