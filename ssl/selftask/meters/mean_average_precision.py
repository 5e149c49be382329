"""Mean average precision.

B: images of a batch, C: classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.classy import ClassyMeter
from selftask.distributed.collectives import gather_objects
from selftask.errors import UserError
from selftask.registry import register_meter


@register_meter("mean_average_precision")
@dataclass(eq=False, repr=False, kw_only=True)
class MeanAveragePrecision(ClassyMeter):  # type: ignore[misc]  # classy-vision ships no types
    """Mean over classes of the average precision, over the images of all ranks.

    Images may have one label or several. Classes without a positive image are ignored. All scores
    are kept until ``reset``. ``value`` includes all ranks up to the last ``sync_state``, and this
    rank's images since then.
    """

    def __post_init__(self) -> None:
        super().__init__()
        self.reset()

    @property
    def name(self) -> str:
        return "mean_average_precision"

    def reset(self) -> None:
        """Discard all images."""
        self.synced: list[tuple[Tensor, Tensor]] = []  # of all ranks
        self.local: list[tuple[Tensor, Tensor]] = []  # since the sync: scores, labels

    @torch.no_grad()
    def update(self, model_output: Tensor, target: Tensor, **kwargs: Any) -> None:
        """Store scores and labels of a batch.

        Args:
            model_output: Scores (B, C).
            target: Labels (B, C): 1, 0, or -1 to ignore the score; or one class per image (B,),
                -1 to ignore the image.
            kwargs: Ignored.

        Raises:
            UserError: If the shapes do not match.
        """
        self.validate(model_output.shape, target.shape)
        if target.ndim == 1:
            is_known = target[:, None] >= 0
            one_hot = F.one_hot(target.clamp(min=0), model_output.shape[1])
            target = torch.where(is_known, one_hot, -1)
        scores = model_output.detach().to(torch.float32, copy=True)  # a CUDA graph overwrites them
        self.local.append((scores, target.to(torch.int8)))

    def sync_state(self) -> None:
        """Add the images of all ranks since the last call. Every rank must call this method."""
        of_rank = [(scores.cpu(), labels.cpu()) for scores, labels in self.local]
        self.synced += [batch for batches in gather_objects(of_rank) for batch in batches]
        self.local = []

    @property
    def value(self) -> dict[str, float]:
        """Return ``{"map": 0.7}``, a fraction; 0 before the first positive image."""
        batches = [*self.synced, *self.local]
        if not batches:
            return {"map": 0.0}
        scores, labels = (
            torch.cat([part.cpu() for part in parts]).numpy()
            for parts in zip(*batches, strict=True)
        )
        precisions = [
            average_precision(labels[is_known, c] == 1, scores[is_known, c])
            for c in range(scores.shape[1])
            if (labels[is_known := labels[:, c] >= 0, c] == 1).any()
        ]
        return {"map": float(np.mean(precisions)) if precisions else 0.0}

    def validate(self, model_output_shape: Any, target_shape: Any) -> None:
        """Raise UserError unless the shapes are (B, C) and (B, C) or (B,)."""
        output, target = tuple(model_output_shape), tuple(target_shape)
        if len(output) != 2 or target not in (output, output[:1]):
            raise UserError(
                "meters.mean_average_precision: scores (B, C) and labels (B, C) or (B,) are "
                f"expected, not {output} and {target}"
            )

    def get_classy_state(self) -> dict[str, Any]:
        pairs = {"synced": self.synced, "local": self.local}
        lists = {key: [list(pair) for pair in value] for key, value in pairs.items()}
        return {"name": self.name, **lists}

    def set_classy_state(self, state: dict[str, Any]) -> None:
        """Restore the state of ``get_classy_state``; raise UserError if another meter saved it."""
        if state["name"] != self.name:
            raise UserError(f"meters.{self.name}: the checkpoint has counted {state['name']}")
        self.synced = [(scores, labels) for scores, labels in state["synced"]]
        self.local = [(scores, labels) for scores, labels in state["local"]]


def average_precision(is_positive: np.ndarray, scores: np.ndarray) -> float:
    """Return the average precision: the sum over thresholds of precision times gain in recall.

    Args:
        is_positive: bool (N,), at least one of them True.
        scores: float (N,), the score of each image; equal scores share a threshold.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    right = np.cumsum(is_positive[order])[ends]
    gains = np.diff(right, prepend=0) / right[-1]
    return float((gains * right / (ends + 1)).sum())
