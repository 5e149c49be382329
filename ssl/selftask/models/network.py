"""The trained network: a backbone, which is exported, and a head, which is discarded.

V views, B images, E features of the backbone (``embed_dim``), D outputs of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selftask.models.features.extract import pooled
from selftask.random.keyed import LAYER_DRAWS


class Network(nn.Module):
    """``head(backbone(views))``, in one pass for each image size or for each view.

    Methods that need patches or hidden layers use a subclass. Its forward pass takes
    ``batch.input``, may return tensors in any tuple or dict, and sets ``embedding``.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        head: Features -> outputs (B, D).
        per_view: Pass one view at a time, so that BatchNorm statistics are per view. By default
            views of one size share a pass of the backbone, and all views one of the head.
    """

    embedding: Tensor | None
    """Last pooled features of the backbone, (V*B, E), detached, for logging; not in the state."""

    def __init__(self, backbone: nn.Module, head: nn.Module, *, per_view: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.per_view = per_view
        self.embedding = None

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """V tensors (B, C, H, W) of any sizes -> (V, B, D) in the order of the views.

        Without ``per_view`` the head gets all views as one batch (V*B, E), so its BatchNorm
        statistics are over all views, as in the multi-crop of SwAV and DINO. Those of the backbone
        are over the views of one size.
        """
        if self.per_view:
            return self._one_by_one(views)
        features = forward_by_size(self.backbone, views)  # (V*B, E)
        self.embedding = features.detach()
        LAYER_DRAWS.enter(range(len(views)))
        output: Tensor = self.head(features)  # (V*B, D)
        return output.view(len(views), -1, *output.shape[1:])

    def _one_by_one(self, views: Sequence[Tensor]) -> Tensor:
        features, outputs = [], []
        for place, view in enumerate(views):
            LAYER_DRAWS.enter([place])
            features.append(pooled(self.backbone, view))  # (B, E)
            outputs.append(self.head(features[-1]))  # (B, D)
        self.embedding = torch.cat(features).detach()
        return torch.stack(outputs)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the last features from copies and pickles."""
        return {**self.__dict__, "embedding": None}


def forward_by_size(backbone: nn.Module, views: Sequence[Tensor]) -> Tensor:
    """Run ``backbone`` once for each size of views; return features (V*B, E) in view order.

    Views of one size need not be adjacent. For a transformer with a fixed grid of patches,
    positions are interpolated to views of other sizes. Raises ValueError if the views hold
    different numbers of images.
    """
    num_images = [len(view) for view in views]
    if len(set(num_images)) != 1:
        raise ValueError(f"every view must hold the same images, got batches of {num_images}")
    places: dict[torch.Size, list[int]] = {}
    for place, view in enumerate(views):
        places.setdefault(view.shape, []).append(place)

    features: dict[int, Tensor] = {}
    for same_size in places.values():
        images = [views[place] for place in same_size]
        together = images[0] if len(images) == 1 else torch.cat(images)  # (views * B, C, H, W)
        LAYER_DRAWS.enter(same_size)
        output = pooled(backbone, together)
        if len(places) == 1:
            return output  # already in view order: no copy
        features.update(zip(same_size, output.chunk(len(same_size)), strict=True))
    return torch.cat([features[place] for place in range(len(views))])
