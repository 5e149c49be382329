"""Top-k accuracy.

B: images of a batch, C: classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.classy import ClassyMeter
from selftask.distributed.collectives import gather_objects
from selftask.errors import UserError, nearest
from selftask.registry import register_meter


@register_meter("accuracy")
@dataclass(eq=False, repr=False, kw_only=True)
class Accuracy(ClassyMeter):  # type: ignore[misc]  # classy-vision ships no types
    """Top-k accuracy over the labeled images of all ranks, each counted once.

    Counts are summed, instead of averaging accuracies, so ranks and batches may have different
    numbers of images. ``value`` includes all ranks up to the last ``sync_state``, and this rank's
    images since then.
    """

    topk: list[int] = field(default_factory=lambda: [1, 5])
    """Numbers k: a prediction is correct if the label is among the k classes with the highest
    scores.
    """
    only_test_classes: bool = False
    """Whether only classes with images in ``data.val`` can be predicted, as for ImageNet-A and -R.
    It does not affect ``train_meters``.
    """

    head: str | None = None
    """Name of one of ``method.heads``; null: the first head."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not self.topk or min(self.topk) < 1 or len(set(self.topk)) < len(self.topk):
            yield f"topk: {self.topk}; different numbers from 1 on are expected, such as [1, 5]"
        if self.head is not None and self.head not in (heads := config["method"].get("heads", {})):
            names = nearest(self.head, heads) if heads else "there are none"
            yield f"head: {self.head!r} is not in method.heads; {names}"

    def __post_init__(self) -> None:
        super().__init__()
        self.classes: Tensor | None = None  # (n,) classes that can be predicted; None: all
        self.reset()

    @property
    def name(self) -> str:
        return "accuracy"

    def set_test_labels(self, labels: Any) -> None:
        """Restrict predictions to the classes of the test images, if ``only_test_classes`` is set.

        Args:
            labels: Labels of the test images, a NumPy array (N,) of integers; -1 if unknown.
        """
        if self.only_test_classes:
            self.classes = torch.from_numpy(np.unique(labels[labels >= 0])).long()

    @contextmanager
    def every_class(self) -> Iterator[None]:
        """Context in which all classes can be predicted, for training images."""
        classes, self.classes = self.classes, None
        try:
            yield
        finally:
            self.classes = classes

    def reset(self) -> None:
        """Reset all counts to zero."""
        self.synced = torch.zeros(len(self.topk) + 1, dtype=torch.int64)  # of all ranks
        self.local = torch.zeros_like(self.synced)  # this rank's since the sync: per k, images

    @torch.no_grad()
    def update(self, model_output: Tensor, target: Tensor, **kwargs: Any) -> None:
        """Count a batch without synchronizing with the device.

        Args:
            model_output: Scores (B, C).
            target: Labels (B,), integers; -1 for images without a label, which are not counted.
            kwargs: Ignored.

        Raises:
            UserError: If the shapes do not match, or there are fewer classes than the largest k.
        """
        self.validate(model_output.shape, target.shape)
        if self.classes is not None:
            self.classes = self.classes.to(model_output.device)
            among = model_output.index_select(1, self.classes)
            model_output = torch.full_like(model_output, -torch.inf)
            model_output.index_copy_(1, self.classes, among)
        best = model_output.topk(max(self.topk), dim=1).indices  # (B, max k)
        right = (best == target[:, None]).sum(dim=0).cumsum(dim=0)  # correct in the best 1, 2, ...
        counts = [*(right[k - 1] for k in self.topk), (target >= 0).sum()]
        self.local = self.local.to(target.device) + torch.stack(counts)

    def sync_state(self) -> None:
        """Add the counts of all ranks since the last call. Every rank must call this method."""
        for counts in gather_objects(self.local.cpu()):
            self.synced += counts
        self.local = torch.zeros_like(self.synced)

    @property
    def value(self) -> dict[str, float]:
        """Return fractions ``{"top_1": 0.7, ...}``, zeros before the first labeled image.

        Reading this property waits for the device.
        """
        *right, images = (self.synced + self.local.cpu()).tolist()
        return {f"top_{k}": n / max(images, 1) for k, n in zip(self.topk, right, strict=True)}

    def validate(self, model_output_shape: Any, target_shape: Any) -> None:
        """Raise UserError unless the shapes are (B, C) with C >= max k, and (B,)."""
        output, target = tuple(model_output_shape), tuple(target_shape)
        if len(output) != 2 or target != output[:1]:
            raise UserError(
                f"meters.accuracy: scores (B, C) and labels (B,) are expected, not {output} and "
                f"{target}; a method without class scores, such as SimCLR, has no accuracy"
            )
        if max(self.topk) > output[1]:
            raise UserError(f"meters.accuracy.topk={self.topk}: there are only {output[1]} classes")

    def get_classy_state(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "topk": list(self.topk),
            "synced": self.synced.clone(),
            "local": self.local.cpu(),
        }

    def set_classy_state(self, state: dict[str, Any]) -> None:
        """Restore the state of ``get_classy_state``; raise UserError if its metrics differ."""
        if (state["name"], list(state["topk"])) != (self.name, self.topk):
            raise UserError(
                f"meters.accuracy.topk={self.topk}: the checkpoint has counted {state['name']} of "
                f"topk={state['topk']}; meters cannot change within a run"
            )
        self.synced, self.local = state["synced"].clone(), state["local"].clone()
