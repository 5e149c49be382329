"""timm's VisionTransformer, which can also encode a subset of the patches.

With all patches and the constructor's image size, the operations are exactly those of timm's
forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.models.features.adapter import Adapter
from selftask.models.features.tokens import (
    Features,
    Grid,
    Request,
    Tokens,
    attention_mask,
    from_sequence,
    gather_tokens,
    mean_token,
    resample,
    with_prefix,
)

if TYPE_CHECKING:
    from timm.models import VisionTransformer


class TimmViT(Adapter):
    """Adapter of timm's VisionTransformer, with any prefix tokens, image size and pooling."""

    offers = frozenset({"dense", "hidden", "tokens", "subset", "attention", "groups"})
    interpolates = True
    library_class: ClassVar[str] = "VisionTransformer"

    def __init__(self, vit: VisionTransformer) -> None:
        self.vit = vit
        self.num_layers = len(vit.blocks)
        self.patch_size = tuple(vit.patch_embed.patch_size)
        self.stride = self.patch_size[0]
        self.built_grid = tuple(vit.patch_embed.grid_size)
        self.mask_dim = vit.embed_dim
        self.num_prefix = vit.num_prefix_tokens

    @classmethod
    def fits(cls, backbone: Any) -> bool:
        """Return True if a model is of timm's class, with that class's own forward pass."""
        if "timm" not in sys.modules:  # slow import; without it no object is timm's
            return False
        from timm import models
        from timm.layers import PatchEmbed

        kind, of_timm = type(backbone), getattr(models, cls.library_class)
        return (
            isinstance(backbone, of_timm)
            and kind.forward_features is of_timm.forward_features
            and kind._pos_embed is of_timm._pos_embed
            and isinstance(backbone.patch_embed, PatchEmbed)
        )

    @property
    def reads_class_token(self) -> bool:
        """Whether the last block may be computed for the class token only."""
        vit = self.vit
        is_token = vit.global_pool == "token" and vit.attn_pool is None
        return is_token and not vit.grad_checkpointing and _is_plain(vit.blocks[-1])

    def pooled(self, images: Tensor) -> Tensor:
        """Return pooled features (B, E); skip patches in the last block if they are not needed."""
        return self._extract(images, Request(), only_class_token=self.reads_class_token).pooled

    def extract(self, images: Tensor, request: Request) -> Features:
        return self._extract(images, request, only_class_token=False)

    def _extract(self, images: Tensor, request: Request, *, only_class_token: bool) -> Features:
        vit, num_prefix = self.vit, self.vit.num_prefix_tokens
        grid: Grid | None = self.grid(*images.shape[-2:])
        x = request.replace_masked(self.embed(images))  # (B, N, E)
        prefix, positions = self._positions(grid)  # (1, P, E), (1, N, E)
        if positions is not None:
            x = x + positions
        if request.keep is not None:
            x, grid = gather_tokens(x, request.keep), None  # (B, K, E)
        if num_prefix:
            x = torch.cat([prefix.expand(len(x), -1, -1), x], dim=1)  # (B, P + K, E)
        x = vit.pos_drop(x)
        if vit.patch_drop is not None:
            x = vit.patch_drop(x)
        x = vit.norm_pre(x)
        hidden = {}
        options = self._block_options(self.grid(*images.shape[-2:]), request)
        for number, (block, keywords) in enumerate(zip(vit.blocks, options, strict=True)):
            if only_class_token and number == self.num_layers - 1:
                x = _class_token_of(block, x)
            else:
                x = block(x, **keywords)
            if number in request.layers:
                hidden[number] = from_sequence(x, num_prefix, grid)
        x = vit.norm(x)
        pooled = vit.forward_head(x if request.padding is None else _fill(x, request.padding))
        return Features(pooled, from_sequence(x, num_prefix, grid), hidden)

    def _block_options(self, grid: Grid, request: Request) -> Iterator[dict[str, Any]]:
        """Yield the keyword arguments of each block, for images of ``grid``."""
        padding = request.padding
        keywords: dict[str, Any] = {}
        if padding is not None:
            keywords["attn_mask"] = attention_mask(padding, self.vit.num_prefix_tokens)
        elif (attend := request.attending()) is not None:
            keywords["attn_mask"] = with_prefix(attend, self.vit.num_prefix_tokens)
        return repeat(keywords, self.num_layers)

    def grid(self, height: int, width: int) -> Grid:
        embed = self.vit.patch_embed
        if embed.dynamic_img_pad:
            rows, columns = embed.dynamic_feat_size((height, width))
            return rows, columns
        return super().grid(height, width)

    def normalized(self, hidden: Tokens) -> Tokens:
        return hidden.map_sequence(self.vit.norm)

    def layer(self, number: int) -> nn.Module:
        return self.vit.blocks[number]

    @property
    def positions(self) -> Tensor | None:
        return self.vit.pos_embed

    def embed(self, images: Tensor) -> Tensor:
        """Return all patches (B, N, E), also for image sizes other than the constructor's."""
        embed = self.vit.patch_embed
        if embed.strict_img_size and tuple(images.shape[-2:]) != tuple(embed.img_size):
            return embed.norm(embed.proj(images).flatten(2).transpose(1, 2))
        x = embed(images)
        return x.flatten(1, 2) if x.ndim == 4 else x  # (B, h, w, E) with dynamic_img_size

    def _positions(self, grid: Grid | None) -> tuple[Tensor, Tensor | None]:
        """Return prefix tokens with positions (1, P, E), and patch positions (1, N, E) or None."""
        vit = self.vit
        tokens = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
        none = next(vit.parameters()).new_empty(1, 0, vit.embed_dim)
        prefix: Tensor = torch.cat(tokens, dim=1) if tokens else none  # (1, P, E)
        positions = vit.pos_embed
        if positions is None:
            return prefix, None
        built = self.built_grid
        num_prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
        if grid != built:
            positions = resample(positions, built, grid or (), num_prefix=num_prefix)
        if num_prefix:
            prefix = prefix + positions[:, :num_prefix]
        return prefix, positions[:, num_prefix:]


