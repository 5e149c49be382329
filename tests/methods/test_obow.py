"""OBoW against the figures of its authors' code and its paper as loops; words and vocabularies."""

from __future__ import annotations

import math

import pytest
import torch
import torchvision
from torch import Tensor, nn

from figures import draw
from minitask import MiniTask, loss_of
from selftask.batch import Batch
from selftask.errors import UserError
from selftask.methods.obow import (
    OBoW,
    bag_divergence,
    bag_of_words,
    inner_cells,
    local_average,
    squared_distances,
)
from selftask.models.backbones.small_resnet import SmallResNet
from selftask.models.feature_queue import FeatureQueue

# valeoai/obow for seeds 0 and 500: bags (norm, sum of squares of the first), running mean of the
# smallest distances after one batch, vocabulary after it, loss and gradient of the scores
PUBLISHED = {
    0: (
        (0.741761507492548, 0.09534188673366013),
        0.5923081470721393,
        10.151068061372655,
        (1.3254894515781257, 0.12973259340134105),
    ),
    500: (
        (0.802401441976903, 0.08338510288818496),
        0.6038477783889992,
        10.44450465976105,
        (1.2478501127345265, 0.1379244671867116),
    ),
}
SMALL = {"num_words": 10, "levels": 3}


@pytest.mark.parametrize("seed", PUBLISHED)
def test_bags_words_and_loss_are_those_of_the_authors_code(seed: int) -> None:
    bag_figures, distance, words, loss_figures = PUBLISHED[seed]
    cells = inner_cells(draw(seed + 9, 6, 12, 6, 6))
    vocabulary = FeatureQueue(24, 12).double()
    vocabulary.rows.copy_(draw(seed + 10, 24, 12).clamp(min=0))
    distances = squared_distances(cells.flatten(2).mT, vocabulary.rows)
    mean = 0.99 * 0.5 + 0.01 * distances.amin(dim=2).mean()
    assert mean.item() == pytest.approx(distance, rel=1e-9)
    bags = bag_of_words(15 * distances / mean)
    assert (bags.norm().item(), bags[0].square().sum().item()) == pytest.approx(
        bag_figures, rel=1e-9
    )
    scores = draw(seed + 11, 1, 6, 24).requires_grad_()
    loss = bag_divergence(scores, bags)
    (grad,) = torch.autograd.grad(loss, scores)
    assert (loss.item(), grad.norm().item()) == pytest.approx(loss_figures, rel=1e-9)
    vocabulary.update(cells.mean(dim=(2, 3)))
    assert vocabulary.rows.norm().item() == pytest.approx(words, rel=1e-9)


def test_a_bag_is_the_formula_of_the_paper() -> None:
    """Section 3.2: soft assignment of each cell, the largest of all cells, sum 1."""
    cells, words, delta = draw(0, 2, 4, 3), draw(1, 5, 3), 0.7
    bags = bag_of_words(squared_distances(cells, words) / delta)
    for image in range(2):
        counts = [0.0] * 5
        for cell in cells[image]:
            kernel = [math.exp(-float((cell - word).square().sum()) / delta) for word in words]
            counts = [max(c, k / sum(kernel)) for c, k in zip(counts, kernel, strict=True)]
        expected = [count / sum(counts) for count in counts]
        assert bags[image].tolist() == pytest.approx(expected, rel=1e-9)


def test_the_new_word_is_a_mean_of_nine_neighbors() -> None:
    cells = draw(0, 3, 2, 4, 5)  # 2 x 3 neighborhoods
    position = torch.tensor([0.0, 0.51, 0.999])
    expected = [cells[0, :, :3, :3], cells[1, :, 1:, :3], cells[2, :, 1:, 2:]]
    for word, neighbors in zip(local_average(cells, position), expected, strict=True):
        assert word.tolist() == pytest.approx(neighbors.mean(dim=(1, 2)).tolist(), rel=1e-12)


def test_the_border_of_small_maps_is_kept() -> None:
    assert inner_cells(torch.zeros(1, 1, 3, 4)).shape[2:] == (1, 2)
    assert inner_cells(torch.zeros(1, 1, 2, 4)).shape[2:] == (2, 4)
    word = local_average(draw(0, 1, 2, 2, 2), torch.tensor([0.9]))
    assert word.tolist() == [pytest.approx(draw(0, 1, 2, 2, 2).mean(dim=(2, 3))[0].tolist())]


