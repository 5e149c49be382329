"""The base class of adapters: one for each family of backbones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.tokens import Features, Grid, Request, Tokens


class Adapter(ABC):
    """Feature extraction for one family of backbones; selected by ``extract.adapter_of``.

    Attributes:
        offers: Supported requests, a subset of

            * ``"dense"``: patches in a grid;
            * ``"hidden"``: hidden layers by number;
            * ``"tokens"``: patches that can be replaced by a mask token;
            * ``"subset"``: patches, some of which can be encoded without the others;
            * ``"attention"``: patches whose attention can be limited to some of the others;
            * ``"groups"``: patches whose attention can be limited to their own group;
            * ``"sparse"``: convolutions that ignore hidden patches, see ``features.sparse``.
        num_layers: Number of hidden layers.
        patch_size: Height and width in pixels of a patch that can be masked or hidden: the total
            stride of a ResNet or ConvNeXt. Set with ``"tokens"`` and ``"sparse"``.
        stride: Pixels between patches of the last map: the patch size of a ViT, 32 for a Swin. Set
            with ``"tokens"`` and ``"sparse"``.
        built_grid: Rows and columns of patches for the image size of the constructor; (0, 0) if it
            has none.
        mask_dim: Width of a mask token, equal to that of the patch embedding.
        interpolates: Whether ``extract`` interpolates positions for image sizes that the backbone's
            own forward pass rejects.
        num_prefix: Number of prefix tokens in the output of ``layer``, if this is a sequence.
        channels_last: Whether the output of ``layer``, if this is a map, is (B, h, w, E).
    """

    offers: frozenset[str] = frozenset()
    num_layers: int = 0
    patch_size: tuple[int, int] = (0, 0)
    stride: int = 0
    built_grid: Grid = (0, 0)
    mask_dim: int = 0
    interpolates: bool = False
    num_prefix: int = 0
    channels_last: bool = False

    @abstractmethod
    def extract(self, images: Tensor, request: Request) -> Features:
        """Return the features of images (B, C, H, W) for a ``request`` within ``offers``."""

    def layer_numbers(self, layers: Sequence[int], key: str) -> list[int]:
        """Return layer numbers counted from 0; negative ones in ``layers`` count from the last.

        Args:
            layers: Numbers of layers.
            key: Key of the config, for the message.

        Raises:
            UserError: If there is no such layer.
        """
        count = self.num_layers
        for layer in layers:
            if not -count <= layer < count:
                raise UserError(f"{key}: {layer}; the backbone has layers 0 to {count - 1}")
        return [layer % count for layer in layers]

    def pooled(self, images: Tensor) -> Tensor:
        """Return pooled features (B, E) of images (B, C, H, W)."""
        return self.extract(images, Request()).pooled

    def normalized(self, hidden: Tokens) -> Tokens:
        """Return a hidden layer of a transformer after the backbone's final norm.

        Other backbones have no norm for their hidden layers, which are returned unchanged.
        """
        return hidden

    def grid(self, height: int, width: int) -> Grid:
        """Return rows and columns of the patches that can be masked, for an image size in pixels.

        Raises UserError if the images cannot be divided into patches.
        """
        rows, columns = self.patch_size
        if height % rows or width % columns:
            side = math.lcm(rows, columns)
            raise UserError(
                f"views: images of {height}x{width} pixels cannot be divided into patches of "
                f"{rows}x{columns} pixels; image_size must be a multiple, such as "
                f"{side * math.ceil(max(height, width) / side)}"
            )
        return height // rows, width // columns

    def embed(self, images: Tensor) -> Tensor:
        """Return the patch embedding (B, N, E) of images (B, C, H, W), before positions are added.

        Raises:
            UserError: If the backbone is not a vision transformer of timm or selftask.
        """
        raise UserError(
            "backbone: the patch embedding of this network is not known; take a vision transformer "
            "of timm or selftask"
        )

    @abstractmethod
    def layer(self, number: int) -> nn.Module:
        """Return the module whose output is hidden layer ``number``."""

    def mean_patch(self, output: Tensor) -> Tensor:
        """Return the mean over the patches, (B, E) float32, of the output of ``layer``."""
        if output.ndim == 3:
            return output[:, self.num_prefix :].mean(dim=1, dtype=torch.float32)
        return output.mean(dim=(1, 2) if self.channels_last else (2, 3), dtype=torch.float32)

    @property
    def positions(self) -> Tensor | None:
        """Learned position embedding (1, P + N, E) or (1, N, E), prefix tokens first, or None."""
        return None
