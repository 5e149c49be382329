"""Correlations of the images of all ranks: values and gradients of one rank with all of them.

With fewer images than features, products of images are exchanged, else those of features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from selftask.distributed import collectives
from selftask.distributed.collectives import rank, world_size
from selftask.methods.barlow import correlations
from selftask.methods.vicregl import local_terms
from selftask.models.losses.variance_covariance import variance_covariance

NUM_IMAGES = 8
WIDTHS = (3, 7)  # fewer and more than half of the images
WEIGHTS = (2.0, 3.0, 5.0)


def images(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) + 1


def variances(x: Tensor) -> tuple[Tensor, ...]:
    return variance_covariance(x)


def of_barlow(x: Tensor) -> tuple[Tensor, ...]:
    diagonal, others = correlations(x)
    return (1 - diagonal).square().sum(), others


def of_cells(x: Tensor) -> tuple[Tensor, ...]:
    """Of two large views and a small one, by features and by position."""
    cells = [view.transpose(0, 1) for view in (x[:3], x[3:6], x[6:])]  # (B, N, D)
    matches = [2, 2, 1]
    return local_terms(cells, [0.5 * view[..., :2].detach() for view in cells], matches, matches)


TERMS: dict[Callable[[Tensor], tuple[Tensor, ...]], tuple[int, ...]] = {
    variances: (2, NUM_IMAGES),
    of_barlow: (2, NUM_IMAGES),
    of_cells: (8, NUM_IMAGES),
}


def on_rank(_: int) -> list[dict[str, Any]]:
    """Terms, the gradient of their weighted sum, and the number of reductions in its backward."""
    results, count = [], 0
    reduce = collectives.dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return reduce(*args, **kwargs)

    collectives.dist.all_reduce = counted
    for width in WIDTHS:
        for function, shape in TERMS.items():
            x = images(*shape, width).chunk(world_size(), dim=1)[rank()].clone().requires_grad_()
            terms = function(x)
            before = count
            sum(w * term for w, term in zip(WEIGHTS, terms, strict=False)).backward()
            gradient = x.grad / world_size()  # as averaged over ranks
            row = {"terms": torch.stack(terms).detach(), "gradient": gradient}
            results.append({**row, "in_backward": count - before})
    collectives.dist.all_reduce = reduce
    return results


def test_ranks_compute_what_one_does() -> None:
    alone = on_rank(0)
    ranks = run_ranks(on_rank, 2)
    for expected, *parts in zip(alone, *ranks, strict=True):
        # an invariance of cells is the mean over a rank's images
        mean = torch.stack([part["terms"] for part in parts]).mean(dim=0)
        torch.testing.assert_close(mean, expected["terms"], rtol=1e-12, atol=1e-12)
        gradient = torch.cat([part["gradient"] for part in parts], dim=1)
        torch.testing.assert_close(gradient, expected["gradient"], rtol=1e-11, atol=1e-12)
    small = [part["in_backward"] for part in ranks[0]]
    assert small == [0] * 4 + [1] + [0], "of the standard deviations of Barlow Twins only"


def reference(function: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The same from torch.cov and torch.corrcoef, which autograd differentiates as they are."""
    if function is of_barlow:
        first, second = (x - x.mean(dim=1, keepdim=True)).unbind()
        scale = [(view.square().mean(dim=0) + 1e-5).rsqrt() for view in (first, second)]
        c = (first * scale[0]).T @ (second * scale[1]) / NUM_IMAGES
        others = c.square().sum() - c.diagonal().square().sum()
        return (1 - c.diagonal()).square().sum(), others
    every = [torch.cov(view.T) for view in x]
    hinge = [(1 - (c.diagonal() + 1e-4).sqrt()).relu().mean() for c in every]
    off = [(c - c.diagonal().diag()).square().sum() / len(c) for c in every]
    return sum(hinge) / len(every), sum(off) / len(every)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("function", [variances, of_barlow])
def test_terms_and_gradients_are_those_of_the_covariances(function: Any, width: int) -> None:
    x = (0.5 * images(2, NUM_IMAGES, width)).requires_grad_()
    pairs = zip(function(x), reference(function, x), strict=True)
    for ours, expected in pairs:
        assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
        mine, theirs = (
            torch.autograd.grad(term, x, retain_graph=True)[0] for term in (ours, expected)
        )
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
