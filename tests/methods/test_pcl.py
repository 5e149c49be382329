"""PCL against its authors' figures and as loops, and its clusterings over a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from figures import draw
from minitask import MiniTask
from selftask.batch import Batch, total
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.methods.pcl import NO_CLUSTER, PCL, cluster_densities, prototype_loss

SMALL: dict[str, Any] = {
    "out_dim": 5,
    "hidden_dim": 7,
    "queue_size": 16,
    "momentum": 0.9,
    "num_prototypes": [3, 4],
    "warmup_epochs": 1,
}

# salesforce/PCL for seeds 0 and 500: loss, its terms, gradient of the query, sum of the queue
FIGURES = [
    [
        7.217038355320925,
        3.299172118722762,
        3.9178662365981634,
        1.1681719467601381,
        0.8535957899130255,
    ],
    [
        8.135312914632632,
        3.884430906868258,
        4.250882007764375,
        1.1242593800895673,
        -7.307818479140025,
    ],
]

# and the densities of ten clusters, of which the first has one image
DENSITIES = [
    [
        0.23523289539513464,
        0.15630191530874565,
        0.14308252436105018,
        0.22417048895159244,
        0.19918835967244028,
        0.23523289539513464,
        0.14473656149355535,
        0.2303186399440474,
        0.22667075284261676,
        0.20506496663568308,
    ],
    [
        0.2522867572120593,
        0.2522867572120593,
        0.14319869939404573,
        0.18791394808455764,
        0.23352424221282567,
        0.17810474727794917,
        0.21341195954039996,
        0.20378182789317853,
        0.14953478602782294,
        0.18595627514510188,
    ],
]


def _batch(index: Tensor, keys: Tensor) -> Batch:
    none = torch.empty(0, dtype=torch.int64)
    return Batch(views={}, labels=none, index=index, key=none, output=None, added={"keys": keys})


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors(case: int) -> None:
    """Their drawn negatives are all clusters that no image of the batch has."""
    seed, sizes = 500 * case, [10, 15]
    config = PCL.Config(out_dim=12, queue_size=16, num_prototypes=sizes)
    method = PCL(config).double()
    method.queue.rows.copy_(F.normalize(draw(seed + 90, 12, 16), dim=0).T)
    numbers = [torch.arange(size, dtype=torch.float64) for size in sizes]
    prototypes = [F.normalize(draw(seed + 2 + i, k, 12), dim=1) for i, k in enumerate(sizes)]
    method.prototypes.copy_(torch.cat(prototypes))
    method.densities.copy_(torch.cat([0.2 * (1 + 0.5 * number.cos()) for number in numbers]))
    method.assignments = torch.stack([torch.arange(60) % size for size in sizes])
    query, keys = draw(seed, 1, 4, 12).requires_grad_(), F.normalize(draw(seed + 1, 4, 12), dim=1)
    terms = method(query, _batch(2 * torch.arange(4), keys))
    (gradient,) = torch.autograd.grad(total(terms), query)
    method.queue.update(keys)
    computed = [x.item() for x in (total(terms), *terms.values(), gradient.norm())]
    assert [*computed, method.queue.rows.sum().item()] == pytest.approx(FIGURES[case], rel=1e-9)


@pytest.mark.parametrize("case", [0, 1])
def test_densities_are_those_of_the_authors(case: int) -> None:
    distances, clusters = draw(500 * case + 9, 60).abs(), torch.arange(60) % 10
    clusters[10::10] = 1
    densities = cluster_densities(distances, clusters, 10, mean=0.2)
    assert densities.tolist() == pytest.approx(DENSITIES[case], rel=1e-9)
    assert densities.mean().item() == pytest.approx(0.2)
    with_empty = cluster_densities(distances, clusters, 11, mean=0.2)
    assert with_empty[10] == with_empty.max()


def test_densities_of_equal_images_are_above_zero() -> None:
    clusters = torch.tensor([0, 0, 1, 1, 2, 2])
    alone = cluster_densities(torch.zeros(6), torch.arange(6), 6, mean=0.2)
    torch.testing.assert_close(alone, torch.full((6,), 0.2))
    distances = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 2.0])
    some = cluster_densities(distances, clusters, 3, mean=0.2)
    assert bool((some > 0).all()) and float(some.mean()) == pytest.approx(0.2)


def test_prototype_loss_is_that_of_the_paper() -> None:
    """The second half of eq. 11 as loops; an image without a cluster adds nothing."""
    query, prototypes = draw(1, 3, 5), F.normalize(draw(2, 4, 5), dim=1)
    densities, clusters = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), [2, 0]
    loss = 0.0
    for row, cluster in zip(query, clusters, strict=False):
        scores = [
            float(row @ prototype / row.norm() / density)
            for prototype, density in zip(prototypes, densities, strict=True)
        ]
        loss += (math.log(sum(map(math.exp, scores))) - scores[cluster]) / 3
    computed = prototype_loss(query, prototypes, densities, torch.tensor([*clusters, NO_CLUSTER]))
    assert computed.item() == pytest.approx(loss, rel=1e-12)


def test_clusters_come_after_the_warm_up_and_hold_for_an_epoch() -> None:
    task = MiniTask("pcl", SMALL).run(3)  # an epoch
    assert (task.loss.assignments == NO_CLUSTER).all()
    assert task.loss.chance_loss == pytest.approx(math.log(17))
    memory = task.loss.memory.rows.clone()
    task.run(1)
    assignments, prototypes = task.loss.assignments.clone(), task.loss.prototypes.split([3, 4])
    for clusters, centers, densities in zip(
        assignments, prototypes, task.loss.densities.split([3, 4]), strict=True
    ):
        assert torch.equal(clusters, (memory @ centers.T).argmax(dim=1))
        assert densities.mean().item() == pytest.approx(0.2)
    assert task.loss.chance_loss == pytest.approx(math.log(17) + math.log(12) / 2)
    batch = task.last_batch
    assert torch.allclose(task.loss.memory.rows[batch.index], batch["keys"], rtol=0, atol=1e-12)
    task.run(1)
    assert torch.equal(task.loss.assignments, assignments)


def test_images_that_were_never_read_have_no_cluster() -> None:
    task = MiniTask("pcl", SMALL).run(2)
    task.loss.cluster_memory(0, 0)
    assert (task.loss.assignments[:, :16] >= 0).all()
    assert (task.loss.assignments[:, 16:] == NO_CLUSTER).all()


def test_impossible_numbers_of_clusters_are_refused() -> None:
    with pytest.raises(UserError, match="24 images cannot make 25 clusters"):
        MiniTask("pcl", {**SMALL, "num_prototypes": [25]})
    with pytest.raises(ConfigError, match=r"num_prototypes: \[1\]; one number"):
        load_config("pcl", ["method.num_prototypes=[1]"])
    task = MiniTask("pcl", {**SMALL, "num_prototypes": [17]}).run(2)
    with pytest.raises(UserError, match="16 images that were read so far cannot make 17 clusters"):
        task.loss.cluster_memory(0, 0)
