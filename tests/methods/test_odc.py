"""ODC against the figures of OpenSelfSup, and its clusters and weights by their definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from figures import draw
from minitask import NUM_IMAGES, MiniTask, loss_of
from selftask.errors import UserError
from selftask.methods.families.clustered_images import NO_CLUSTER
from selftask.methods.odc import ODC

SMALL = {"out_dim": 5, "hidden_dim": 7, "num_clusters": 4, "min_size": 2, "renew_every": 2}
# open-mmlab/OpenSelfSup, odc_memory.py for seeds 0 and 500, over three steps: norm of the
# centroids; then share of labels that changed, sum of label * (index + 1), norm of the centroids,
# norm of the sum of the memory's rows
START = [0.8002654314041138, 0.798379123210907]
STEPS = [
    [
        (0.5, 3018, 0.9204468131065369, 5.672028064727783),
        (0.4166666567325592, 2906, 1.0920628309249878, 5.424800872802734),
        (0.5833333134651184, 2830, 1.260154366493225, 6.371521949768066),
    ],
    [
        (0.9166666865348816, 3177, 1.0483436584472656, 9.676913261413574),
        (0.6666666865348816, 3513, 1.2849534749984741, 10.346749305725098),
        (0.5833333134651184, 3472, 1.3600995540618896, 9.51545524597168),
    ],
]
SIZES = [
    [[10, 6, 7, 10, 7, 8], [13, 4, 9, 8, 6, 8], [12, 6, 9, 6, 6, 9]],
    [[6, 6, 13, 8, 6, 9], [5, 4, 14, 7, 7, 11], [5, 6, 15, 6, 6, 10]],
]


class _Task:
    """What ``setup`` and ``on_update`` read of a task."""

    def __init__(self, num_images: int) -> None:
        self.data_module = type("Data", (), {"num_images": num_images})
        self.steps_done = 0


def _method(num_images: int, **config: Any) -> tuple[ODC, Any]:
    method, task = ODC(ODC.Config(**config)), _Task(num_images)
    method.setup(task)  # type: ignore[arg-type]
    return method.double(), task


@pytest.mark.parametrize("case", [0, 1])
def test_memory_labels_and_centroids_are_those_of_published_code(case: int) -> None:
    seed = 500 * case
    method, task = _method(48, out_dim=8, num_clusters=6, min_size=3, renew_every=1)
    method.memory.rows.copy_(F.normalize(draw(seed, 48, 8), dim=1)[:, None])
    method.labels.copy_(torch.arange(48) % 6)
    method.renew_centroids()
    assert method.centroids.norm().item() == pytest.approx(START[case], rel=1e-5)
    for step, (expected, sizes) in enumerate(zip(STEPS[case], SIZES[case], strict=True)):
        index = (5 * torch.arange(12) + step) % 48
        before = method.labels[index].clone()
        method.pending.append((index, draw(seed + 10 + step, 12, 8)[:, None]))
        method.on_update(task)
        method.replace_small_clusters(torch.Generator())
        labels = method.labels
        figures = (
            (labels[index] != before).double().mean().item(),
            (labels * torch.arange(1, 49)).sum().item(),
            method.centroids.norm().item(),
            method.memory.rows.sum(dim=0).norm().item(),
        )
        assert figures == pytest.approx(expected, rel=1e-5)  # float32 there
        assert method.sizes.tolist() == labels.bincount().tolist() == sizes


def test_centroids_are_means_and_are_renewed_every_few_steps() -> None:
    """A cluster without images keeps its centroid; images without a cluster do not count."""
    method, task = _method(24, out_dim=5, num_clusters=4, min_size=2, renew_every=3)
    rows = F.normalize(draw(0, 24, 5), dim=1)
    method.memory.rows.copy_(rows[:, None])
    method.labels.copy_(torch.arange(24) % 3)
    method.labels[5] = NO_CLUSTER
    method.centroids.copy_(draw(1, 4, 5))
    kept = method.centroids[3].clone()
    method.renew_centroids()
    for cluster in range(3):
        members = [i for i in range(24) if i % 3 == cluster and i != 5]
        torch.testing.assert_close(method.centroids[cluster], rows[members].mean(dim=0))
        assert method.sizes[cluster] == len(members)
    assert torch.equal(method.centroids[3], kept)
    assert method.sizes[3] == 0
    for step in range(3):
        before, task.steps_done = method.centroids.clone(), step
        method.pending.append((torch.arange(8) + step, draw(2 + step, 8, 1, 5)))
        method.on_update(task)
        assert torch.equal(before, method.centroids) == (step < 2)


def test_small_clusters_give_their_images_away_and_halve_the_largest() -> None:
    """Cluster 1 has two images of three; the largest has two groups, which become clusters."""
    method, _ = _method(24, out_dim=2, num_clusters=3, min_size=3)
    angles = torch.tensor([0.1] * 10 + [1.4] * 8 + [0.2] * 2 + [3.0] * 4).double()
    labels = torch.tensor([0] * 18 + [1] * 2 + [2] * 4)
    method.memory.rows.copy_(torch.stack([angles.cos(), angles.sin()], dim=1)[:, None])
    method.labels.copy_(labels)
    method.renew_centroids()
    method.replace_small_clusters(torch.Generator().manual_seed(0))
    near, far = int(method.labels[0]), int(method.labels[10])
    assert {near, far} == {0, 1}
    assert method.labels.tolist() == [near] * 10 + [far] * 8 + [near] * 2 + [2] * 4
    assert method.sizes[[near, far, 2]].tolist() == [12, 8, 4]
    expected = torch.stack([angles[10:18].cos(), angles[10:18].sin()]).mean(dim=1)
    torch.testing.assert_close(method.centroids[far], expected)


def _expected_loss(method: ODC, output: Tensor, index: Tensor) -> float:
    losses, weights = [], []
    for row, image in zip(output, index.tolist(), strict=True):
        label = int(method.labels[image])
        if label == NO_CLUSTER:
            continue
        scores = method.classifier.weight @ row + method.classifier.bias
        losses.append(-scores.log_softmax(dim=0)[label].item())
        weights.append(int((method.labels == label).sum()) ** -0.5)
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)


def test_losses_are_weighted_by_the_inverse_root_of_the_size() -> None:
    method: Any = MiniTask("odc", SMALL).run(1).loss
    assert len(method.sizes.unique()) > 1
    output, index = draw(0, 1, 5, 5), torch.tensor([20, 3, 11, 0, 7])
    expected = _expected_loss(method, output[0], index)
    assert loss_of(method, output, index=index).item() == pytest.approx(expected, rel=1e-12)
    method.labels[11] = NO_CLUSTER  # an image that was not read
    method.sizes.copy_(method.labels[method.labels >= 0].bincount(minlength=4))
    expected = _expected_loss(method, output[0], index)
    assert loss_of(method, output, index=index).item() == pytest.approx(expected, rel=1e-12)
    method.classifier.weight.data.zero_(), method.classifier.bias.data.zero_()
    equal = loss_of(method, output, index=index).item()
    assert equal == pytest.approx(math.log(4)) == method.chance_loss


def _without_norm() -> MiniTask:
    class WithoutNorm(ODC):
        def build_head(self, embed_dim: int) -> torch.nn.Module:
            return torch.nn.Linear(embed_dim, self.config.out_dim)

    return MiniTask(WithoutNorm, SMALL)


def test_an_image_is_in_the_cluster_of_the_nearest_centroid_after_its_step() -> None:
    task = _without_norm()
    task.run(1)
    method: Any = task.loss
    rows = method.memory.rows[:8, 0]  # the first batch
    assert torch.equal(method.labels[:8], (rows @ method.centroids.T).argmax(dim=1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_clusters": 30}, f"num_clusters=30: {NUM_IMAGES} images cannot make 30 clusters"),
        ({"min_size": 7}, f"min_size=7: {NUM_IMAGES} images cannot make 4 clusters of so many"),
    ],
)
def test_too_few_images_are_refused(config: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MiniTask("odc", {**SMALL, **config})
