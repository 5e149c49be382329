"""Pooled outputs of hidden layers, recorded during a training step.

V views, B images, E features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selftask.models.features.adapter import Adapter
from selftask.models.features.extract import adapter_of


class LayerOutputs:
    """Recorder of the outputs of hidden layers, averaged over patches.

    The backbone's first forward pass after ``start`` or ``take`` is recorded. Outputs are read by
    forward hooks and detached, so that the pass itself does not change.

    Args:
        backbone: The backbone.
        layers: Numbers of the layers; negative ones count from the last.

    Raises:
        UserError: If the backbone has no such layer.
    """

    def __init__(self, backbone: nn.Module, layers: Sequence[int]) -> None:
        self.backbone = backbone
        self.numbers: list[int] = []
        self._handles: list[Any] = []
        self._outputs: dict[int, Tensor] = {}
        if layers:
            self.numbers = sorted({*adapter_of(backbone).layer_numbers(layers, "layers")})

    def start(self) -> None:
        """Register the forward hooks."""
        if self.numbers:
            adapter = adapter_of(self.backbone)
            self._handles = [
                adapter.layer(number).register_forward_hook(partial(self._keep, adapter, number))
                for number in self.numbers
            ]

    def stop(self) -> None:
        """Remove the forward hooks and discard the outputs."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()

    def take(self) -> dict[int, Tensor]:
        """Return the outputs by layer number, and discard them; empty if no pass was recorded.

        Each is float32 (V * B, E), for the V views of the recorded pass.
        """
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _keep(
        self, adapter: Adapter, number: int, layer: nn.Module, args: Any, output: Tensor
    ) -> None:
        if number in self._outputs:  # a later pass
            return
        # computed now, since the next layer may work in place
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            self._outputs[number] = adapter.mean_patch(output.detach())
