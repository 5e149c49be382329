"""What a frozen backbone makes of a labelled data set, kept in memory for every evaluation.

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
    """One row for each image, in the order in which they were read."""

    features: Tensor  # (N, E) float32
    targets: Tensor  # (N,) int64; -1 where an image has no label
    indices: Tensor  # (N,) int64: which image of the data set

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device | str) -> Features:
        """The same on another device."""
        return Features(*(x.to(device) for x in (self.features, self.targets, self.indices)))

    def __getitem__(self, rows: Tensor) -> Features:
        """Some of the rows."""
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
    """Run the backbone over batches with ``views`` (the first is used), ``target`` and ``index``.

    The rows come back on the CPU. Nothing is left behind: each module's train or eval mode is
    restored, BatchNorm statistics are not touched, and neither are torch's random numbers, of
    which a DataLoader draws one as it starts. Raises UserError for features that are not finite,
    and for images of a size that a vision transformer does not take.
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
