"""A frozen transformer whose class token tells which patches matter.

B: images, P: prefix tokens, N = h * w: patches of the student, H: attention heads, D: width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.distillation.patch_targets import PatchTeacher, patches_on_grid
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Features, Grid
from selftask.models.precision import to_float32


class AttentionTeacher(PatchTeacher):
    """A frozen vision transformer that also gives the attention of its class token to the patches.

    Args:
        backbone: Vision transformer of timm or selftask with a class token.
        key: Key of the config that names it, for messages.

    Raises:
        UserError: If it has no class token, or its last block does not compute attention as timm's.
    """

    def __init__(self, backbone: nn.Module, key: str) -> None:
        super().__init__(backbone, key)
        adapter = adapter_of(backbone)
        attention: Any = getattr(adapter.layer(-1), "attn", None) if adapter.num_prefix else None
        if not hasattr(attention, "attn_drop"):
            raise UserError(
                f"{key}: a {type(backbone).__name__} has no class token whose attention can be "
                "read; take a vision transformer of timm, or a run of one"
            )
        attention.fused_attn = False  # the fused kernel does not return the weights
        attention.attn_drop.register_forward_hook(self._keep)
        self._weights: Tensor | None = None

    def on_grid(self, images: Tensor, grid: Grid | None) -> tuple[Tensor, ...]:
        """Return the class token, the patches, and the attention of the class token to them.

        Args:
            images: (B, C, height, width).
            grid: Rows and columns of patches of the student, to which maps are interpolated.

        Returns:
            (B, D), (B, N, D), and (B, N): weights of the last block, averaged over heads.
        """
        features: Features = self(images)
        assert self._weights is not None
        num_prefix = features.prefix.shape[1]
        weights = to_float32(self._weights)[:, :, 0, num_prefix:].mean(dim=1)  # of (B, H, P+N, P+N)
        self._weights = None
        as_patches = features.tokens._replace(patches=weights[..., None])
        attention = patches_on_grid(features._replace(tokens=as_patches), grid)
        class_token = to_float32(features.prefix[:, 0])
        return class_token, patches_on_grid(features, grid), attention[..., 0]

    def _keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self._weights = output
