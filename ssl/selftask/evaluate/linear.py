"""A linear classifier on frozen features: what can be read out of them.

n training images, E features, C classes, S weight decays, trained all at once: each pass over the
features serves the whole grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.errors import plural
from selftask.evaluate.features import Features
from selftask.evaluate.label_counts import LabelCounts, require_labels
from selftask.pulse import each
from selftask.registry import limited, register_evaluation

_ROWS = 8192  # images whose logits for the whole grid exist at a time


@register_evaluation("linear")
@dataclass(frozen=True, kw_only=True)
class Linear:
    """Top-1 of a linear probe: linear_top1 with all labels, linear_10_labels_top1 with few."""

    few_labels: list[int] = field(default_factory=list)  # labels a class; each is one more figure
    repeats: int = field(default=5, metadata={"min": 1})  # draws of few labels; their mean counts
    weight_decay: list[float] = field(
        default_factory=lambda: [0.00001, 0.0001, 0.001, 0.01, 0.1]
    )  # L2, against the mean cross-entropy: scikit-learn's 1 / (C * n)
    iterations: int = field(default=200, metadata={"min": 1})  # passes over the features
    held_out: float = field(default=0.2, metadata={"min": 0, "max": 1})  # share of the training
    # labels that picks the weight decay
    seed: int = limited(0, min=0)

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.few_labels and min(self.few_labels) < 1:
            yield f"few_labels: {self.few_labels}; each must be at least 1 label a class"
        if not self.weight_decay or min(self.weight_decay) < 0:
            yield f"weight_decay: {self.weight_decay}; one or more are expected, each at least 0"

    def label_problems(self, counts: LabelCounts) -> Iterator[str]:
        if not len(counts.classes):
            return
        rarest = min(counts.classes, key=lambda label: counts.train[label])
        least = counts.train[rarest]
        too_many = [count for count in self.few_labels if count > least]
        if too_many:
            yield (
                f"few_labels: {too_many}: class {counts.name(rarest)} has {least} training "
                f"{plural('image', least)}; use at most {least}"
            )

    def __call__(self, train: Features, test: Features) -> dict[str, float]:
        """Fractions of test images; the weight decay is picked without looking at them."""
        train.check_labels("linear probe, training set")
        test.check_labels("linear probe, test set")
        require_labels(self, LabelCounts.of_targets(train.targets.cpu(), test.targets.cpu()))
        train, test = _standardised(train, test)
        generator = torch.Generator().manual_seed(self.seed)
        result = {"linear_top1": self._accuracy([train], test, generator)}
        for count in self.few_labels:
            draws = [_draw(train, count, generator) for _ in range(self.repeats)]
            result[f"linear_{count}_labels_top1"] = self._accuracy(draws, test, generator)
        return result

    def _accuracy(self, draws: list[Features], test: Features, generator: torch.Generator) -> float:
        """Mean test accuracy over the draws, with the weight decay that is best where held out."""
        best = self._best(draws, generator)
        fits = [_fit(draw, [best], self.iterations) for draw in draws]
        return sum(float(fit.accuracy(test)[0]) for fit in fits) / len(fits)

    def _best(self, draws: list[Features], generator: torch.Generator) -> float:
        """The weight decay of largest held-out accuracy; of equal ones, that of the least loss."""
        accuracy = torch.zeros(len(self.weight_decay), dtype=torch.float64)
        loss = torch.zeros(len(self.weight_decay), dtype=torch.float64)
        for draw in draws:
            order = torch.randperm(len(draw), generator=generator).to(draw.targets.device)
            num_held = max(1, round(self.held_out * len(draw)))
            held, kept = draw[order[:num_held]], draw[order[num_held:]]
            fit = _fit(kept if len(kept) else held, self.weight_decay, self.iterations)
            accuracy += fit.accuracy(held).cpu()
            loss += fit.loss(held).cpu()
        ranking = zip((-accuracy).tolist(), loss.tolist(), self.weight_decay, strict=True)
        return min(ranking)[2]


@dataclass(frozen=True)
class _Fit:
    """Trained classifiers of S weight decays, over the classes that training had."""

    weight: Tensor  # (E, S, C)
    bias: Tensor  # (S, C)
    classes: Tensor  # (C,) their labels, ascending

    def logits(self, data: Features) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits (n, S, C) and targets (n,), some rows at a time."""
        parts = zip(
            torch.split(data.features, _ROWS), torch.split(data.targets, _ROWS), strict=True
        )
        for x, targets in parts:
            yield _logits(x, self.weight, self.bias), targets

    def accuracy(self, data: Features) -> Tensor:
        """Of each weight decay, (S,); a class that training did not have is always missed."""
        hits = [
            (self.classes[logits.argmax(dim=2)] == targets[:, None]).sum(dim=0)
            for logits, targets in self.logits(data)
        ]
        return torch.stack(hits).sum(dim=0).double() / len(data)

    def loss(self, data: Features) -> Tensor:
        """Mean cross-entropy of each weight decay, (S,), over the images of known classes."""
        known = data[torch.isin(data.targets, self.classes)]
        total = self.bias.new_zeros(len(self.bias), dtype=torch.float64)
        for logits, targets in self.logits(known):
            target = torch.searchsorted(self.classes, targets)[:, None].expand(-1, len(total))
            total += F.cross_entropy(logits.transpose(1, 2), target, reduction="none").sum(dim=0)
        return total / max(1, len(known))