def _fill(x: Tensor, padding: Tensor) -> Tensor:
    """Replace padding by the mean of the other patches; mean and maximum do not change."""
    num_prefix = x.shape[1] - padding.shape[1]
    prefix, patches = x[:, :num_prefix], x[:, num_prefix:]
    mean = mean_token(patches, padding)[:, None]
    return torch.cat([prefix, torch.where(padding[..., None], mean, patches)], dim=1)


def _is_plain(block: Any) -> bool:
    """Return True if a block is timm's ``Block``: not sharded, recomputed, compiled or hooked."""
    from timm.layers import Attention
    from timm.models.vision_transformer import Block

    return (
        type(block) is Block
        and type(block.attn) is Attention
        and getattr(block.attn, "gate", None) is None
        and block._compiled_call_impl is None
        and not any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())
    )


def _class_token_of(block: Any, x: Tensor) -> Tensor:
    """Return ``block(x)[:, :1]`` for tokens (B, N, E) and a block that ``_is_plain``.

    The outputs of patches, about three quarters of the block's products, are not computed.
    """
    x = x[:, :1] + block.drop_path1(block.ls1(_attend(block.attn, block.norm1(x))))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def _attend(attention: Any, x: Tensor) -> Tensor:
    """Return ``attention(x)[:, :1]``, with the operations of timm's ``Attention``."""
    heads = attention.qkv(x).unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = heads.unbind(0)  # (B, H, N, F)
    query, key = attention.q_norm(query[:, :, :1]), attention.k_norm(key)
    if attention.fused_attn:
        rate = attention.attn_drop.p if attention.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
    else:
        weights = ((query * attention.scale) @ key.transpose(-2, -1)).softmax(dim=-1)
        x = attention.attn_drop(weights) @ value
    return attention.proj_drop(attention.proj(attention.norm(x.flatten(1)[:, None])))
