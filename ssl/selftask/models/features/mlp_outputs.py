"""Outputs of the MLPs of a transformer's blocks, before they are added to the residual stream.

B images, N patches, E width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import adapter_of, extract


class MLPOutputs(nn.Module):
    """Wrapper of a backbone that returns the outputs of its last MLPs at the patches.

    There is one output (B, N, E) for each MLP.

    Args:
        backbone: A transformer whose blocks have a module ``mlp``.
        number: Number of last blocks whose outputs are returned.

    Raises:
        UserError: If the blocks have no such module.
    """

    def __init__(self, backbone: nn.Module, number: int) -> None:
        super().__init__()
        self.backbone, self.number = backbone, number
        self._outputs = _Outputs()
        if len(self._mlps()) != adapter_of(backbone).num_layers:
            raise UserError(
                f"backbone: the blocks of a {type(backbone).__name__} have no module `mlp`, whose "
                "outputs are the targets; take a vision transformer of timm"
            )

    def record(self) -> None:
        """Register the forward hooks. Call it once; ``torch.compile`` cannot trace it."""
        for mlp in self._mlps()[-self.number :]:
            mlp.register_forward_hook(self._outputs.keep)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the outputs for images (B, C, H, W), in the order of the blocks.

        ``record`` must have been called before.
        """
        self._outputs.kept = []
        num_patches = extract(self.backbone, images).patches.shape[1]
        outputs, self._outputs.kept = self._outputs.kept, None
        return [output[:, -num_patches:] for output in outputs]

    def _mlps(self) -> list[nn.Module]:
        parts = self.backbone.named_modules()
        return [part for name, part in parts if name.rpartition(".")[2] == "mlp"]


class _Outputs:
    """Outputs of one pass; none are kept if the backbone is called without ``MLPOutputs``."""

    kept: list[Tensor] | None = None

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.kept is not None:
            self.kept.append(output)
