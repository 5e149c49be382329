"""Conversion of a frozen teacher's scores into probabilities.

V: views; N: rows, images or patches; K: classes or prototypes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.models.clustering import sinkhorn_knopp
from selftask.models.weights.trained import Scores, Targets


class ScoreTargets(nn.Module):
    """Conversion of scores into targets, by the teacher's own method or as specified.

    It has no saved state, since temperature and center belong to the teacher.

    Args:
        scores: Head of the teacher, with its temperature, center and targets.
        how: Kind of targets, as in ``Scores.targets``; None for the teacher's own.
        temperature: Temperature, or epsilon of Sinkhorn-Knopp; None for the teacher's own.
        iterations: Number of iterations of Sinkhorn-Knopp; other targets ignore it.

    Raises:
        ValueError: If the kind is ``centering`` and the teacher has no center.
    """

    center: Tensor  # (K,), or 0

    def __init__(
        self,
        scores: Scores,
        *,
        how: Targets | None = None,
        temperature: float | None = None,
        iterations: int = 3,
    ) -> None:
        super().__init__()
        self.how = how or scores.targets
        self.temperature = temperature or scores.temperature
        self.power, self.iterations = scores.power, iterations
        center = scores.center if self.how == "centering" else torch.zeros(())
        if center is None:
            raise ValueError("centering needs a center, and these scores have none")
        self.register_buffer("center", center, persistent=False)

    @torch.no_grad()
    def forward(self, scores: Tensor) -> Tensor:
        """Turn scores (V, N, K) into probabilities of the same shape.

        Sinkhorn-Knopp balances the prototypes over the rows of all ranks, separately for each view.
        """
        if self.how == "sinkhorn":
            return torch.stack([self._balanced(view) for view in scores])
        return F.softmax((scores - self.center) / self.temperature, dim=-1)

    def _balanced(self, scores: Tensor) -> Tensor:
        return sinkhorn_knopp(
            scores, epsilon=self.temperature, iterations=self.iterations, power=self.power
        )
