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
def koleo(features: Tensor) -> Tensor:
    """Return the mean of -log of the distance to the nearest neighbor on the unit sphere.

    Neighbors are searched in the global batch. DINOv2's code searches on each GPU separately, so
    its loss depends on the number of GPUs.

    Args:
        features: (B, D) of this rank, not necessarily normalized; at least two rows over all ranks.
    """
    features = F.normalize(features, dim=1, eps=_EPS)
    everyone = gather_cat_with_grad(features)  # (W * B, D)
    with torch.no_grad():
        similarity = features @ everyone.T  # (B, W * B)
        similarity.diagonal(rank() * len(features)).fill_(-1.0)  # each row and itself
        nearest = similarity.argmax(dim=1)
    distance = F.pairwise_distance(features, everyone[nearest], eps=_EPS)
    return -torch.log(distance + _EPS).mean()
