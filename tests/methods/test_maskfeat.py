"""MaskFeat against the figures of the authors' code, and histograms as loops over pixels."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from figures import bits, draw
from selftask.batch import Batch
from selftask.methods.maskfeat import MaskFeat, by_patch, oriented_gradients

# seeds 0 and 500: norm, sum and first nine of the targets, loss and norm of its gradient
FIGURES = [
    (
        (14.696939468383789, 588.7496948242188, 1.1623049365683724, 0.07842041551244693),
        [
            *(0.4669075, 0.4032023, 0.5265135, 0.2347001, 0.6149877, 0.2612853),
            *(0.2129617, 0.4135483, 0.1444623),
        ],
    ),
    (
        (14.696938514709473, 588.294921875, 1.186995990370361, 0.07924898778818341),
        [
            *(0.4999121, 0.2050707, 0.4652987, 0.183954, 0.2983416, 0.1044773),
            *(0.2245104, 0.1176804, 0.2841937),
        ],
    ),
]


@pytest.mark.parametrize("case", [0, 1])
def test_targets_and_loss_are_those_of_the_authors(case: int) -> None:
    seed = 500 * case
    targets = by_patch(oriented_gradients(draw(seed, 2, 3, 48, 48), 8, 9), 2)  # (2, 9, 108)
    masked = bits(seed + 2, 2, 9, share=0.4)
    predicted = draw(seed + 1, int(masked.sum()), 108).requires_grad_()
    loss = (predicted - targets[masked]).square().mean()
    (gradient,) = torch.autograd.grad(loss, predicted)
    computed = [x.item() for x in (targets.norm(), targets.sum(), loss, gradient.norm())]
    numbers, first = FIGURES[case]
    assert computed == pytest.approx(numbers, rel=1e-5)  # float32 in the authors' code
    assert targets[0, 0, :9].tolist() == pytest.approx(first, abs=1e-6)


def test_histograms_are_those_of_a_loop() -> None:
    image = draw(7, 1, 1, 6, 6)
    computed = oriented_gradients(image, 3, 4)[0, 0]  # (4, 2, 2)
    border = [1, 0, 1, 2, 3, 4, 5, 4]  # reflected
    pixels = [[float(image[0, 0, y, x]) for x in border] for y in border]
    expected = torch.zeros(4, 2, 2, dtype=torch.float64)
    weights = (1, 2, 1)
    for row in range(6):
        for column in range(6):
            window = [line[column : column + 3] for line in pixels[row : row + 3]]
            across = sum(w * (line[0] - line[2]) for w, line in zip(weights, window, strict=True))
            down = sum(w * (window[0][k] - window[2][k]) for k, w in enumerate(weights))
            half_turns = math.atan2(across, down) / math.pi
            expected[math.floor(half_turns * 4) % 4, row // 3, column // 3] += math.hypot(
                across, down
            )
    assert torch.allclose(computed, expected / expected.norm(dim=0), rtol=1e-10)


def test_a_flat_image_has_no_direction() -> None:
    flat = torch.full((1, 3, 16, 16), 0.7)
    assert not oriented_gradients(flat, 8, 9).any()


def test_targets_are_histograms_of_the_hidden_patches() -> None:
    method = MaskFeat(MaskFeat.Config(cell_size=4, num_bins=3))
    method.patch_size = 8
    images, hidden = draw(1, 2, 3, 24, 24), torch.tensor([[7, 0, 3], [2, 8, 1]])
    none = torch.empty(0, dtype=torch.int64)
    batch = Batch(views={"main": [images]}, labels=none, index=none, key=none)
    batch["hidden"] = (hidden, torch.zeros(2, 3, dtype=torch.bool))
    task: Any = SimpleNamespace(last_batch=batch)
    method.on_forward(task)
    histograms = oriented_gradients(images, 4, 3)  # (2, 3, 3, 6, 6)
    for image in range(2):
        for number, patch in enumerate(hidden[image].tolist()):
            row, column = 2 * (patch // 3), 2 * (patch % 3)
            expected = histograms[image, :, :, row : row + 2, column : column + 2].flatten()
            assert torch.equal(batch["targets"][image, number], expected)
