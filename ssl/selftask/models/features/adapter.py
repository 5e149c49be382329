"""The base class of adapters: one for each family of backbones."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from selftask.errors import UserError
from selftask.models.features.tokens import Features, Grid, Request


class Adapter(ABC):
    """Gets features out of one kind of backbone; ``extract.adapter_of`` chooses it.

    Attributes:
        offers: What can be asked for, of

            * ``"dense"``: patches in a grid;
            * ``"hidden"``: hidden layers by number;
            * ``"tokens"``: patches that can be replaced by a mask token;
            * ``"subset"``: patches of which some can be encoded without the others.
        num_layers: Number of hidden layers.
        patch_size: Height and width in pixels of a patch that can be masked.
        stride: Pixels from one patch of the last map to the next; the patch size of a ViT, 32 for
            a Swin. Given with ``"tokens"``.
        built_grid: Rows and columns of patches in images of the size it was built for; (0, 0) if
            it was built for no size in particular.
        mask_dim: Width of a mask token, that of the patch embedding.
    """

    offers: frozenset[str] = frozenset()
    num_layers: int = 0
    patch_size: tuple[int, int] = (0, 0)
    stride: int = 0
    built_grid: Grid = (0, 0)
    mask_dim: int = 0

    @abstractmethod
    def extract(self, images: Tensor, request: Request) -> Features:
        """Features of images (B, C, H, W); ``request`` has only what ``offers`` allows."""

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of the patches that can be masked, for images of that many pixels.

        Raises UserError if the images cannot be divided into patches.
        """
        rows, columns = self.patch_size
        if height % rows or width % columns:
            raise UserError(
                f"views: images of {height}x{width} pixels cannot be divided into patches of "
                f"{rows}x{columns} pixels"
            )
        return height // rows, width // columns

    @property
    def positions(self) -> Tensor | None:
        """Learned position embedding (1, P + N, E) or (1, N, E), prefix tokens first, or None."""
        return None
