"""Preservation: keep the features close to those of the backbone at the start."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean
from selftask.hooks.base import Hook, Task
from selftask.models.eval_mode import in_eval_mode
from selftask.models.features.extract import extract, offers, pooled
from selftask.models.precision import in_full_precision
from selftask.optim.schedules import build_schedule
from selftask.registry import register_hook


@register_hook("preserve")
@dataclass(eq=False, kw_only=True)
class Preserve(Hook):
    """Adds a term to the loss that keeps the features close to those at the start.

    The term is 1 - cosine between the features of the backbone and those of a copy that is made
    when the run begins, after ``init``. Features are those of the first view of each image, without
    masks. If the backbone has patch tokens or a feature map, the term is the average of that of
    pooled features and that of patches. While the weight is above 0, each step takes two more
    forward passes of the backbone, in evaluation mode: without dropout, and with BatchNorm's
    running statistics. Checkpoints contain the copy.

    BatchNorm's running statistics follow the new images, which also changes the features.

    ``start_cosine``, the mean cosine of the pooled features, is logged even while the weight is 0;
    the run is then the same as without the hook.
    """

    priority: ClassVar[int] = 30

    weight: float | dict[str, Any] = setting(1.0, of="schedules", min=0)
    """Weight of the term in the loss, a number or a schedule."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if config["train"]["step"]["name"] == "sam":
            yield "weight: train.step=sam computes a second loss, which would lack this term"
        if config["parallel"]["reduce"] == "fsdp":
            yield "weight: parallel.reduce=fsdp has no whole backbone outside of the network's pass"
        if config["parallel"]["activation_checkpointing"] != "none":
            yield (
                "weight: parallel.activation_checkpointing must be none, since blocks would be "
                "recomputed in train mode"
            )

    def on_start(self, task: Task) -> None:
        self.weight_at = build_schedule(self.weight, task.length)
        # Without the changes of an export: precise_bn has statistics of the new images.
        changes, task.before_export = task.before_export, []
        self.start = deepcopy(task.export_backbone()).requires_grad_(False).eval()
        task.before_export = changes
        if self.loaded:
            self.start.load_state_dict(self.loaded)
        self.has_patches = "dense" in offers(self.start)

    def on_forward(self, task: Task) -> None:
        weight = self.weight_at(task.where) if task.train else 0.0
        if not weight and not (task.train and task.should_log):
            return
        images, backbone = task.last_batch.all_views[0], task.base_model.backbone
        with torch.no_grad():
            start = self._features(self.start, images)
        with in_eval_mode(backbone), torch.set_grad_enabled(weight > 0):
            now = self._features(backbone, images)
        changes = [_change(*pair) for pair in zip(now, start, strict=True)]
        if weight:
            task.last_batch.added_terms["preserve"] = weight * torch.stack(changes).mean()
        if task.should_log:
            task.log("start_cosine", 1 - all_reduce_mean(changes[0].detach()))

    def _features(self, backbone: nn.Module, images: Tensor) -> list[Tensor]:
        """Return pooled features (B, E), and features (B, N, E) of N patches if there are any."""
        if not self.has_patches:
            return [pooled(backbone, images)]
        features = extract(backbone, images)
        return [features.pooled, features.patches]

    def state_dict(self) -> dict[str, Any]:
        return self.start.state_dict() if hasattr(self, "start") else {}


@in_full_precision
def _change(features: Tensor, start: Tensor) -> Tensor:
    """Return the mean of 1 - cosine of features (..., E), in a form exactly 0 if they are equal."""
    differences = F.normalize(features, dim=-1) - F.normalize(start, dim=-1)
    return differences.square().sum(dim=-1).mean() / 2
