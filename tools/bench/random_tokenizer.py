"""A tokenizer for ``method_step.py``, which both libraries use for BEiT."""

from __future__ import annotations

import torch
from method_parts import PATCH
from torch import Tensor, nn

from selftask.methods.mae import patchify


class RandomTokenizer(nn.Module):
    """Tokens of patches by a random projection: images (B, 3, H, W) -> (B, N)."""

    num_tokens, patch_size = 8192, PATCH

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(3 * PATCH**2, self.num_tokens))

    def forward(self, images: Tensor) -> Tensor:
        return (patchify(images, PATCH) @ self.weight).argmax(dim=-1)
