"""Statistics of the activations of each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.hooks.base import Hook, Task
from selftask.hooks.watching.health import effective_rank
from selftask.registry import register_hook

SAMPLES = 65_536  # maximum number of values in a layer's histogram


@register_hook("activations")
@dataclass(eq=False, kw_only=True)
class Activations(Hook):
    """Logs mean, std, share of zeros and effective rank of the outputs of layers of the backbone.

    The columns are ``activations/LAYER/mean`` and so on, in ``metrics.jsonl`` and writers but not
    in the lines of the log. They are computed in logged steps only, from rank 0's images. Writers
    with histograms also get the distribution. The effective rank is computed from one vector per
    image, the output averaged over positions.
    """

    priority: ClassVar[int] = 55
    depth: int = setting(2, min=1)
    """Largest depth of the layers below the backbone; 2 includes the blocks of a ViT."""
    max_rows: int = setting(256, min=2)
    """Maximum number of images used for the effective rank."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if config["train"]["compile"]:
            yield "hooks.activations sees no layers in a compiled model; use train.compile=false"

    def __post_init__(self) -> None:
        self.handles: list[Any] = []  # of the forward hooks, during a logged step
        self.statistics: dict[str, dict[str, Tensor]] = {}
        self.samples: dict[str, Tensor] = {}  # for histograms
        self.takes_media = False

    def before_step(self, task: Task) -> None:
        if not task.should_log:
            return
        self.takes_media = task.takes_media
        self.handles = [
            layer.register_forward_hook(self._keeping(name))
            for name, layer in task.base_model.backbone.named_modules()
            if name and name.count(".") < self.depth
        ]

    def on_update(self, task: Task) -> None:
        for name, statistics in self.statistics.items():
            for statistic, value in statistics.items():
                task.log(f"activations/{name}/{statistic}", value)
        for name, values in self.samples.items():
            task.log_histogram(f"activations/{name}", values)

    def on_step(self, task: Task) -> None:
        """Remove the hooks on layers, also after a skipped step."""
        self.release()

    def release(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.statistics.clear()
        self.samples.clear()

    def _keeping(self, name: str) -> Any:
        def keep(layer: nn.Module, args: Any, output: Any) -> None:
            is_first = (
                isinstance(output, Tensor) and output.ndim > 1 and name not in self.statistics
            )
            if not is_first:  # a later forward pass of the same step
                return
            # computed now, since the next layer may work in place
            with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
                self.statistics[name] = describe_output(output, self.max_rows)
                if self.takes_media:
                    self.samples[name] = output.detach().flatten()[:SAMPLES].clone()

        return keep


def describe_output(output: Tensor, max_rows: int) -> dict[str, Tensor]:
    """Return mean, std, share of zeros and effective rank of a layer's output, as scalars.

    Args:
        output: Tokens (B, N, D), maps (B, C, H, W) or vectors (B, D).
        max_rows: Maximum number of images used for the effective rank, which is 1 for one image.
    """
    output = output.float()
    rows = output[:max_rows]
    if rows.ndim > 2:
        rows = rows.mean(dim=1) if rows.ndim == 3 else rows.flatten(2).mean(dim=2)
    return {
        "mean": output.mean(),
        "std": output.std(),
        "zeros": (output == 0).float().mean(),
        "rank": effective_rank(rows) if len(rows) > 1 else torch.ones(()),
    }
