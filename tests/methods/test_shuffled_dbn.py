"""Shuffled-DBN against the paper's steps in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from figures import draw
from minitask import MiniTask, loss_of
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.shuffled_dbn import ShuffledDBN, whiten_groups


def test_loss_is_that_of_the_paper() -> None:
    """Groups one after the other, whitened by eigenvectors; then the distance of unit vectors."""
    output, order = draw(1, 2, 9, 6), torch.tensor([4, 0, 3, 5, 1, 2])
    method = ShuffledDBN(ShuffledDBN.Config(out_dim=6, group_width=3, epsilon=0.01))
    views = []
    for view in output.numpy():
        parts = []
        for group in ([4, 0, 3], [5, 1, 2]):
            rows = view[:, group] - view[:, group].mean(axis=0)
            values, vectors = np.linalg.eigh(rows.T @ rows / 9 + 0.01 * np.eye(3))
            parts.append(rows @ vectors @ np.diag(values**-0.5) @ vectors.T)
        white = np.concatenate(parts, axis=1)
        views.append(white / np.linalg.norm(white, axis=1, keepdims=True))
    expected = np.square(views[0] - views[1]).sum(axis=1).mean()
    assert loss_of(method, output, order=order).item() == pytest.approx(expected, rel=1e-9)


def test_gradient_passes_mean_and_covariance() -> None:
    """White features do not change if an image is shifted with all others, or all are scaled."""
    features = draw(2, 1, 12, 4).requires_grad_()
    white = whiten_groups(features, torch.arange(4)[None], epsilon=1e-12)
    (gradient,) = torch.autograd.grad((white * draw(3, 1, 12, 4)).sum(), features)
    torch.testing.assert_close(gradient.sum(dim=1), torch.zeros(1, 4).double(), rtol=0, atol=1e-9)
    assert (gradient * features).sum().item() == pytest.approx(0.0, abs=1e-8)
    assert gradient.norm() > 0.1
    with torch.no_grad():
        covariance = torch.cov(white[0].T, correction=0)
    torch.testing.assert_close(covariance, torch.eye(4).double(), rtol=0, atol=1e-9)


def test_features_of_small_variance_are_white_by_default() -> None:
    """Else a network collapses its features without a loss, by making them smaller."""
    features = 0.01 * draw(4, 1, 64, 8)
    white = whiten_groups(features, torch.arange(8)[None], epsilon=ShuffledDBN.Config().epsilon)
    assert torch.cov(white[0].T, correction=0).diagonal().min() > 0.9


@pytest.mark.parametrize("scale", [1.0, 10.0, 1000.0])
@pytest.mark.parametrize("rank", [1, 2, 8, 31])
def test_singular_covariances_are_finite_in_float32(rank: int, scale: float) -> None:
    """Of fewer images than features, or features in few directions: Cholesky gave NaN."""
    for seed in range(4):
        few = draw(seed, 2, 1 + rank, 64)
        for rows in (few, draw(seed, 2, 128, rank) @ few[0, :rank]):
            features = (scale * rows.float()).requires_grad_()
            white = whiten_groups(features, torch.arange(64)[None], epsilon=1e-6)
            (white[0] * white[1]).sum().backward()
            assert white.isfinite().all()
            assert features.grad is not None
            assert features.grad.isfinite().all()


def test_features_are_grouped_in_another_order_at_each_step() -> None:
    config = {"out_dim": 12, "hidden_dim": 7, "group_width": 3}
    task = MiniTask("shuffled_dbn", config)
    first, second = (task.run(1).last_batch["order"].tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == [*range(12)]
    assert first != second
    fixed = MiniTask("shuffled_dbn", {**config, "shuffle": False}).run(1)
    assert fixed.last_batch["order"].tolist() == [*range(12)]


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.group_width: 100 features .* groups of 64"):
        load_config("shuffled_dbn", ["method.out_dim=100", "method.group_width=64"])
