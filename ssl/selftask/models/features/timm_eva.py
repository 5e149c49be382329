"""timm's Eva: transformers with rotary positions, such as EVA-02, DINOv3 and CAPI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from selftask.models.features.timm_vit import TimmViT
from selftask.models.features.tokens import Grid, Request


class TimmEva(TimmViT):
    """Adapter of timm's Eva, which has rotary position embeddings (RoPE).

    If only some patches are encoded, each keeps the embedding of its own position.
    """

    library_class = "Eva"

    @classmethod
    def fits(cls, backbone: Any) -> bool:
        return super().fits(backbone) and backbone.patch_drop is None

    def _block_options(self, grid: Grid, request: Request) -> Iterator[dict[str, Any]]:
        options = super()._block_options(grid, request)
        rope: Any = getattr(self.vit, "rope", None)
        if rope is None:
            yield from options
            return
        if hasattr(rope, "of_kept"):  # positions depend on which patches are kept
            each: Iterable[Tensor] = [
                rope.of_kept(grid, request.keep, request.padding)
            ] * self.num_layers
        else:
            embedding = self._embedding(rope, grid)
            each = embedding if self.vit.rope_mixed else [embedding] * self.num_layers
            if request.keep is not None:
                each = (_kept(of_block, request.keep) for of_block in each)
        for of_block, more in zip(each, options, strict=True):
            yield {"rope": of_block, **more}

    def _embedding(self, rope: Any, grid: Grid) -> Tensor:
        """Return sines and cosines of all patches, for any grid; (N, 2 * D) in most models."""
        is_cached = getattr(rope, "feat_shape", None) is not None
        if is_cached and grid != self.built_grid and hasattr(rope, "_build_embed_cat"):
            # get_embed ignores the grid if it has a cached one
            embedding: Tensor = rope._build_embed_cat(list(grid), rope.bands)
        else:
            embedding = rope.get_embed(None if is_cached and grid == self.built_grid else grid)
        return embedding


def _kept(embedding: Tensor, keep: Tensor) -> Tensor:
    """Select the rows of kept patches.

    Args:
        embedding: (N, F) for all images and heads, (H, N, F) by head, or (B, 1, N, F) by image.
        keep: (B, K).

    Returns:
        (B, 1 or H, K, F).
    """
    if embedding.ndim == 4:
        index = keep[:, None, :, None].expand(-1, 1, -1, embedding.shape[-1])
        return embedding.gather(2, index)
    if embedding.ndim == 3:
        return embedding[:, keep].transpose(0, 1)
    return embedding[keep][:, None]
