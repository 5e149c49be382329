"""A frozen transformer, and the attention of its class token to the patches.

B: images, N = h * w: patches of the student, D: width.
"""

from __future__ import annotations

from torch import Tensor, nn

from selftask.models.distillation.patch_targets import PatchTeacher, patches_on_grid
from selftask.models.features.class_attention import ClassAttention
from selftask.models.features.tokens import Features, Grid
from selftask.models.precision import to_float32


class AttentionTeacher(PatchTeacher):
    """A frozen vision transformer that also gives the attention of its class token to the patches.

    Args:
        backbone: Vision transformer of timm or selftask with a class token.
        key: Key of the config that names it, for messages.

    Raises:
        UserError: If the attention of its class token cannot be read.
    """

    def __init__(self, backbone: nn.Module, key: str) -> None:
        super().__init__(backbone, key)
        self.class_attention = ClassAttention(backbone, key)

    def on_grid(self, images: Tensor, grid: Grid | None) -> tuple[Tensor, ...]:
        """Return the class token, the patches, and the attention of the class token to them.

        Args:
            images: (B, C, height, width).
            grid: Rows and columns of patches of the student, to which maps are interpolated. None
                only if the teacher's features have no grid.

        Returns:
            (B, D), (B, N, D), and (B, N): weights of the last block, averaged over heads.
        """
        features: Features = self(images)
        as_patches = features.tokens._replace(patches=self.class_attention.take()[..., None])
        attention = patches_on_grid(features._replace(tokens=as_patches), grid)
        class_token = to_float32(features.prefix[:, 0])
        return class_token, patches_on_grid(features, grid), attention[..., 0]
