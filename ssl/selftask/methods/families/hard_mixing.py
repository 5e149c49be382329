"""Negatives mixed from the hardest entries of a queue (MoCHi, arXiv:2010.01028).

V: queries per image, B: images per rank, D: width of the head, K: length of the queue, M:
mixed negatives of a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.models.precision import in_full_precision


@dataclass(frozen=True, kw_only=True)
class HardMixingConfig:
    """Config keys of mixed negatives, a base class for the configs of methods with a queue."""

    mix_pairs: int = setting(0, min=0)
    """Number of negatives of a query that mix two hard entries of the queue (MoCHi,
    arXiv:2010.01028), s; 1024 in its paper."""
    mix_queries: int = setting(0, min=0)
    """Number of negatives of a query that mix it with a hard entry of the queue, s'; 128 in the
    paper."""
    mix_hardest: int = setting(1024, min=1, tiny=lambda batch: batch)
    """Number of entries considered hard, N: those most similar to the query."""
    mix_start: int | str = setting("15 epochs", duration=True, tiny=1)
    """Training time before negatives are mixed."""

    @property
    def num_mixed(self) -> int:
        """Number of mixed negatives of a query, M."""
        return self.mix_pairs + self.mix_queries

    @property
    def num_draws(self) -> int:
        """Number of uniform draws per query: 3 per mixed pair, 2 per mix with the query."""
        return 3 * self.mix_pairs + 2 * self.mix_queries

    def mixing_problems(self, queue_size: int) -> Iterator[str]:
        """Yield an error message if negatives are mixed from more entries than the queue has."""
        if self.num_mixed and self.mix_hardest > queue_size:
            yield f"mix_hardest: {self.mix_hardest} is more than queue_size: {queue_size}"

    @in_full_precision
    def mixed(self, queries: Tensor, queue: Tensor, draws: Tensor) -> Tensor:
        """Return the mixed negatives (V, B, M, D) of queries, of unit length.

        The first ``mix_pairs`` mix two hard entries of the queue. The others mix the query with a
        hard entry, whose share is above 1/2.

        Args:
            queries: (V, B, D), unit vectors without gradient.
            queue: (V, K, D), unit vectors.
            draws: (V, B, ``num_draws``), from [0, 1).
        """
        hardest = (queries @ queue.transpose(1, 2)).topk(self.mix_hardest, dim=2).indices
        index, shares = draws.split((self.num_draws - self.num_mixed, self.num_mixed), dim=2)
        drawn = hardest.gather(2, (index * self.mix_hardest).long())  # (V, B, 2 s + s')
        rows = torch.stack([rows[chosen] for rows, chosen in zip(queue, drawn, strict=True)])
        first, second, other = rows.split((self.mix_pairs, self.mix_pairs, self.mix_queries), dim=2)
        of_pairs, of_queries = shares.unsqueeze(3).split((self.mix_pairs, self.mix_queries), dim=2)
        return torch.cat(
            [mix(first, second, of_pairs), mix(queries.unsqueeze(2), other, 0.5 * of_queries)],
            dim=2,
        )


def mix(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Return ``share * first + (1 - share) * second``, normalized in the last dimension."""
    return F.normalize(share * first + (1 - share) * second, dim=-1)
