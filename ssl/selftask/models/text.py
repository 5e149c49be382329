"""A transformer over token ids, like CLIP's text encoder, and models that embed texts and images.

B texts of L tokens, E features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn


class TextTransformer(nn.Module):
    """CLIP's text encoder: token ids, int64 (B, L) -> features (B, E) of each text's last token.

    Pre-norm blocks with causal attention, learned positions and initial weights as in section 2.4
    of Radford et al., arXiv:2103.00020, and its code, but with exact GELU instead of its
    approximation.

    Args:
        vocab_size: Number of token ids; 0 is padding, which only follows a text.
        length: Maximum number of tokens, L.
        dim: Number of features, E.
        depth: Number of blocks.
        heads: Number of attention heads; must divide ``dim``.
    """

    def __init__(self, vocab_size: int, length: int, *, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.pos_embed = nn.Parameter(torch.empty(length, dim))
        self.blocks = nn.ModuleList(_block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        causal = torch.full((length, length), -torch.inf).triu(1)
        self.register_buffer("causal", causal, persistent=False)
        self._init_weights(dim, depth)

    def _init_weights(self, dim: int, depth: int) -> None:
        nn.init.normal_(self.token_embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.01)
        for block in self.blocks:
            layer = cast(nn.TransformerEncoderLayer, block)
            nn.init.normal_(layer.self_attn.in_proj_weight, std=dim**-0.5)
            nn.init.normal_(layer.self_attn.out_proj.weight, std=(2 * depth * dim) ** -0.5)
            nn.init.normal_(layer.linear1.weight, std=(2 * dim) ** -0.5)
            nn.init.normal_(layer.linear2.weight, std=(2 * depth * dim) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features (B, E) of the last token before padding, for int64 tokens (B, L)."""
        length = tokens.shape[1]
        x = self.token_embed(tokens) + self.pos_embed[:length]  # (B, L, E)
        causal = cast(Tensor, self.causal)[:length, :length].to(x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=causal)
        last = (tokens != 0).sum(dim=1) - 1  # (B,)
        return self.norm(x[torch.arange(len(x), device=x.device), last])


def _block(dim: int, heads: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


class ImageTextModel(nn.Module):
    """Image and text encoders whose embeddings share a space.

    The forward pass maps images (B, C, H, W) to embeddings (B, D).

    Args:
        backbone: Images -> features (B, E).
        head: Features -> embeddings (B, D).
        text: Token ids (T, L) -> embeddings (T, D).
        tokenize: T texts -> token ids (T, L) on the CPU.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        text: nn.Module,
        tokenize: Callable[[Sequence[str]], Tensor],
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.text, self.tokenize = backbone, head, text, tokenize

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings (T, D) of texts, not normalized."""
        device = next(self.text.parameters()).device
        return self.text(self.tokenize(texts).to(device))
