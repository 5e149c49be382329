"""Spread and rank of the embeddings, and the loss relative to chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.hooks.base import Hook
from selftask.logs import get_logger
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task

log = get_logger(__name__)


@register_hook("health")
@dataclass(eq=False, kw_only=True)
class Health(Hook):
    """Logs ``emb_std``, ``effective_rank`` and ``chance_ratio``; warns once of a collapse.

    ``emb_std`` is the mean standard deviation of the unit-length embeddings times sqrt(E): 1 for
    directions spread evenly, 0 for a collapse (SimSiam, arXiv:2011.10566, section 4.1).
    """

    priority: ClassVar[int] = 60
    collapsed: float = setting(0.1, min=0, max=1)  # emb_std below this is a collapse
    max_rows: int = setting(512, min=2)  # embeddings used per log line

    def on_update(self, task: Task) -> None:
        if not task.should_log:
            return
        embedding = getattr(task.base_model, "embedding", None)
        if embedding is not None and len(embedding) > 1:  # one row has no spread
            rows = embedding[: self.max_rows].float()
            spread = embedding_std(rows)
            task.log("emb_std", spread)
            task.log("effective_rank", effective_rank(rows))
            self._warn_of_collapse(task, float(spread))
        chance = task.loss.chance_loss
        if chance:
            task.log("chance_ratio", task.last_batch.loss / chance)

    def _warn_of_collapse(self, task: Task, spread: float) -> None:
        if spread < self.collapsed and not getattr(self, "warned", False):
            self.warned = True
            log.warning(
                "step %d: emb_std %.3f: the embeddings of different images are almost the same "
                "(collapse); see the loss's chance_ratio, lower the lr or check the views",
                task.steps_done + 1,
                spread,
            )


def embedding_std(rows: Tensor) -> Tensor:
    """Return sqrt(E) times the mean standard deviation of unit-length (N, E) rows; 0 to 1."""
    directions = F.normalize(rows, dim=1)
    return directions.std(dim=0).mean() * rows.shape[1] ** 0.5


def effective_rank(rows: Tensor) -> Tensor:
    """Return the exponential of the entropy of normalised singular values of centred (N, E) rows.

    Roy and Vetterli, The effective rank, EUSIPCO 2007: between 1 and min(N, E). NaN if the rows are
    not finite; the loss then stops the run with an explanation.
    """
    centred = rows - rows.mean(dim=0)
    gram = centred @ centred.T if len(rows) < rows.shape[1] else centred.T @ centred
    if not gram.isfinite().all():
        return gram.new_tensor(torch.nan)  # eigvalsh would raise
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    share = singular / singular.sum().clamp(min=1e-12)
    return torch.exp(-torch.special.xlogy(share, share).sum())
