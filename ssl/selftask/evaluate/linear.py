"""A linear classifier on frozen features.

n training images, E features, R principal axes of the training images, C classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.distributed.heartbeat import activity
from selftask.evaluate.features import Features, is_constant
from selftask.evaluate.figure import Figure
from selftask.evaluate.label_counts import FewLabels
from selftask.registry import register_evaluation

_ROWS = 8192  # images per block of logits
_ROUGH, _FINE = 1e-3, 1e-4  # tolerances for choosing a weight decay and for the result
_RESOLUTION = 1e-9  # smaller decreases of the loss count as none


@register_evaluation("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(FewLabels):
    """Linear probe: linear_top1 with all labels, linear_10_labels_top1 with few labels.

    With 1 % of the labels, the metric is linear_1_percent_top1.
    """

    weight_decay: list[float] = setting([0.00001, 0.0001, 0.001, 0.01, 0.1], min=0, nonempty=True)
    """Weight decays to choose from, for the mean cross-entropy; equal to 1 / (C * n) for
    scikit-learn's cost C and n training images.
    """
    iterations: int = setting(200, min=1)
    """Maximum number of iterations of L-BFGS."""
    held_out: float = setting(0.2, min=0, max=1)
    """Share of the training images that is held out to choose the weight decay."""

    def __call__(self, train: Features, test: Features) -> dict[str, float]:
        """Return test accuracies, 0 to 1, by metric name.

        The weight decay is chosen on held-out training images; then the classifier is fitted to all
        training images.

        Raises:
            UserError: If images have no labels, or a class has fewer images than an entry of
                ``few_labels``.
        """
        self.check(train, test, "linear probe")
        train, test = _standardized(train, test)
        generator = torch.Generator().manual_seed(self.seed)
        return {
            f"linear{name}_top1": self._accuracy(draws, test, generator)
            for name, draws in self.draws(train, generator)
        }

    def _accuracy(
        self, draws: list[Features], test: Features, generator: torch.Generator
    ) -> Figure:
        """Return the mean test accuracy of draws, with the weight decay best on held-out images."""
        problems = [_Problem(draw, self.iterations) for draw in draws]
        grids = [self._grid(problem, generator) for problem in problems]
        ranking = [
            (-sum(fit.accuracy for fit in fits), sum(fit.loss for fit in fits), number)
            for number, fits in enumerate(zip(*grids, strict=True))
        ]
        best = min(ranking)[2]
        hits = []
        for problem, grid in zip(problems, grids, strict=True):
            start = grid[best].weights if grid[best].knows_all_classes else None
            weights = problem.fit(self.weight_decay[best], start=start)
            hits.append(problem.accuracy(weights, test, only_its_classes=self.only_test_classes))
        return Figure.of_draws(hits)

    def _grid(self, problem: _Problem, generator: torch.Generator) -> list[_HeldOut]:
        """Evaluate each weight decay on held-out images; each fit starts from the previous one."""
        num_images = len(problem.target)
        order = torch.randperm(num_images, generator=generator).to(problem.target.device)
        num_held = max(1, round(self.held_out * num_images))
        held, kept = order[:num_held], order[num_held:]
        part = problem.subset(kept if len(kept) else held)
        results: dict[float, _HeldOut] = {}
        weights: Tensor | None = None
        for decay in sorted(set(self.weight_decay), reverse=True):  # from the easiest to fit
            weights = part.fit(decay, start=weights, tolerance=_ROUGH)
            results[decay] = part.held_out(weights, problem.z[held], problem.target[held])
        return [results[decay] for decay in self.weight_decay]


@dataclass(frozen=True)
class _HeldOut:
    """Results of a fit on held-out images."""

    weights: Tensor  # (C, R + 1)
    accuracy: float
    loss: float  # mean cross-entropy over images of classes in the fit
    knows_all_classes: bool


class _Problem:
    """Multinomial logistic regression on the principal axes of the training images.

    Weights (C, R + 1) are coefficients along the axes, then the bias. L-BFGS runs on weights scaled
    by a bound on the curvature: the Hessian of the mean cross-entropy is at most half the
    covariance of the features (Boehning, Ann. Inst. Statist. Math. 44, 1992), which is diagonal
    here. With this scaling, all problems have similar condition numbers, and a step size of about 1
    is suitable.
    """

    def __init__(self, train: Features, iterations: int) -> None:
        self.iterations = iterations
        self.classes, self.target = torch.unique(train.targets, return_inverse=True)
        self.mean = train.features.mean(dim=0)
        self.z, self.basis, self.variance = _principal_axes(train.features - self.mean)

    def subset(self, rows: Tensor) -> _Problem:
        """Return the problem for a subset of the images, with the same axes and classes."""
        part = copy.copy(self)
        part.z, part.target = self.z[rows], self.target[rows]
        return part

    def fit(self, decay: float, *, start: Tensor | None = None, tolerance: float = _FINE) -> Tensor:
        """Minimize mean cross-entropy + decay / 2 * |W|^2; the bias is not decayed.

        Args:
            decay: Weight decay.
            start: Initial weights; None for zeros.
            tolerance: Stop if no entry of the gradient with respect to the scaled weights exceeds
                it. L-BFGS also stops after ``iterations``, or if the loss no longer decreases.

        Returns:
            Weights (C, R + 1).
        """
        from scipy.optimize import minimize  # slow to import

        scale = (self.variance / 2 + decay).rsqrt()  # (R,)
        scale = torch.cat([scale, scale.new_ones(1)])
        shape = (len(self.classes), len(scale))

        def evaluate(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            with activity("linear evaluation"):
                weights = torch.from_numpy(scaled).view(shape).to(scale) * scale
                loss, gradient = self._loss_and_gradient(weights)
                weights[:, -1] = 0.0  # the bias is not decayed
                gradient = (gradient + decay * weights) * scale
                loss += decay / 2 * float(weights.square().sum())
                return loss, gradient.double().flatten().cpu().numpy()

        first = scale.new_zeros(shape) if start is None else start / scale
        limits = {"maxiter": self.iterations, "gtol": tolerance, "ftol": _RESOLUTION}
        optimum = minimize(
            evaluate, first.double().flatten().cpu(), jac=True, method="L-BFGS-B", options=limits
        )
        return torch.from_numpy(optimum.x).view(shape).to(scale) * scale

    def _loss_and_gradient(self, weights: Tensor) -> tuple[float, Tensor]:
        """Return the mean cross-entropy and its gradient with respect to the weights."""
        loss, gradient = 0.0, torch.zeros_like(weights)
        for x, target in zip(self.z.split(_ROWS), self.target.split(_ROWS), strict=True):
            error = _logits(x, weights).log_softmax(dim=0)  # (C, n)
            picked = target[None]  # (1, n)
            loss -= float(error.gather(0, picked).sum(dtype=torch.float64))
            error.exp_().scatter_add_(0, picked, error.new_full((1, 1), -1.0).expand_as(picked))
            gradient[:, :-1] += error @ x
            gradient[:, -1] += error.sum(dim=1)
        return loss / len(self.z), gradient / len(self.z)

    def held_out(self, weights: Tensor, z: Tensor, target: Tensor) -> _HeldOut:
        """Evaluate weights on held-out images with coordinates z (n, R) along the axes."""
        seen = torch.zeros(len(self.classes), dtype=torch.bool, device=target.device)
        seen[self.target] = True
        hits = weights.new_zeros(())
        loss = weights.new_zeros(())
        for x, wanted in zip(z.split(_ROWS), target.split(_ROWS), strict=True):
            logits = _logits(x, weights)
            hits += (logits.argmax(dim=0) == wanted).sum()
            is_seen = seen[wanted]
            loss += F.cross_entropy(logits.T[is_seen], wanted[is_seen], reduction="sum")
        num_seen = max(1, int(seen[target].sum()))
        return _HeldOut(weights, float(hits) / len(z), float(loss) / num_seen, bool(seen.all()))

    def accuracy(
        self, weights: Tensor, test: Features, *, only_its_classes: bool = False
    ) -> Figure:
        """Return the test accuracy. Images of classes without training images count as wrong.

        Args:
            weights: (C, R + 1).
            test: The test images.
            only_its_classes: Whether predictions are restricted to classes of the test images.
        """
        absent = ~torch.isin(self.classes, test.targets) & only_its_classes  # (C,)
        hits = []
        parts = zip(test.features.split(_ROWS), test.targets.split(_ROWS), strict=True)
        for features, targets in parts:
            logits = _logits((features - self.mean) @ self.basis, weights)
            logits[absent] = -torch.inf
            hits.append(self.classes[logits.argmax(dim=0)] == targets)
        return Figure.of_scores(torch.cat(hits).cpu())


def _logits(z: Tensor, weights: Tensor) -> Tensor:
    """Return logits (C, n) of images (n, R)."""
    return torch.addmm(weights[:, -1:], weights[:, :-1], z.T)


def _principal_axes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return coordinates (n, R) of centered rows, principal axes (E, R) and variances (R,).

    R = min(n, E). If there are fewer images than features (raw pixels, few labels), the axes are
    computed from products of images, which is the smaller problem; the optimal weights are in their
    span. Axes without variance get a small variance, to avoid a division by 0.
    """
    num_images, num_features = x.shape
    if num_images < num_features:
        scale, left = torch.linalg.eigh((x @ x.T).double())  # (n,), (n, n)
        variance = scale / num_images
        length = scale.clamp_min(1e-12 * scale.max().clamp_min(1e-12)).sqrt()
        basis = x.T.double() @ (left / length)
    else:
        variance, basis = torch.linalg.eigh((x.T @ x).double() / num_images)
    variance = variance.clamp_min(1e-6 * variance.max().clamp_min(1e-12)).float()
    return x @ basis.float(), basis.float(), variance


def _standardized(train: Features, test: Features) -> tuple[Features, Features]:
    """Standardize both sets with training statistics; constant features are not scaled."""
    mean, deviation = train.features.mean(dim=0), train.features.std(dim=0, correction=0)
    deviation = deviation.masked_fill(is_constant(deviation), 1.0)
    first, second = (
        Features((part.features - mean) / deviation, part.targets, part.indices)
        for part in (train, test)
    )
    return first, second
