"""Linear classifiers, one for each of several learning rates, trained on a stream of batches.

B images of this rank, E features, C classes, L learning rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selftask.distributed.collectives import all_reduce_sum

_MOMENTUM = 0.9
_OF_STATISTICS = 0.1  # weight of a batch in the running statistics, as in BatchNorm
_OF_ACCURACY = 0.05  # weight of a batch in the recent accuracy
_EPS = 1e-6  # relative to the mean variance


class LinearProbes(nn.Module):
    """Softmax regressions trained by SGD with momentum 0.9, one for each learning rate.

    Features are standardized with running statistics and divided by sqrt(E), so that learning rates
    do not depend on their scale and width. The gradient of the cross-entropy is computed in closed
    form, without autograd, and averaged over the labeled images of all ranks. Weights are initially
    0.

    Args:
        lr: Learning rates (L,).
        width: Number of features, E.
        num_classes: Number of classes, C.
        device: Device of the features.
    """

    weights: Tensor
    velocity: Tensor
    mean: Tensor
    variance: Tensor
    recent: Tensor
    hits: Tensor
    images: Tensor
    steps: Tensor

    def __init__(
        self, lr: Sequence[float], width: int, num_classes: int, device: torch.device
    ) -> None:
        super().__init__()
        self.lr = torch.tensor(lr, device=device)
        self.num_classes = num_classes
        number = len(self.lr)
        shape = (number, num_classes, width + 1)  # the last column is the bias
        zeros = {
            "weights": shape,
            "velocity": shape,
            "mean": (width,),
            "variance": (width,),
            "recent": (number,),  # recent accuracy of each learning rate
            "hits": (number,),  # correct predictions since `take_accuracy`
            "images": (),  # their number
            "steps": (),
        }
        for name, size in zeros.items():
            self.register_buffer(name, torch.zeros(size, device=device))
        self.variance.fill_(1.0)
        sizes = [self.weights.numel(), 2 * width, number, 1]
        self._sums = torch.zeros(sum(sizes), device=device)  # of this step, for one collective
        self._sizes = sizes

    def _parts(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the views of the sums: gradient (L * C, E + 1), moments (2, E), hits, images."""
        gradient, moments, hits, images = sums.split(self._sizes)
        return gradient.view(-1, len(self.mean) + 1), moments.view(2, -1), hits, images[0]

    def clear(self) -> None:
        """Discard the batches added since the last update."""
        self._sums.zero_()

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Predict a batch of this rank, and accumulate gradient and statistics for ``update``.

        Args:
            features: (B, E).
            labels: int64 (B,), -1 for images to ignore.
        """
        gradient, moments, hits, images = self._parts(self._sums)
        is_labeled = (labels >= 0)[:, None]  # (B, 1)
        rows = self._inputs(features) * is_labeled
        scores = self._scores(rows)  # (B, L, C)
        classes = torch.arange(self.num_classes, device=labels.device)
        is_target = labels[:, None] == classes  # (B, C)
        error = scores.softmax(dim=2) - is_target[:, None].to(scores.dtype)
        gradient.addmm_(error.flatten(1).T, rows)
        offset = (features - self.mean) * is_labeled
        moments += torch.stack([offset.sum(dim=0), offset.square().sum(dim=0)])
        hits += ((scores.argmax(dim=2) == labels[:, None]) & is_labeled).sum(dim=0)
        images += is_labeled.sum()

    @torch.no_grad()
    def update(self) -> None:
        """Take one step with the batches of all ranks; every rank must call this method.

        The first step with labeled images only measures the statistics of the features.
        """
        gradient, moments, hits, images = self._parts(all_reduce_sum(self._sums))
        count = images.clamp(min=1)
        has_labels = (images > 0).to(count.dtype)
        has_statistics = (self.steps > 0).to(count.dtype)
        gradient = gradient.view_as(self.velocity) * (has_statistics / count)
        self.velocity.mul_(_MOMENTUM).add_(gradient)
        self.weights.addcmul_(self.velocity, self.lr[:, None, None], value=-1)
        offset, square = moments / count
        share = has_labels * (1 - has_statistics * (1 - _OF_STATISTICS))  # all of the first batch
        self.mean += share * offset
        self.variance.lerp_((square - offset.square()).clamp(min=0), share)
        self.recent.lerp_(hits / count, has_labels * _OF_ACCURACY)
        self.hits += hits
        self.images += images
        self.steps += has_labels
        self.clear()

    @torch.no_grad()
    def count_hits(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the number of correct predictions of each learning rate, int64 (L,).

        Args:
            features: (B, E).
            labels: int64 (B,), -1 for images to ignore.
        """
        best = self._scores(self._inputs(features)).argmax(dim=2)  # (B, L)
        return (best == labels[:, None]).sum(dim=0)

    @property
    def best(self) -> Tensor:
        """Index of the learning rate with the highest recent accuracy, an int64 scalar."""
        return self.recent.argmax()

    def take_accuracy(self) -> Tensor:
        """Return the accuracy of each learning rate since the last call, (L,); reset the counts.

        Accuracies are fractions, 0 without images. Each batch is predicted before the probes are
        trained on it.
        """
        accuracy = self.hits / self.images.clamp(min=1)
        self.hits.zero_()
        self.images.zero_()
        return accuracy

    def _inputs(self, features: Tensor) -> Tensor:
        """Return standardized features and a column of ones: (B, E + 1)."""
        scale = (self.variance + _EPS * self.variance.mean()).clamp(min=1e-30).rsqrt()
        rows = (features - self.mean) * (scale * features.shape[1] ** -0.5)
        return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)

    def _scores(self, rows: Tensor) -> Tensor:
        return (rows @ self.weights.flatten(0, 1).T).unflatten(1, (-1, self.num_classes))
