"""KoLeo regularizer, which spreads features evenly over the unit sphere.

Sablayrolles et al., Spreading Vectors for Similarity Search, ICLR 2019, arXiv:1806.03198, eq. 2;
DINOv2 (arXiv:2304.07193) normalizes the features first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.distributed.collectives import gather_cat_with_grad, rank
from selftask.models.precision import in_full_precision

_EPS = 1e-8  # as in DINOv2's published code


@in_full_precision
def koleo(features: Tensor, *, neighbors: int = 1, group_size: int | None = None) -> Tensor:
    """Return the mean of -log of the distance to the nearest neighbors on the unit sphere.

    Args:
        features: (B, D) of this rank, not necessarily normalized.
        neighbors: Number of nearest neighbors of each row, fewer than the rows of a group.
        group_size: Number of consecutive rows of the global batch among which neighbors are
            searched; None: the whole batch. DINOv2's code searches on each GPU separately, which
            corresponds to groups of B rows.

    Returns:
        A scalar: the mean over the rows of this rank and their neighbors.
    """
    features = F.normalize(features, dim=1, eps=_EPS)
    everyone = gather_cat_with_grad(features)  # (W * B, D)
    with torch.no_grad():
        index = torch.arange(len(everyone), device=features.device)
        group = index // (group_size or len(everyone))
        own_rows = slice(rank() * len(features), (rank() + 1) * len(features))
        excluded = (index == index[own_rows, None]) | (group != group[own_rows, None])  # (B, W * B)
        similarity = (features @ everyone.T).masked_fill_(excluded, -torch.inf)
        nearest = similarity.topk(neighbors, dim=1).indices  # (B, neighbors)
    distance = F.pairwise_distance(features[:, None], everyone[nearest], eps=_EPS)
    return -torch.log(distance + _EPS).mean()
