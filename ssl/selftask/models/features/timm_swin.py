"""timm's Swin transformers, whose windows can be limited to groups of patches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.errors import UserError
from selftask.models.features.timm_models import TimmModel
from selftask.models.features.tokens import Features, Request


class TimmSwin(TimmModel):
    """Adapter of Swin and Swin V2.

    ``groups`` of ``extract`` are given per patch of the last stage, a square whose side is the
    backbone's total stride. In every window, tokens attend only to tokens of their own group. This
    does not work in training with activation checkpointing.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.offers |= {"groups"}

    @staticmethod
    def fits(backbone: Any) -> bool:
        if "timm" not in sys.modules:  # slow import; without it no object is timm's
            return False
        from timm.models import SwinTransformer, SwinTransformerV2

        return isinstance(backbone, SwinTransformer | SwinTransformerV2)

    def extract(self, images: Tensor, request: Request) -> Features:
        groups = request.groups
        if groups is None:
            return super().extract(images, request)
        rows, columns = (side // self.stride for side in images.shape[-2:])
        with self._attending_within(groups.unflatten(1, (rows, columns))):
            return super().extract(images, replace(request, groups=None))

    @contextmanager
    def _attending_within(self, groups: Tensor) -> Iterator[None]:
        """Context that limits each token to those of its group; ``groups`` (B, h, w).

        Raises UserError if blocks are recomputed in the backward pass, which is outside of it.
        """
        handles = []
        for stage, info in zip(self.model.layers, self.model.feature_info, strict=True):
            repeats = self.stride // info["reduction"]
            labels = groups.repeat_interleave(repeats, 1).repeat_interleave(repeats, 2)
            for block in stage.blocks:
                if torch.is_grad_enabled() and getattr(block, "_is_recomputed", False):
                    raise UserError(
                        "parallel.activation_checkpointing: groups of patches of a Swin are not "
                        "known in a recomputation; set it to none"
                    )
                limit = partial(_limit, block, labels)
                handles.append(block.attn.register_forward_pre_hook(limit, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _limit(
    block: Any, labels: Tensor, module: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Set the attention mask of each window to that of its groups, plus any of shifted windows."""
    mask, shifted = _same_group(block, labels), kwargs["mask"]
    if shifted is not None:  # (windows of an image, L, L)
        mask = mask + shifted.repeat(len(mask) // len(shifted), 1, 1)
    return args, {**kwargs, "mask": mask.to(args[0].dtype)}


def _same_group(block: Any, labels: Tensor) -> Tensor:
    """Return 0 for pairs of tokens of a window that are of one group, and -inf for others.

    Args:
        block: Swin's block of window attention.
        labels: Groups of the tokens, (B, h, w).

    Returns:
        (B * windows, L, L), in the order in which the block cuts its input into windows.
    """
    (height, width), (down, across) = block.window_size, block.shift_size
    rows, columns = labels.shape[1:]
    shifted = labels.roll((-down, -across), dims=(1, 2)).long()
    padded = F.pad(shifted, (0, -columns % width, 0, -rows % height), value=-1)
    windows = padded.unflatten(2, (-1, width)).unflatten(1, (-1, height))  # (B, m, h, n, w)
    flat = windows.transpose(2, 3).flatten(3).flatten(0, 2)  # (B * m * n, L)
    other = flat[:, :, None] != flat[:, None]
    return torch.zeros_like(other, dtype=torch.float32).masked_fill_(other, -torch.inf)
