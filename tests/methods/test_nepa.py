"""NEPA against the pseudo-code of its paper; what each patch sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from figures import draw
from selftask.methods.nepa import NextPatchNetwork, next_embedding_loss


def test_loss_is_that_of_the_pseudo_code() -> None:
    predicted, embedded = draw(0, 3, 5, 4).requires_grad_(), draw(1, 3, 5, 4)
    loss = next_embedding_loss(predicted, embedded)
    rows = []
    for prediction, target in zip(predicted.detach().numpy(), embedded.numpy(), strict=True):
        for number in range(4):
            p, t = prediction[number], target[number + 1]
            rows.append(-(p @ t) / (np.linalg.norm(p) * np.linalg.norm(t)))
    assert loss.item() == pytest.approx(np.mean(rows), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert not gradient[:, -1].any() and gradient[:, :-1].abs().min() > 0
    following = torch.roll(embedded, -1, dims=1)
    assert next_embedding_loss(7 * following, embedded).item() == pytest.approx(-1)


def test_a_prediction_sees_no_later_patch(tmp_path: Path) -> None:
    task = tiny.task("nepa", tmp_path)
    task.prepare()
    network: NextPatchNetwork = task.base_model
    images = torch.randn(2, 3, 16, 16)
    changed = images.clone()
    changed[:, :, 4:8, 8:] += 1  # of 4 x 4 patches: 6 and 7
    with torch.no_grad():
        (before, _), (after, embedded) = (network([x]).prediction for x in (images, changed))
    differs = (before - after).abs().amax(dim=2) > 1e-6
    assert differs.tolist() == [[False] * 6 + [True] * 10] * 2
    patches = changed.unfold(2, 4, 4).unfold(3, 4, 4)  # (2, 3, 4, 4, 4, 4)
    convolution = network.backbone.patch_embed.proj
    by_hand = torch.einsum("bcijhw,echw->bije", patches, convolution.weight) + convolution.bias
    torch.testing.assert_close(embedded, by_hand.flatten(1, 2))
    task.close()


def test_targets_have_no_gradient(tmp_path: Path) -> None:
    task = tiny.task("nepa", tmp_path)
    task.prepare()
    images = torch.randn(2, 3, 16, 16, requires_grad=True)
    predicted, embedded = task.base_model([images]).prediction
    assert predicted.requires_grad and not embedded.requires_grad
    task.close()
