"""Feature queue: the features of the latest images, as in MoCo (arXiv:1911.05722, section 3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.distributed.collectives import all_gather_cat


class FeatureQueue(nn.Module):
    """First-in, first-out queue, equal on every rank, saved and resumed as buffers.

    Methods read ``rows`` in ``forward`` and call ``update`` in ``on_update``. The initial entries
    are random unit vectors.

    Args:
        length: Number of entries, K.
        shape: Shape of an entry: ``dim``, or several sizes of which the last is ``dim``.
    """

    rows: Tensor
    """``(K, *shape)``, in no particular order."""
    oldest: Tensor
    """Index of the entry that is replaced next."""

    def __init__(self, length: int, *shape: int) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(length, *shape), dim=-1))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.long))

    def __len__(self) -> int:
        return len(self.rows)

    @torch.no_grad()
    def nearest(self, queries: Tensor) -> Tensor:
        """Return the entries of largest cosine, for queries ``(..., dim)``.

        Only for entries of one dimension. Call it before the queries are enqueued, or each query
        finds itself.
        """
        return self.nearest_few(queries, 1).squeeze(-2)

    @torch.no_grad()
    def nearest_few(self, queries: Tensor, count: int, *, after: Tensor | None = None) -> Tensor:
        """Return the ``count`` entries of largest cosine, ``(..., count, dim)``, nearest first.

        Args:
            queries: ``(..., dim)``.
            count: Number of entries.
            after: Rows ``(B, dim)``: the entries are then those that the queue will have after
                ``update(after)``. Every rank must call it.
        """
        similar = queries.to(self.rows.dtype) @ self.rows.T  # (..., K)
        if after is None:
            return self.rows[similar.topk(count, dim=-1).indices]
        rows, replaced = self._enqueued(after)
        similar = similar.index_fill(-1, replaced, -torch.inf)
        similar = torch.cat([similar, queries.to(rows.dtype) @ rows.T], dim=-1)
        index = similar.topk(count, dim=-1).indices
        older, newer = index.clamp(max=len(self) - 1), (index - len(self)).clamp(min=0)
        return torch.where((index < len(self))[..., None], self.rows[older], rows[newer])

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Replace the oldest entries by ``rows`` ``(B, *shape)``. Every rank must call this method.

        Rows are enqueued in the order of the global batch. If there are more than K, the last K are
        kept.
        """
        rows, indices = self._enqueued(rows)
        self.rows.index_copy_(0, indices, rows)
        self.oldest.add_(len(rows)).remainder_(len(self))

    def _enqueued(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of all ranks that enter, and the indices of those that they replace."""
        rows = all_gather_cat(rows)[-len(self) :].to(self.rows.dtype)  # (W * B, *shape)
        return rows, (torch.arange(len(rows), device=rows.device) + self.oldest) % len(self)
