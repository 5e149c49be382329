"""Linear heads on patch features, one for each learning rate, trained simultaneously.

M patches, E features, C classes, G learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selftask.distributed.heartbeat import track
from selftask.evaluate.features import is_constant

_BATCH_SIZE = 1024  # patches


@dataclass(frozen=True)
class LinearHeads:
    """Weights of the heads on standardized features.

    Attributes:
        weights: (G, C, E).
        biases: (G, C).
        mean: Mean of the training features (E,).
        deviation: Their standard deviation (E,); 1 for constant features.
    """

    weights: Tensor
    biases: Tensor
    mean: Tensor
    deviation: Tensor

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """Return the logits (G, M, C) of features (M, E)."""
        inputs = (features - self.mean) / self.deviation
        return torch.einsum("me,gce->gmc", inputs, self.weights) + self.biases[:, None]


def fit_linear_heads(
    features: Tensor,
    shares: Tensor,
    rates: Sequence[float],
    *,
    steps: int,
    weight_decay: float,
    seed: int,
) -> LinearHeads:
    """Train one linear head for each learning rate by the cross-entropy of pixels.

    All pixels of a patch share its logits, so their mean cross-entropy equals the cross-entropy
    with the patch's class shares as soft targets. Heads are trained by AdamW from zeros, with
    batches of up to 1,024 patches and a cosine decay of the learning rate to 0. All heads see the
    same batches, and none depends on the others.

    Args:
        features: (M, E).
        shares: Class shares of the patches (M, C); the sum of each row is 1.
        rates: The G learning rates.
        steps: Number of steps.
        weight_decay: Decoupled weight decay of the weights; biases are not decayed.
        seed: Seed of the order of patches.
    """
    mean, deviation = features.mean(dim=0), features.std(dim=0, correction=0)
    deviation = deviation.masked_fill(is_constant(deviation), 1.0)
    size = (shares.shape[1], features.shape[1])
    weights = [features.new_zeros(size, requires_grad=True) for _ in rates]
    biases = [features.new_zeros(size[0], requires_grad=True) for _ in rates]
    groups = [
        {"params": [parameter], "lr": rate, "weight_decay": decay}
        for parameters, decay in ((weights, weight_decay), (biases, 0.0))
        for parameter, rate in zip(parameters, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    with torch.enable_grad():
        for _ in track("linear heads", range(steps)):
            if len(order) < min(_BATCH_SIZE, len(features)):
                order = torch.randperm(len(features), generator=generator)
            rows, order = order[:_BATCH_SIZE].to(features.device), order[_BATCH_SIZE:]
            inputs = (features[rows] - mean) / deviation
            logits = inputs @ torch.cat(weights).T + torch.cat(biases)  # (m, G * C)
            losses = logits.unflatten(1, (len(rates), -1)).log_softmax(dim=2)  # (m, G, C)
            optimizer.zero_grad()
            (-(shares[rows][:, None] * losses).sum() / len(rows)).backward()
            optimizer.step()
            schedule.step()
    return LinearHeads(torch.stack(weights).detach(), torch.stack(biases).detach(), mean, deviation)
