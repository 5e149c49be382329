"""DetCon against the figures of its authors' code, its paper as loops, and known segments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from figures import draw
from minitask import TinyTokens
from selftask.batch import Draws
from selftask.errors import UserError
from selftask.methods.detcon import (
    RESOLUTION,
    RegionNetwork,
    region_contrast,
    sample_segments,
    segments_in_view,
)

# deepmind/detcon for seeds 0 and 500: loss, and its gradients for the predictions of both views
FIGURES = {
    (0, True): (7.644266942620922, 0.9291641573880761, 0.7462856740418045),
    (0, False): (7.186368125157234, 0.9342428108714042, 0.7817426677470978),
    (500, True): (8.77790941580229, 0.637140902852543, 0.6016339920981925),
    (500, False): (8.465054808426306, 0.6614382202170295, 0.621263555400745),
}


def _regions(seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Predictions and targets (3, 4, 8) of both views, and segment numbers (3, 4)."""
    first, second = ([draw(seed + n, 3, 4, 8) for n in pair] for pair in ((0, 1), (2, 3)))
    images, regions = torch.arange(3)[:, None], torch.arange(4)
    return first, second, [(step * regions + images) % 6 for step in (1, 2)]


def _of_both(
    prediction: list[Tensor], target: list[Tensor], ids: list[Tensor], *, local: bool
) -> Tensor:
    return sum(
        region_contrast(
            prediction[view],
            (target[view], target[1 - view]),
            (ids[view], ids[1 - view]),
            temperature=0.1,
            local_negatives=local,
        )
        for view in range(2)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(("seed", "local"), FIGURES)
def test_loss_is_that_of_the_authors_code(seed: int, local: bool) -> None:
    predictions, targets, ids = _regions(seed)
    predictions = [prediction.requires_grad_() for prediction in predictions]
    loss = _of_both(predictions, targets, ids, local=local)
    gradients = torch.autograd.grad(loss, predictions)
    actual = (loss.item(), *(gradient.norm().item() for gradient in gradients))
    assert actual == pytest.approx(FIGURES[seed, local], rel=1e-9)


def slow_loss(
    prediction: list[Any], target: list[Any], ids: list[list[list[int]]], temperature: float
) -> float:
    """The loss of the first view's regions, whose candidates are the regions of two views."""

    def similarity(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.hypot(*a) / math.hypot(*b) / temperature

    total, num_images, num_regions = 0.0, len(ids[0]), len(ids[0][0])
    for b in range(num_images):
        for m in range(num_regions):
            number, query = ids[0][b][m], prediction[b][m]
            candidates = [
                similarity(query, target[view][c][n])
                for view in range(2)
                for c in range(num_images)
                for n in range(num_regions)
                if view == 1 or c != b or ids[0][c][n] != number
            ]
            positives = [
                similarity(query, target[1][b][n])
                for n in range(num_regions)
                if ids[1][b][n] == number
            ]
            normalizer = math.log(math.fsum(map(math.exp, candidates)))
            if positives:
                mean = normalizer - math.fsum(positives) / len(positives)
                total += mean / ids[0][b].count(number)
    return total / num_images / num_regions


def test_loss_is_that_of_the_paper() -> None:
    """With segments sampled twice, and segments that the other view does not show."""
    predictions, targets, _ = _regions(70)
    ids = [
        torch.tensor(rows)
        for rows in (
            [[0, 0, 1, 2], [5, 5, 5, 5], [7, 8, 9, 9]],
            [[0, 2, 2, 3], [5, 1, 1, 0], [1, 2, 3, 4]],
        )
    ]
    targets_of = [target.tolist() for target in targets]
    expected = slow_loss(predictions[0].tolist(), targets_of, [x.tolist() for x in ids], 0.2)
    actual = region_contrast(
        predictions[0], (targets[0], targets[1]), (ids[0], ids[1]), temperature=0.2
    )
    assert actual.item() == pytest.approx(expected, rel=1e-12)


def test_regions_without_a_partner_have_no_gradient() -> None:
    (prediction, _), (own, other), _ = _regions(0)
    ids = torch.tensor([[0, 1, 2, 3]] * 3)
    there = torch.tensor([[0, 1, 4, 4]] * 3)
    prediction.requires_grad_()
    loss = region_contrast(prediction, (own, other), (ids, there), temperature=0.1)
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert not gradient[:, 2:].any()
    assert gradient[:, :2].any(dim=2).all()


def _view(left: float, top: float, right: float, bottom: float, *, flip: bool = False) -> Draws:
    """A view of a part of an image of 80 x 40 pixels."""
    across = [left - right, 0, right] if flip else [right - left, 0, left]
    return Draws(
        matrix=torch.tensor([[across, [0, bottom - top, top]]], dtype=torch.float32),
        image_size=torch.tensor([[40.0, 80.0]]),
        params={},
    )


def test_segments_of_a_view_are_cropped_and_flipped_with_it() -> None:
    segments = torch.arange(8).view(1, 2, 4)  # squares of 20 pixels
    half = RESOLUTION // 2
    crop = segments_in_view(segments, _view(20, 10, 60, 30, flip=True))  # of four of them
    squares = crop[0].unflatten(1, (2, half)).unflatten(0, (2, half))
    expected = torch.tensor([[2, 1], [6, 5]])
    assert torch.equal(squares, expected[:, None, :, None].expand(2, half, 2, half))
    beyond = segments_in_view(segments, _view(-40, -40, 0, 0))
    assert torch.equal(beyond, torch.zeros_like(beyond))


def test_segments_are_sampled_evenly_whatever_their_size() -> None:
    in_view = torch.full((1, RESOLUTION, RESOLUTION), 7)
    in_view[0, 0, :2] = torch.tensor([255, 3])
    numbers = torch.tensor([[0.0, 0.33, 0.34, 0.66, 0.67, 1 - 2.0**-24]])
    assert sample_segments(in_view, numbers).tolist() == [[3, 3, 7, 7, 255, 255]]


def test_features_of_a_region_are_the_mean_of_the_covered_cells() -> None:
    """3 x 3 cells; the mask covers the first column and the left half of the second."""
    network = RegionNetwork(TinyTokens(), nn.Identity()).double()
    image = draw(0, 1, 3, 9, 9)
    mask = torch.zeros(1, 1, 54, 54, dtype=torch.bool)
    mask[..., :27] = True
    (region,) = network(([image], [mask])).flatten(0, 2)
    cells = network.extract(image).tokens.map[0]  # (6, 3, 3)
    expected = (cells[:, :, 0].sum(dim=1) + 0.5 * cells[:, :, 1].sum(dim=1)) / 4.5
    assert torch.allclose(region, expected, rtol=1e-12)


def _with_masks(folder: Path, masks: Any) -> list[str]:
    """Write digits with segments; return the overrides that use them."""
    arrays = np.load(tiny.digits_file(folder))
    np.savez(folder / "masks.npz", **arrays, mask=masks)
    data = f"data={{name: array, path: {folder}/masks.npz, extras: [mask]}}"
    return [data, "method.masks=mask"]


def test_masks_of_the_data_are_the_segments(tmp_path: Path) -> None:
    """Image i has segment i alone, or i and 100 + i."""
    numbers = np.arange(80, dtype=np.uint8)
    masks = np.stack([numbers, numbers + 100 * (numbers % 2)], axis=1)[:, None]  # (80, 1, 2)
    task = tiny.task("detcon", tmp_path, "run", *_with_masks(tmp_path, masks))
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch = task.last_batch
    for index, ids in zip(batch.index.tolist(), batch["ids"].transpose(0, 1), strict=True):
        assert {*ids.flatten().tolist()} <= {*masks[index].flatten().tolist()}
    assert (batch["ids"] >= 100).any()
    assert not torch.equal(*batch["ids"]), "sampled for each view"
    for regions in batch.input[1]:  # of one view, (B, M, R, R)
        assert regions.flatten(2).any(dim=2).all(), "a region is in its view"
    task.close()


def test_masks_of_another_type_are_refused(tmp_path: Path) -> None:
    task = tiny.task("detcon", tmp_path, "run", *_with_masks(tmp_path, np.zeros((80, 4, 4))))
    task.prepare()
    task.on_start(), task.on_phase_start()
    with pytest.raises(UserError, match=r"'mask' of an image is torch.float64 of shape \(4, 4\)"):
        task.step()
    task.close()


def test_without_a_teacher_gradients_reach_both_views(tmp_path: Path) -> None:
    """DetCon-S: projections are their own targets, and there is no predictor."""
    task = tiny.task("detcon", tmp_path, "run", "method.teacher=false")
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, ids = task.last_batch, task.last_batch["ids"]
    output = batch.output.detach().double().requires_grad_()  # (2, B, M, D)
    (gradient,) = torch.autograd.grad(task.loss(output, batch), output)
    expected = 0.0
    for view in range(2):
        both, of_both = (output[view], output[1 - view]), (ids[view], ids[1 - view])
        expected += region_contrast(output[view], both, of_both, temperature=0.1)
    assert torch.allclose(gradient, torch.autograd.grad(expected, output)[0], rtol=1e-9)
    assert not hasattr(task.loss, "teacher")
    task.close()
