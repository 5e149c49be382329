"""PixPro against the figures of its authors' code, and the pairs of flipped and distant views."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from figures import draw
from minitask import loss_of, predicted
from selftask.batch import Draws
from selftask.methods.pixpro import PixPro, cell_regression_loss, close_cells, propagate

# zdaxie/PixPro for seeds 0 and 500: loss and its gradient; norm and sum of the propagated cells,
# gradient of their product with fixed numbers
LOSS = {
    0: (0.027060793885789674, 0.0433618700522723),
    500: (-0.014083934907421795, 0.04531973426688778),
}
PROPAGATED = {
    0: (13.26135278219832, -22.49222930858425, 14.751912263994459),
    500: (13.449339794719258, -7.168027900950035, 14.179268491764956),
}


def _crops(boxes: list[tuple[float, float, float, float]], flip: bool = False) -> Draws:
    """Views that show boxes (left, top, right, bottom) of their images."""
    rows = []
    for left, top, right, bottom in boxes:
        across = [left - right, 0, right] if flip else [right - left, 0, left]
        rows.append([across, [0, bottom - top, top]])
    return Draws(
        matrix=torch.tensor(rows, dtype=torch.float32),
        image_size=torch.full((len(boxes), 2), 200.0),
        params={},
    )


def _cells(seed: int) -> Tensor:
    """Draws of maps (6, 12, 4, 4), as cells (6, 16, 12)."""
    return draw(seed, 6, 12, 4, 4).flatten(2).mT.contiguous()


@pytest.mark.parametrize("seed", LOSS)
def test_loss_is_that_of_the_authors_code(seed: int) -> None:
    first = _crops([(10 * i, 5, 10 * i + 60, 85) for i in range(6)])
    second = _crops([(10 * i + 20, 15, 10 * i + 100, 95) for i in range(6)])
    pairs = close_cells(first, second, (4, 4), max_distance=0.7)
    prediction = _cells(seed + 5).requires_grad_()
    loss = cell_regression_loss(prediction, _cells(seed + 6), pairs)
    (gradient,) = torch.autograd.grad(loss, prediction)
    actual = (loss.item(), gradient.norm().item())
    assert actual == pytest.approx(LOSS[seed], rel=1e-6)  # numbers of pairs are float32 there


@pytest.mark.parametrize("seed", PROPAGATED)
def test_propagation_is_that_of_the_authors_code(seed: int) -> None:
    cells = _cells(seed + 7).requires_grad_()
    output = propagate(cells, cells, sharpness=2.0)
    (gradient,) = torch.autograd.grad((output * _cells(seed + 8)).sum(), cells)
    actual = (output.norm().item(), output.sum().item(), gradient.norm().item())
    assert actual == pytest.approx(PROPAGATED[seed], rel=1e-9)


def test_pairs_are_cells_that_show_the_same_point() -> None:
    """The same crop twice, one of them flipped: each cell and its mirror image."""
    box = [(10.0, 20.0, 90.0, 60.0)]
    pairs = close_cells(_crops(box), _crops(box, flip=True), (2, 3), max_distance=0.5)
    mirror = torch.tensor([2, 1, 0, 5, 4, 3])
    assert torch.equal(pairs[0], torch.eye(6, dtype=torch.bool)[mirror])


def test_views_apart_have_no_pairs_and_no_gradient() -> None:
    near, far = _crops([(0, 0, 20, 20)]), _crops([(150, 150, 200, 200)])
    pairs = close_cells(near, far, (2, 2), max_distance=0.7)
    prediction = draw(0, 1, 4, 3).requires_grad_()
    loss = cell_regression_loss(prediction, draw(1, 1, 4, 3), pairs)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, prediction)[0].any()


def test_equal_cells_reach_the_floor() -> None:
    """Predictions in the direction of their targets: -2."""
    cells = draw(0, 2, 4, 3)
    pairs = torch.eye(4, dtype=torch.bool).expand(2, 4, 4)
    assert cell_regression_loss(3 * cells, cells, pairs).item() == pytest.approx(-2, abs=1e-5)


def test_both_views_predict_the_cells_of_the_other_view() -> None:
    """Pairs are of first (row) and second view (column); the limit is of the larger cell."""
    small, large = _crops([(0, 0, 40, 30)]), _crops([(10, 0, 130, 90)])
    wide = 0.7 * math.hypot(120 / 3, 90 / 2)
    pairs = close_cells(small, large, (2, 3), max_distance=0.7)[0]
    centers = [
        [(x + w * (c + 0.5) / 3, h * (r + 0.5) / 2) for r in range(2) for c in range(3)]
        for x, w, h in ((0, 40, 30), (10, 120, 90))
    ]
    expected = [[math.dist(a, b) < wide for b in centers[1]] for a in centers[0]]
    assert pairs.tolist() == expected
    assert torch.equal(close_cells(large, small, (2, 3), max_distance=0.7)[0], pairs.T)
    assert not torch.equal(pairs, pairs.T)
    prediction, target = draw(1, 2, 1, 6, 4), draw(2, 2, 1, 6, 4)
    means = []
    for view in (0, 1):
        cosines = [
            torch.cosine_similarity(prediction[view, 0, cells[view]], target[1 - view, 0, other], 0)
            for cells in pairs.nonzero().tolist()
            for other in [cells[1 - view]]
        ]
        means.append(sum(c.item() for c in cosines) / len(cosines))
    method = PixPro(PixPro.Config())
    loss = loss_of(method, predicted(prediction), cells=target, pairs=pairs[None])
    assert loss.item() == pytest.approx(-2 * sum(means), rel=1e-6)
