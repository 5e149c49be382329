"""EsViT against the figures of its authors' code, and its matches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from figures import draw
from minitask import predicted
from selftask.batch import Batch
from selftask.methods.esvit import EsViT, Predictions, nearest_regions
from selftask.models.network import PatchOutput

NUM_IMAGES, NUM_OUT, WIDTH, REGIONS, LOCAL_REGIONS = 3, 16, 8, 9, 4
# microsoft/esvit, two steps for seeds 0 and 500: loss, gradients of the
# scores of views and of regions, norms of the centers of both
PUBLISHED = {
    (0, 2): [
        (17.55473416644638, 1.590566892706895, 0.7655000760882184),
        (0.05134099761177614, 0.014871253772452585),
        (19.38778863454694, 1.6993362020334255, 0.7427931335880902),
        (0.055699709188429966, 0.019978862496584475),
    ],
    (500, 2): [
        (17.26906511241609, 1.7760338160104054, 0.7553528283489388),
        (0.06409447763605676, 0.01539496887402104),
        (18.980797115302487, 1.7265930023950764, 0.758273707773996),
        (0.06257348949289747, 0.02106723686910832),
    ],
}


def _views(rows: Tensor, num_local: int) -> list[Tensor]:
    """Rows of all regions, view by view and image by image, as (B, N, ...) of each view."""
    sizes = [REGIONS, REGIONS] + [LOCAL_REGIONS] * num_local
    views = rows.split([NUM_IMAGES * size for size in sizes])
    return [view.unflatten(0, (NUM_IMAGES, -1)) for view in views]


class FixedTeacher(nn.Module):
    """Returns the output of a teacher, and is never updated."""

    def __init__(self, output: Predictions) -> None:
        super().__init__()
        self.output = output

    def forward(self, views: list[Tensor]) -> PatchOutput:
        return predicted(self.output)

    def update(self, network: Any, *, momentum: float) -> None:
        assert momentum == 0.5


def _steps(seed: int, num_local: int) -> Iterator[tuple[float, ...]]:
    method = EsViT(EsViT.Config(out_dim=NUM_OUT)).double()
    views = 2 + num_local
    num_rows = NUM_IMAGES * (2 * REGIONS + num_local * LOCAL_REGIONS)
    for step in range(2):
        u = seed + 100 * step
        scores = draw(u, views * NUM_IMAGES, NUM_OUT).requires_grad_()
        of_regions = draw(u + 2, num_rows, NUM_OUT).requires_grad_()
        output = Predictions(
            scores.unflatten(0, (views, -1)),
            _views(of_regions, num_local),
            _views(draw(u + 4, num_rows, WIDTH), num_local),
        )
        num_seen = 2 * NUM_IMAGES * REGIONS
        teacher = Predictions(
            draw(u + 1, 2 * NUM_IMAGES, NUM_OUT, scale=0.3).unflatten(0, (2, -1)),
            _views(draw(u + 3, num_seen, NUM_OUT, scale=0.3), 0),
            _views(draw(u + 5, num_seen, WIDTH), 0),
        )
        method.teacher = FixedTeacher(teacher)
        method.teacher_temperature_at = lambda where: 0.04
        method.momentum_at = lambda where: 0.5
        images = [torch.zeros(NUM_IMAGES, 3, 4, 4)] * views
        batch = Batch(views={"main": images}, labels=None, index=None, key=None)
        task: Any = SimpleNamespace(
            last_batch=batch, where=0.0, train=True, base_model=None, should_log=False
        )
        method.on_forward(task)
        loss = sum(method(predicted(output), batch).values())
        gradients = torch.autograd.grad(loss, (scores, of_regions))
        yield (loss.item(), *(gradient.norm().item() for gradient in gradients))
        method.on_update(task)
        yield tuple(center.norm().item() for center in method.centers())


@pytest.mark.parametrize(("seed", "num_local"), PUBLISHED)
def test_two_steps_are_those_of_the_authors_code(seed: int, num_local: int) -> None:
    for actual, expected in zip(_steps(seed, num_local), PUBLISHED[seed, num_local], strict=True):
        assert actual == pytest.approx(expected, rel=1e-6)


def test_regions_match_by_cosine() -> None:
    cells, others = draw(0, 2, 3, 4), draw(1, 2, 5, 4)
    for image in range(2):
        for region, match in enumerate(nearest_regions(cells, others)[image].tolist()):
            cosines = [
                torch.cosine_similarity(cells[image, region], other, dim=0)
                for other in others[image]
            ]
            assert cosines[match] == max(cosines)


def test_chance_is_equal_probabilities() -> None:
    assert EsViT(EsViT.Config(out_dim=10)).chance_loss == pytest.approx(math.log(10))
