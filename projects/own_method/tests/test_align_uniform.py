"""Tests that the loss equals the paper's and that the method trains: `pytest` in this folder."""

from __future__ import annotations

import torch
from align_uniform.method import alignment_uniformity

import selftask


def test_loss_equals_the_authors_code() -> None:
    """Reference: the two functions on the first page of the authors' repository."""
    torch.manual_seed(0)
    x, y = torch.nn.functional.normalize(torch.randn(2, 32, 8, dtype=torch.float64), dim=2)

    def lalign(x, y, alpha=2.0):
        return (x - y).norm(dim=1).pow(alpha).mean()

    def lunif(x, t=2.0):
        return torch.pdist(x, p=2).pow(2).mul(-t).exp().mean().log()

    for alpha, t in [(2.0, 2.0), (1.0, 3.0)]:
        align, uniform = alignment_uniformity(3 * x, y / 2, alpha=alpha, t=t)
        torch.testing.assert_close(align, lalign(x, y, alpha))
        torch.testing.assert_close(uniform, (lunif(x, t) + lunif(y, t)) / 2)


def test_gradients() -> None:
    views = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda v: sum(alignment_uniformity(*v, alpha=2.0, t=2.0)), views)


def test_it_trains_by_name(tmp_path) -> None:
    """No ``import:``; the entry point of the installed package is enough."""
    run = selftask.train("align_uniform", out=tmp_path / "run", **{"train.max_steps": 3})
    assert run is not None
    assert (tmp_path / "run/export/backbone.pt").exists()
