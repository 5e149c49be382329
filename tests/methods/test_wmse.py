"""W-MSE against the figures of its authors' code, and whitening by a loop in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from figures import draw
from minitask import MiniTask, loss_of
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.wmse import WMSE, whiten

# htdt/self-supervised, eps 0: loss, gradients of both views; sub-batches of 32 and 16, plain MSE
WHOLE = (1.2548418299485977, 0.14499532516846514, 0.12357392725499672)
HALVES = (1.2970899242718472, 0.1850079323118251, 0.1444054442507874)
MSE = (1.193931875774646, 0.13528460977867074, 0.11608826044116805)


@pytest.mark.parametrize(
    ("size", "normalize", "figures"), [(32, True, WHOLE), (16, True, HALVES), (32, False, MSE)]
)
def test_loss_is_that_of_the_authors_code(
    size: int, normalize: bool, figures: tuple[float, ...]
) -> None:
    draws = draw(0, 2, 32, 8)
    first = draws[0].requires_grad_()
    second = (0.5 * draws[0] + draws[1]).detach().requires_grad_()
    method = WMSE(WMSE.Config(out_dim=8, sub_batch=size, shrinkage=0.0, normalize=normalize))
    loss = loss_of(method, torch.stack([first, second]), orders=torch.arange(32)[None])
    gradients = torch.autograd.grad(loss, (first, second))
    computed = (loss.item(), *(gradient.norm().item() for gradient in gradients))
    assert computed == pytest.approx(figures, rel=1e-9)


def test_loss_is_a_mean_over_divisions_and_pairs_of_views() -> None:
    """Of the paper's steps in NumPy, one sub-batch and image after the other."""
    output, orders = draw(2, 3, 12, 2), torch.stack([torch.randperm(12) for _ in range(2)])
    method = WMSE(WMSE.Config(out_dim=2, sub_batch=6, iterations=2, shrinkage=0.1))
    losses = []
    for order in orders.tolist():
        for part in (order[:6], order[6:]):
            white = []
            for view in output.numpy():
                rows = view[part] - view[part].mean(axis=0)
                matrix = 0.9 * np.cov(rows.T) + 0.1 * np.eye(2)
                white.append([np.linalg.inv(np.linalg.cholesky(matrix)) @ row for row in rows])
            for one, other in itertools.combinations(white, 2):
                for a, b in zip(one, other, strict=True):
                    unit, target = a / np.linalg.norm(a), b / np.linalg.norm(b)
                    losses.append(((unit - target) ** 2).sum())
    assert loss_of(method, output, orders=orders).item() == pytest.approx(np.mean(losses), rel=1e-9)


def test_white_features_have_the_identity_as_covariance_and_collapsed_ones_are_finite() -> None:
    white = whiten(3 + draw(1, 2, 20, 5), 0.0)
    for part in white:
        torch.testing.assert_close(torch.cov(part.T), torch.eye(5).double(), rtol=0, atol=1e-12)
    collapsed = draw(1, 5).expand(20, 5).clone().requires_grad_()
    whiten(collapsed, 1e-4).square().sum().backward()
    assert collapsed.grad is not None
    assert collapsed.grad.isfinite().all()
    for seed in range(4):  # long features in one direction, in float32
        assert (
            whiten(1000 * (draw(seed, 128, 1) @ draw(seed, 1, 64)).float(), 1e-4).isfinite().all()
        )


def test_orders_are_permutations_that_change() -> None:
    """From batch to batch, and from division to division."""
    config = {"out_dim": 2, "hidden_dim": 7, "sub_batch": 4, "iterations": 2}
    task = MiniTask("wmse", config)
    orders = [*task.run(1).last_batch["orders"], *task.run(1).last_batch["orders"]]
    assert all(sorted(order.tolist()) == [*range(8)] for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_sub_batches_that_do_not_fit_are_refused() -> None:
    words = ["train.batch_size=96", "method.out_dim=64", "method.sub_batch=64"]
    with pytest.raises(ConfigError) as error:
        load_config("wmse", words)
    message = str(error.value)
    assert "method.sub_batch: 96 images (train.batch_size) cannot be divided" in message
    assert "method.sub_batch: 64 images cannot be white in 64 dimensions (out_dim)" in message