def _task() -> MiniTask:
    return MiniTask("obow", SMALL, backbone=lambda: SmallResNet(4, blocks=1, stem_stride=1))


def test_the_loss_is_that_of_each_word_and_level() -> None:
    method = _task().loss
    output = draw(0, 3, 3, 16)
    bags = [draw(1 + level, 3, 10).softmax(dim=1) for level in range(3)]
    terms = torch.zeros(3, dtype=torch.float64)  # of each view
    for level, bag in enumerate(bags):
        weight = _generated(method.generators[level], method.vocabularies[level].rows)
        probs = (8 * torch.einsum("vbe,ke->vbk", output, weight)).exp()
        probs = probs / probs.sum(dim=2, keepdim=True)
        terms += (bag * (bag / probs).log()).sum(dim=(1, 2)) / 3 / 3
    for by_size, expected in [
        ([[0, 1, 2]], terms.mean()),
        ([[0, 2], [1]], (terms[0] + terms[2]) / 2 + terms[1]),  # builder_obow.py adds sizes
    ]:
        loss = loss_of(method, output, bags=bags, by_size=by_size)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9)


def test_views_of_one_size_share_a_mean() -> None:
    batch = Batch(
        views={"all": [torch.zeros(2, 3, size, size) for size in (8, 6, 4, 6, 4)]},
        labels=torch.zeros(2),
        index=torch.zeros(2),
        key=torch.zeros(2, 2),
    )
    task = _task()
    task.loss.prepare_batch(batch, task)
    assert batch["by_size"] == [[0, 2], [1, 3]]
    assert len(batch.input) == 4


def _generated(generator: nn.Module, words: Tensor) -> Tensor:
    """Section 3.4 for an MLP of two layers with BatchNorm over the words."""
    first, norm, _, last = generator[1]  # type: ignore[index]
    hidden = words / words.norm(dim=1, keepdim=True) @ first.weight.T + first.bias
    centered = hidden - hidden.mean(dim=0)
    hidden = centered / (centered.square().mean(dim=0) + 1e-5).sqrt() * norm.weight + norm.bias
    out = hidden.clamp(min=0) @ last.weight.T + last.bias
    return out / out.norm(dim=1, keepdim=True)


def test_the_loss_of_a_perfect_prediction_and_of_equal_scores() -> None:
    bags = draw(0, 3, 5).softmax(dim=1)
    assert bag_divergence(bags.log().expand(2, 3, 5), bags).item() == pytest.approx(0, abs=1e-12)
    single = torch.eye(5, dtype=torch.float64)[:3]  # one word in each image
    loss = bag_divergence(torch.zeros(2, 3, 5, dtype=torch.float64), single)
    assert loss.item() == pytest.approx(math.log(5), rel=1e-12)


def test_a_step_replaces_the_oldest_words_and_moves_the_distances() -> None:
    """The coarsest map has one cell, which is the pooled feature and the new word."""
    task = _task()
    method: OBoW = task.loss
    before = [vocabulary.rows.clone() for vocabulary in method.vocabularies]
    assert all((rows >= 0).all() for rows in before)
    features = task.base_model.backbone(task.views[0][:8]).detach()
    task.run(1)
    for rows, vocabulary in zip(before, method.vocabularies, strict=True):
        assert (vocabulary.rows[:8] != rows[:8]).any(dim=1).all()
        assert torch.equal(vocabulary.rows[8:], rows[8:])
    assert torch.allclose(method.vocabularies[0].rows[:8], features, rtol=1e-9, atol=0)
    smallest = torch.cdist(features, before[0]).amin(dim=1).square().mean()
    expected = 0.99 * 0.5 + 0.01 * smallest.item()
    assert method.distances[0].item() == pytest.approx(expected, rel=1e-9)
    distances = squared_distances(features[:, None], before[0])
    bags = bag_of_words(15 * distances / expected)  # the running mean includes this batch
    torch.testing.assert_close(task.last_batch["bags"][0], bags, rtol=1e-9, atol=1e-12)


def test_backbones_without_known_maps_are_refused() -> None:
    with pytest.raises(UserError, match="does not know the feature maps of a MobileNetV3"):
        OBoW.check_backbone(torchvision.models.mobilenet_v3_small())
