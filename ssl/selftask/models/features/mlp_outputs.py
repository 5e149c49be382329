"""Outputs of the MLPs of a transformer's blocks, before they are added to the residual stream.

B images, N patches, E width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import adapter_of, extract


class MLPOutputs(nn.Module):
    """Backbone that returns the outputs of its last MLPs at the patches, (B, N, E) each.

    Args:
        backbone: A transformer whose blocks have a module ``mlp``.
        number: Number of blocks, counted from the last.

    Raises:
        UserError: If the blocks have no such module.
    """

    def __init__(self, backbone: nn.Module, number: int) -> None:
        super().__init__()
        self.backbone, self.number = backbone, number
        if len(self._mlps()) != adapter_of(backbone).num_layers:
            raise UserError(
                f"backbone: the blocks of a {type(backbone).__name__} have no module `mlp`, whose "
                "outputs are the targets; take a vision transformer of timm"
            )

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the outputs for images (B, C, H, W), those of the last block last."""
        outputs: list[Tensor] = []
        keep = partial(_keep, outputs)
        handles = [mlp.register_forward_hook(keep) for mlp in self._mlps()[-self.number :]]
        try:
            num_patches = extract(self.backbone, images).patches.shape[1]
        finally:
            for handle in handles:
                handle.remove()
        return [output[:, -num_patches:] for output in outputs]

    def _mlps(self) -> list[nn.Module]:
        parts = self.backbone.named_modules()
        return [part for name, part in parts if name.rpartition(".")[2] == "mlp"]


def _keep(outputs: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    outputs.append(output)
