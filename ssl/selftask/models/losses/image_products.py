"""Squared norms of products of features, computed from products of images.

For n rows X and Y of D features, the squared norm of the (D, D) matrix X^T Y is the sum of the
entrywise product of the (n, n) matrices X X^T and Y Y^T. With fewer images than features the latter
are smaller, and ranks exchange n rows instead of two times D rows.
"""

from __future__ import annotations

from torch import Tensor

from selftask.distributed.collectives import all_gather_cat, world_size


def has_few_images(features: Tensor) -> bool:
    """Return True if all ranks together have fewer than 2 * D images, for features (..., B, D).

    Gathering the features then takes less traffic than an all-reduce of a (D, D) matrix, which
    sends it twice.
    """
    return features.shape[-2] * world_size() < 2 * features.shape[-1]


def rows_of_all_ranks(x: Tensor) -> Tensor:
    """Gather rows ``x`` (..., B, D) of all ranks, (..., n, D), without gradient."""
    return all_gather_cat(x.movedim(-2, 0)).movedim(0, -2)


def share_of_squared_norm(first: Tensor, second: Tensor) -> Tensor:
    """Return this rank's share of the squared norm of X^T Y; shares of all ranks sum to it.

    Its gradient with respect to the rows of this rank is that of the whole norm. Since the other
    factor of each product is detached and would contribute as much, the gradient is doubled.

    Args:
        first: X of this rank times that of all ranks, (..., B, n); the latter is detached.
        second: The same for Y.

    Returns:
        Tensor (...).
    """
    share = (first * second).sum(dim=(-2, -1))
    return 2 * share - share.detach()
