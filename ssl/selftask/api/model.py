"""A trained backbone with the transforms of its input images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selftask.config.schema import Component
from selftask.data.reading.image import as_pixels, read_image
from selftask.data.transforms.pipeline import build_pipeline
from selftask.models.weights.address import PRETRAINED
from selftask.models.weights.model_source import open_model
from selftask.random.views import draw_rng

_BATCH_SIZE = 256  # affects memory only


class Model(nn.Module):
    """Backbone in eval mode: transformed images (B, C, H, W) -> features (B, E).

    Args:
        backbone: The module.
        facts: Its metadata, as in ``backbone.json``: ``embed_dim``, ``channels`` (default: 3) and
            ``transforms`` (default: none).
    """

    def __init__(self, backbone: nn.Module, facts: dict[str, Any]) -> None:
        super().__init__()
        self.backbone = backbone
        self.facts = facts
        self.channels: int = facts.get("channels", 3)
        components = [Component.from_dict(part) for part in facts.get("transforms", [])]
        self._pipeline = build_pipeline(components, "transforms", self.channels)
        self.eval()

    @property
    def embed_dim(self) -> int:
        """Number of features, E."""
        return int(self.facts["embed_dim"])

    def transform(self, image: Any) -> Tensor:
        """Return the network's input, float32 (C, H, W) on the CPU, by the evaluation transforms.

        Args:
            image: A file, a Pillow image, or an array or CPU tensor (H, W, C), (C, H, W) or (H, W)
                of uint8, of floats in [0, 1], or of other numbers as in ``from_array``. Random
                transforms use the same draws for every image.

        Raises:
            BadImage: If a file is missing or cannot be read.
            ValueError: If an array or tensor is not an image, or has another number of channels.
        """
        if isinstance(image, str | Path):
            image = read_image(str(image))
        pixels = self._pipeline(as_pixels(image, self.channels), draw_rng(0, 0, 0, 0))
        return self._pipeline.to_float(torch.from_numpy(pixels)[None])[0]

    @torch.no_grad()
    def features(self, images: Tensor | Sequence[Any]) -> Tensor:
        """Return features (N, E) in float32, on the CPU.

        Args:
            images: A tensor (N, C, H, W) of transformed images, or a sequence of images for
                ``transform``, whose errors are raised here, too.
        """
        # Its device and data type, such as those of ``model.half()``; it may have no weights.
        like = next(self.parameters(), torch.empty(0))
        parts = [torch.empty(0, self.embed_dim)]
        for first in range(0, len(images), _BATCH_SIZE):
            part = images[first : first + _BATCH_SIZE]
            if not isinstance(part, Tensor):
                part = torch.stack([self.transform(image) for image in part])
            parts.append(self(part.to(like)).float().cpu())
        return torch.cat(parts)

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)


def load(
    model: str | Path,
    *,
    weights: str = PRETRAINED,
    image_size: int | None = None,
    trust: bool = False,
    prefix: str | None = None,
) -> Model:
    """Load a trained backbone, on the CPU and in eval mode.

    Args:
        model: A run folder (its export, or else its newest checkpoint), ``RUN@best``, ``RUN@STEP``,
            the folder of a sharded checkpoint, an exported ``backbone.pt`` next to its
            ``backbone.json``, ``timm:NAME`` or ``torchvision:NAME``.
        weights: For a library's model: ``pretrained``, ``none`` (random), or a file.
        image_size: Height and width in pixels to which model and transforms are adapted; None: as
            they are.
        trust: Allow an architecture in the user's own code, which is then imported.
        prefix: Prefix of the tensors to take from a file with several networks, such as
            ``state_dict.encoder_k.``.

    Raises:
        UserError: If the model is missing, or its weights do not match its architecture.
    """
    # Keep the random state of the caller, unless the weights are random.
    with torch.random.fork_rng(devices=(), enabled=weights != "none"):
        opened = open_model(
            str(model), weights=weights, trust=trust, image_size=image_size, prefix=prefix
        )
    return Model(*opened)