@torch.no_grad()
def _fit(train: Features, weight_decay: list[float], iterations: int) -> _Fit:
    """Minimise mean cross-entropy + weight_decay / 2 * |W|^2 for each weight decay; bias is free.

    The problem is convex and needs no learning rate: its Hessian is nowhere above that of least
    squares, half the covariance of the features (Boehning, Ann. Inst. Statist. Math. 44, 1992).
    In the basis in which the covariance is diagonal, one division by that bound makes a step that
    cannot overshoot. Nesterov's acceleration, restarted where it leads uphill, does the rest.
    """
    classes, target = torch.unique(train.targets, return_inverse=True)
    mean = train.features.mean(dim=0)
    z, basis, variance = _principal_axes(train.features - mean)
    decay = z.new_tensor(weight_decay)[:, None]  # (S, 1)
    shape = (len(weight_decay), len(classes))
    bound = variance[:, None, None] / 2 + decay  # (E, S, 1)

    weight, bias = z.new_zeros(z.shape[1], *shape), z.new_zeros(*shape)
    ahead_weight, ahead_bias = weight, bias  # where Nesterov looks
    pace = z.new_ones(shape[0], 1)  # (S, 1), his t_k
    for _ in each("linear evaluation", range(iterations)):
        weight_gradient, bias_gradient = _gradient(z, target, ahead_weight, ahead_bias)
        weight_gradient += decay * ahead_weight
        next_weight = ahead_weight - weight_gradient / bound
        next_bias = ahead_bias - bias_gradient * 2
        weight_move, bias_move = next_weight - weight, next_bias - bias
        uphill = (weight_gradient * weight_move).sum(dim=(0, 2)) + (bias_gradient * bias_move).sum(
            dim=1
        ) > 0  # (S,)
        pace = pace.masked_fill(uphill[:, None], 1.0)
        next_pace = (1 + (1 + 4 * pace.square()).sqrt()) / 2
        push = (pace - 1) / next_pace
        ahead_weight, ahead_bias = next_weight + push * weight_move, next_bias + push * bias_move
        weight, bias, pace = next_weight, next_bias, next_pace

    weight = torch.einsum("ij,jsc->isc", basis, weight)
    return _Fit(weight, bias - torch.einsum("i,isc->sc", mean, weight), classes)


def _principal_axes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centred rows in the basis of their covariance (n, R), the basis (E, R), the variances (R,).

    R = min(n, E): of fewer images than features (raw pixels, few labels) the axes come from the
    products of images, which is the smaller problem; the best weights lie in their span. Axes
    without variance get a small one: nothing moves along them, and nothing is divided by 0.
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


def _gradient(z: Tensor, target: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mean cross-entropies with respect to weight (E, S, C) and bias (S, C)."""
    weight_sum, bias_sum = torch.zeros_like(weight), torch.zeros_like(bias)
    for x, targets in zip(torch.split(z, _ROWS), torch.split(target, _ROWS), strict=True):
        error = _logits(x, weight, bias)  # (n, S, C)
        error.sub_(error.amax(dim=2, keepdim=True)).exp_()
        error /= error.sum(dim=2, keepdim=True)  # softmax; torch's takes thrice as long for few C
        error -= F.one_hot(targets, bias.shape[1]).to(error.dtype)[:, None]
        weight_sum += (x.T @ error.flatten(1)).view_as(weight)
        bias_sum += error.sum(dim=0)
    return weight_sum / len(z), bias_sum / len(z)


def _logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(n, E) -> (n, S, C) as one matrix product."""
    return (x @ weight.flatten(1)).view(len(x), *bias.shape) + bias


def _standardised(train: Features, test: Features) -> tuple[Features, Features]:
    """Both with the training set's mean 0 and deviation 1 in each feature; idle ones stay."""
    mean, deviation = train.features.mean(dim=0), train.features.std(dim=0, correction=0)
    idle = deviation < 1e-6 * deviation.max().clamp_min(1e-30)
    deviation = deviation.masked_fill(idle, 1.0)
    first, second = (
        Features((part.features - mean) / deviation, part.targets, part.indices)
        for part in (train, test)
    )
    return first, second


def _draw(train: Features, count: int, generator: torch.Generator) -> Features:
    """``count`` images of each class at random; all of a class that has fewer."""
    order = torch.randperm(len(train), generator=generator).to(train.targets.device)
    shuffled = train.targets[order]
    chosen = [order[shuffled == label][:count] for label in torch.unique(train.targets)]
    return train[torch.cat(chosen)]
