"""The trained network: a backbone, which is exported, and a head, which is discarded.

V views, B images, E features of the backbone (``embed_dim``), D outputs of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import extract, pooled
from selftask.models.features.tokens import Features
from selftask.random.keyed import LAYER_DRAWS


class PatchOutput(NamedTuple):
    """Output of a network for patches: predictions of the head, and features of the backbone.

    Loss terms of a subclass or a hook can use all fields. It is a tuple, so that DDP, FSDP and
    torch.compile find its tensors.
    """

    prediction: Any
    """Output of the head, or of several heads."""
    features: Any
    """``Features`` of the images: ``pooled``, ``prefix``, ``patches`` and ``hidden``. For views of
    several sizes, a list of them.
    """
    mask: Any = None
    """Masks of the images, as drawn by the method; None if there are none."""


class Network(nn.Module):
    """``head(backbone(views))``, in one pass for each image size or for each view.

    Methods that need patches or hidden layers use a subclass. Its forward pass takes
    ``batch.input``, runs the backbone with ``self.extract`` or ``self.pooled``, and may return
    tensors in any tuple or dict, such as ``PatchOutput``.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        head: Features -> outputs (B, D).
        per_view: Pass one view at a time, so that BatchNorm statistics are per view. By default
            views of the same size share a pass of the backbone, and all views share a pass of the
            head.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, *, per_view: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.per_view = per_view
        self._passes: list[Tensor] = []  # pooled features of each pass of the last call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``, after resetting ``embedding`` and the number of the next view.

        The number of a view selects the draws of dropout layers.
        """
        LAYER_DRAWS.restart()
        self._passes = []
        return super().__call__(*args, **kwargs)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Map V tensors (B, C, H, W) of any sizes to outputs (V, B, D), in the order of the views.

        Without ``per_view`` the head gets all views as one batch (V*B, E), so its BatchNorm
        statistics are over all views, as in the multi-crop of SwAV and DINO. The backbone's
        statistics are over the views of one size.
        """
        if self.per_view:
            return self._one_by_one(views)
        features = self.pooled(views)  # (V*B, E)
        LAYER_DRAWS.enter(range(len(views)))
        output: Tensor = self.head(features)  # (V*B, D)
        return output.view(len(views), -1, *output.shape[1:])

    def extract(self, views: Tensor | Sequence[Tensor], **options: Any) -> Features:
        """Return the features of the next views of this call, in one pass of the backbone.

        Args:
            views: Views of one size, (B, C, H, W) each, or their images (V * B, C, H, W), view
                after view.
            **options: Options of ``models.features.extract.extract``, such as ``mask``.
        """
        images = views if isinstance(views, Tensor) else torch.cat(list(views))
        features = extract(self.backbone, images, **options)
        self._passes.append(features.pooled.detach())
        return features

    def pooled(self, views: Sequence[Tensor]) -> Tensor:
        """Return the pooled features of views of any sizes, (V*B, E); see ``forward_by_size``.

        Raises UserError if their number E is not the backbone's ``embed_dim``.
        """
        features = forward_by_size(self.backbone, views)
        width = getattr(self.backbone, "embed_dim", features.shape[1])
        if features.shape[1] != width:
            raise UserError(
                f"the backbone returns {features.shape[1]} features, but its embed_dim is {width}"
            )
        self._passes.append(features.detach())
        return features

    @property
    def embedding(self) -> Tensor | None:
        """Pooled features of the last call, (V*B, E), detached, for logging; None before a call.

        They are not part of the state dict.
        """
        if len(self._passes) > 1:
            self._passes = [torch.cat(self._passes)]
        return self._passes[0] if self._passes else None

    @embedding.setter
    def embedding(self, features: Tensor | None) -> None:
        self._passes = [] if features is None else [features.detach()]

    def _one_by_one(self, views: Sequence[Tensor]) -> Tensor:
        outputs = []
        for number, view in enumerate(views):
            LAYER_DRAWS.enter([number])
            features = pooled(self.backbone, view)  # (B, E)
            self._passes.append(features.detach())
            outputs.append(self.head(features))  # (B, D)
        return torch.stack(outputs)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the last features from copies and pickles."""
        return {**super().__getstate__(), "_passes": []}


class MapNetwork(Network):
    """Network whose head takes the feature map (B, E, h, w) of images (B, C, H, W).

    It returns a ``PatchOutput`` whose prediction is that of the head.
    """

    def forward(self, images: Tensor) -> PatchOutput:  # type: ignore[override]
        features = self.extract(images)
        return PatchOutput(self.head(features.tokens.map), features)


def indices_by_size(views: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the views of each size; views of one size need not be adjacent."""
    groups: dict[torch.Size, list[int]] = {}
    for index, view in enumerate(views):
        groups.setdefault(view.shape, []).append(index)
    return [*groups.values()]


def forward_by_size(backbone: nn.Module, views: Sequence[Tensor]) -> Tensor:
    """Run ``backbone`` once for each size of views; return features (V*B, E) in view order.

    For a transformer with a fixed grid of patches, positions are interpolated to views of other
    sizes. Raises ValueError if the views hold different numbers of images.
    """
    num_images = [len(view) for view in views]
    if len(set(num_images)) != 1:
        raise ValueError(f"every view must hold the same images, got batches of {num_images}")
    groups = indices_by_size(views)
    features: dict[int, Tensor] = {}
    for same_size in groups:
        images = [views[index] for index in same_size]
        together = images[0] if len(images) == 1 else torch.cat(images)  # (views * B, C, H, W)
        LAYER_DRAWS.enter(same_size)
        output = pooled(backbone, together)
        if len(groups) == 1:
            return output  # already in view order: no copy
        features.update(zip(same_size, output.chunk(len(same_size)), strict=True))
    return torch.cat([features[index] for index in range(len(views))])
