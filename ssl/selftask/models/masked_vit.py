"""What masked methods (MAE, I-JEPA) need of timm's VisionTransformer, with its keys untouched.

B images, N patches of an image (row by row), K of them kept, Q asked for, E width, D width of the
predictor, T prefix tokens (class, registers).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selftask.errors import UserError

if TYPE_CHECKING:
    from timm.models import VisionTransformer


def as_vit(backbone: nn.Module, *, method: str) -> VisionTransformer:
    """``backbone`` itself if it is a transformer that can be masked; UserError otherwise."""
    from timm.models import VisionTransformer

    if not isinstance(backbone, VisionTransformer):
        raise UserError(
            f"backbone: {method} hides patches and so needs timm's VisionTransformer, not a "
            f"{type(backbone).__name__}; take backbone=vit_small, vit_tiny or timm:vit_..."
        )
    if backbone.dynamic_img_size:
        raise UserError(f"backbone.dynamic_img_size: {method} needs a fixed grid; set it to false")
    return backbone


def grid_size(vit: VisionTransformer) -> tuple[int, int]:
    """Rows and columns of patches."""
    rows, columns = vit.patch_embed.grid_size
    return rows, columns


def num_patches(vit: VisionTransformer) -> int:
    """N, prefix tokens not counted."""
    rows, columns = grid_size(vit)
    return rows * columns


def patch_tokens(vit: VisionTransformer, images: Tensor) -> Tensor:
    """Images (B, C, H, W) -> all patches with their positions added, (B, N, E), without prefix.

    Raises UserError for images of another size than the transformer was built for.
    """
    size, expected = tuple(images.shape[-2:]), tuple(vit.patch_embed.img_size)
    if size != expected:
        raise UserError(
            f"views: images of {size[0]}x{size[1]} pixels for a backbone built for "
            f"{expected[0]}x{expected[1]}; make backbone.img_size and the views' size the same"
        )
    tokens: Tensor = vit.patch_embed(images)  # (B, N, E)
    if vit.pos_embed is None:
        return tokens
    first = vit.pos_embed.shape[1] - tokens.shape[1]  # positions of prefix tokens come first
    positions: Tensor = vit.pos_embed[:, first:]  # (1, N, E)
    return tokens + positions


def encode(
    vit: VisionTransformer,
    tokens: Tensor,
    keep: Tensor | None = None,
    *,
    padding: Tensor | None = None,
) -> Tensor:
    """The transformer over the kept patches only: (B, T + K, E), normalised as vit does.

    ``tokens`` (B, N, E) are those of ``patch_tokens``; ``keep`` (B, K) are indices into N, None
    keeps all. Where ``padding`` (B, K) is true an index only fills the row: no token attends to
    it, so that the other outputs do not depend on it; its own output means nothing.

    With all patches kept in order this is ``vit.forward_features``.
    """
    if keep is not None:
        tokens = gather_tokens(tokens, keep)  # (B, K, E)
    prefix = _prefix_tokens(vit, len(tokens))  # (B, T, E)
    x = vit.pos_drop(torch.cat([prefix, tokens], dim=1))
    x = vit.norm_pre(x)
    if padding is None:
        x = vit.blocks(x)
    else:
        attend = _attention_mask(padding, prefix.shape[1])
        for block in vit.blocks:
            x = block(x, attn_mask=attend)
    output: Tensor = vit.norm(x)
    return output


class PatchPredictor(nn.Module):
    """A narrow transformer that tells from encoded patches what is at other patches.

    MAE's decoder and I-JEPA's predictor. Its input are the encoded patches and, for each patch
    asked for, the same learned mask token; all with fixed positions of its own, by which it knows
    where they are. Attention is full: also among the patches asked for together.
    """

    positions: Tensor  # (N, D)

    def __init__(
        self, vit: VisionTransformer, *, dim: int, depth: int, num_heads: int, num_out: int
    ) -> None:
        """``dim`` (D) must be divisible by 4 and by ``num_heads``; ``num_out`` numbers a patch."""
        from timm.models.vision_transformer import Block

        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.embed = nn.Linear(vit.embed_dim, dim)
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))
        self.register_buffer("positions", sincos_positions(dim, grid_size(vit)), persistent=False)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, qkv_bias=True, norm_layer=norm) for _ in range(depth)
        )
        self.norm = norm(dim)
        self.project = nn.Linear(dim, num_out)

    def forward(
        self,
        encoded: Tensor,
        keep: Tensor,
        asked: Tensor,
        *,
        padding: Tensor | None = None,
        asked_padding: Tensor | None = None,
    ) -> Tensor:
        """What is at the patches ``asked`` (B, M, Q), each of M groups on its own: (B, M, Q, out).

        ``encoded`` (B, T + K, E) are prefix tokens and the patches ``keep`` (B, K). Where
        ``padding`` (B, K) or ``asked_padding`` (B, M, Q) is true, nothing attends to that token.
        """
        num_groups, num_asked = asked.shape[1:]
        known = self.embed(encoded)  # (B, T + K, D)
        num_prefix = known.shape[1] - keep.shape[1]
        known = torch.cat([known[:, :num_prefix], known[:, num_prefix:] + self.positions[keep]], 1)
        known = known.repeat_interleave(num_groups, dim=0)  # (B * M, T + K, D)
        unknown = self.mask_token + self.positions[asked.flatten(0, 1)]  # (B * M, Q, D)
        x = torch.cat([known, unknown], dim=1)
        attend = None
        if padding is not None and asked_padding is not None:
            each = padding.repeat_interleave(num_groups, dim=0)  # (B * M, K)
            attend = _attention_mask(torch.cat([each, asked_padding.flatten(0, 1)], 1), num_prefix)
        for block in self.blocks:
            x = block(x, attn_mask=attend)
        output: Tensor = self.project(self.norm(x[:, -num_asked:]))  # (B * M, Q, out)
        return output.view(*asked.shape, -1)


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Rows of (B, N, E) chosen for each image by (B, K) indices: (B, K, E)."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))


def padded_indices(mask: Tensor, length: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The true places of each row of ``mask`` (..., N), as (..., length) with padding.

    Returns indices and where they only fill the row. Places come in the order of the numbers
    ``order`` (..., N), from [0, 1), or as they stand; a row with more than ``length`` loses the
    last. The shape does not depend on the mask, so that nothing waits for the device.
    """
    late = (~mask).float() if order is None else (~mask) + order
    padding = torch.arange(length, device=mask.device) >= mask.sum(dim=-1, keepdim=True)
    return late.argsort(dim=-1, stable=True)[..., :length], padding


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, N, patch * patch * C), row by row.

    Within a patch the channel runs fastest, as in MAE's published code.
    """
    b, c, height, width = images.shape
    if height % patch or width % patch:
        raise ValueError(f"images of {height} x {width} pixels have no whole patches of {patch}")
    x = images.reshape(b, c, height // patch, patch, width // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def sincos_positions(dim: int, grid: tuple[int, int]) -> Tensor:
    """Fixed positions of a grid of patches, (N, dim): MAE, appendix A.1.

    The first half codes the column, the second the row, each as sines then cosines of the
    frequencies 10000 ** (-4i / dim).
    """
    if dim % 4:
        raise ValueError(f"2-D sine-cosine positions need a width divisible by 4, got {dim}")
    rows, columns = grid
    frequency = 10_000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (x, y)]  # each (N, dim / 4)
    parts = [part for angle in angles for part in (angle.sin(), angle.cos())]
    return torch.cat(parts, dim=1).float()


@torch.no_grad()
def fix_sincos_positions(vit: VisionTransformer) -> None:
    """Give a transformer fixed sine-cosine positions, as MAE and I-JEPA do; prefix tokens get 0."""
    if vit.pos_embed is None:
        raise UserError("backbone: this transformer has no position embedding to fix")
    positions = sincos_positions(vit.pos_embed.shape[-1], grid_size(vit))  # (N, E)
    vit.pos_embed.zero_()
    vit.pos_embed[0, -len(positions) :] = positions
    vit.pos_embed.requires_grad_(False)


def _prefix_tokens(vit: VisionTransformer, num_images: int) -> Tensor:
    """Class and register tokens, with their positions where they have any: (B, T, E)."""
    tokens: list[Tensor] = [t for t in (vit.cls_token, vit.reg_token) if t is not None]
    width = vit.embed_dim
    if not tokens:
        return next(vit.parameters()).new_zeros(num_images, 0, width)
    prefix: Tensor = torch.cat(tokens, dim=1)  # (1, T, E)
    if vit.pos_embed is not None and not vit.no_embed_class:
        prefix = prefix + vit.pos_embed[:, : prefix.shape[1]]
    return prefix.expand(num_images, -1, -1)


def _attention_mask(padding: Tensor, num_prefix: int) -> Tensor:
    """Which keys may be attended to, the same for every query: bool (B, 1, T + K, T + K)."""
    keys = torch.cat([padding.new_ones(len(padding), num_prefix), ~padding], dim=1)  # (B, T + K)
    length = keys.shape[1]
    return keys[:, None, None, :].expand(-1, 1, length, length)
