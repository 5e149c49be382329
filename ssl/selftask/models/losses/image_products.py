"""Squared norms of products of features, computed from products of images.

For n rows X and Y of D features, the squared norm of the (D, D) matrix X^T Y is the sum of the
entrywise product of the (n, n) matrices X X^T and Y Y^T. If there are fewer images than features,
the (n, n) matrices are smaller, and ranks exchange n rows instead of 2 D rows.
"""

from __future__ import annotations

from torch import Tensor

from selftask.distributed.collectives import all_gather_cat, world_size


def has_few_images(features: Tensor) -> bool:
    """Return True if all ranks together have fewer than 2 * D images, for features (..., B, D).

    Gathering the features then takes less traffic than an all-reduce of a (D, D) matrix, which
    sends the matrix twice.
    """
    return features.shape[-2] * world_size() < 2 * features.shape[-1]


def rows_of_all_ranks(x: Tensor) -> Tensor:
    """Gather rows ``x`` (..., B, D) of all ranks, (..., n, D), without gradient."""
    return all_gather_cat(x.movedim(-2, 0)).movedim(0, -2)


def share_of_squared_norm(first: Tensor, second: Tensor) -> Tensor:
    """Return this rank's share of the squared norm of X^T Y; shares of all ranks sum to it.

    Its gradient with respect to the rows of this rank is the gradient of the whole norm. The other
    factor of each product, which is detached, would contribute an equal gradient; the gradient is
    therefore doubled.

    Args:
        first: Product of this rank's X and the transposed, detached X of all ranks, (..., B, n).
        second: The same for Y.

    Returns:
        Tensor (...).
    """
    share = (first * second).sum(dim=(-2, -1))
    return 2 * share - share.detach()
