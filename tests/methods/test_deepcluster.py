"""DeepCluster v2 against its paper and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minitask import NUM_IMAGES, MiniTask, largest_difference, loss_of
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.methods.deepcluster import NO_CLUSTER, DeepCluster

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7, "norm": False, "num_prototypes": [4, 6]}


def _random(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draws)


def _features(task: MiniTask) -> Tensor:
    """What the network makes of all images now: (24, 2, 5) on the unit sphere."""
    with torch.no_grad():
        output = task.base_model(task.batch(torch.arange(NUM_IMAGES)).input[:2])
    return F.normalize(output, dim=2).transpose(0, 1)


def _paper_loss(output: Tensor, index: Tensor, method: DeepCluster) -> float:
    """Cross-entropy of every view with its image's cluster, head by head, as loops."""
    by_head = []
    for head, prototypes in enumerate(method.prototypes.split(method.config.num_prototypes)):
        terms = []
        for view in output:
            for row, image in zip(F.normalize(view, dim=1), index.tolist(), strict=True):
                cluster = int(method.assignments[head, image])
                if cluster == NO_CLUSTER:
                    continue
                scores = [float(row @ p) / method.config.temperature for p in prototypes]
                terms.append(math.log(sum(math.exp(s) for s in scores)) - scores[cluster])
        by_head.append(sum(terms) / len(terms))
    return sum(by_head) / len(by_head)


@pytest.mark.parametrize("num_views", [2, 5])
def test_loss_is_that_of_the_paper(num_views: int) -> None:
    method = MiniTask("deepcluster", SMALL).run(1).loss
    output, index = _random(num_views, 3, 5), torch.tensor([20, 3, 11])
    expected = _paper_loss(output, index, method)
    assert loss_of(method, output, index=index).item() == pytest.approx(expected, rel=1e-12)
    method.assignments[:, 3] = NO_CLUSTER  # an image that the first pass could not read
    assert loss_of(method, output, index=index).item() != pytest.approx(expected)
    expected = 2 / 3 * _paper_loss(output, index, method)  # two of three images have a cluster
    assert loss_of(method, output, index=index).item() == pytest.approx(expected, rel=1e-12)
    parts = [loss_of(method, output[:, i : i + 1], index=index[i : i + 1]) for i in range(3)]
    assert sum(parts).item() / 3 == pytest.approx(expected, rel=1e-12), "as on three ranks"


def test_perfect_agreement_costs_nothing_and_ignorance_costs_chance() -> None:
    method = MiniTask("deepcluster", {**SMALL, "temperature": 1e-3}).run(1).loss
    index = torch.arange(4)
    method.prototypes.copy_(torch.eye(5).repeat(2, 1))
    method.assignments[:, :4] = torch.arange(4)
    at_their_own = torch.eye(5, dtype=torch.float64)[:4].expand(2, 4, 5)
    method.assignments[1, :4] = (torch.arange(4) + 1) % 5  # head 1 begins at the last unit vector
    method.prototypes[4:] = torch.eye(5, dtype=torch.float64).roll(1, dims=0)[[0, 1, 2, 3, 4, 0]]
    method.prototypes[9] = -1.0
    assert loss_of(method, at_their_own, index=index).item() == pytest.approx(0.0, abs=1e-6)
    method.prototypes.zero_()
    assert loss_of(method, at_their_own, index=index).item() == pytest.approx(method.chance_loss)
    assert method.chance_loss == pytest.approx((math.log(4) + math.log(6)) / 2)


def test_autocast_rounds_nothing() -> None:
    method = MiniTask("deepcluster", SMALL).run(1).loss.float()
    index, output = torch.arange(3), _random(2, 3, 5).float()
    plain = loss_of(method, output, index=index)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(method, output, index=index).item() == plain.item()


def test_the_first_memory_holds_every_image() -> None:
    task = MiniTask("deepcluster", SMALL, batch_size=9, sizes=(8, 8, 6))  # of 24, 6 are left out
    expected, modes = _features(task), []
    handle = task.base_model.register_forward_pre_hook(lambda net, x: modes.append(net.training))
    task.loss.on_phase_start(task)
    handle.remove()
    assert not any(modes) and len(modes) == 5, "its last batch may have one image"
    assert torch.allclose(task.loss.memory.rows, expected, atol=1e-12)
    assert (task.loss.assignments != NO_CLUSTER).all()
    assert task.base_model.training


def test_prototypes_are_the_centroids_of_one_view_each() -> None:
    task = MiniTask("deepcluster", SMALL)
    task.loss.on_phase_start(task)
    method = task.loss
    for head, prototypes in enumerate(method.prototypes.split(method.config.num_prototypes)):
        memory = method.memory.rows[:, head % 2]
        assert torch.equal((memory @ prototypes.T).argmax(dim=1), method.assignments[head])
        for k, prototype in enumerate(prototypes):
            mean = memory[method.assignments[head] == k].mean(dim=0)
            assert torch.allclose(F.normalize(mean, dim=0), prototype, atol=1e-6)
    assert 0 < float(task.logged["largest_cluster"]) < 1


def test_steps_replace_the_memory_of_their_images_only() -> None:
    task = MiniTask("deepcluster", SMALL)
    before = _features(task)
    task.run(1)  # sees images 0 to 7, with the first weights
    assert torch.allclose(task.loss.memory.rows, before, atol=1e-12)
    second = _features(task)[8:16]
    task.run(1)
    assert torch.allclose(task.loss.memory.rows[8:16], second, atol=1e-12)
    assert not torch.allclose(second, before[8:16], atol=1e-4)
    rest = [*range(8), *range(16, 24)]
    assert torch.allclose(task.loss.memory.rows[rest], before[rest], atol=1e-12)


def test_clusters_change_between_epochs_only() -> None:
    task = MiniTask("deepcluster", SMALL).run(1)
    first = task.loss.prototypes.clone()
    task.run(1).run(1)  # each call is a phase taken up in its middle
    assert torch.equal(task.loss.prototypes, first)
    task.run(1)
    assert not torch.equal(task.loss.prototypes, first)


def test_clusters_are_a_function_of_seed_and_epoch() -> None:
    method = MiniTask("deepcluster", {**SMALL, "kmeans_iterations": 0}).run(1).loss

    def prototypes(seed: int, epoch: int) -> Tensor:
        torch.manual_seed(seed + 17 * epoch)  # the global generator has no part in it
        method.cluster_memory(seed, epoch)
        return method.prototypes.clone()

    first = prototypes(0, 3)
    others = [prototypes(0, 4), prototypes(1, 3)]
    assert all(not torch.equal(first, other) for other in others)
    torch.manual_seed(5)
    assert torch.equal(first, prototypes(0, 3))
    state = torch.get_rng_state()
    method.cluster_memory(0, 3)
    assert torch.equal(state, torch.get_rng_state())


def test_unreadable_images_are_left_out_of_the_clustering() -> None:
    task = MiniTask("deepcluster", SMALL)
    read = torch.tensor([image for image in range(NUM_IMAGES) if image != 5])
    task.data_module.iterate_all = lambda: iter([task.batch(read)])
    method = task.run(1).loss
    method.fill_memory(task)
    assert not method.memory.rows[5].any()
    method.assignments.fill_(NO_CLUSTER)
    method.cluster_memory(0, 1)
    readable = torch.arange(NUM_IMAGES) != 5
    assert (method.assignments[:, 5] == NO_CLUSTER).all()
    assert (method.assignments[:, readable] != NO_CLUSTER).all()
    assert torch.allclose(method.prototypes.norm(dim=1), torch.ones(10, dtype=torch.float64))


def test_accumulated_batches_all_enter_the_memory() -> None:
    whole = MiniTask("deepcluster", SMALL, batch_size=12).run(2)
    parts = MiniTask("deepcluster", SMALL, batch_size=6, accumulate=2).run(2)
    assert not parts.loss.pending
    assert largest_difference(whole.loss.state_dict(), parts.loss.state_dict()) < 1e-12
    assert largest_difference(whole.grads, parts.grads) < 1e-12


def test_more_clusters_than_images_are_refused() -> None:
    with pytest.raises(UserError, match="24 images cannot make 25 clusters"):
        MiniTask("deepcluster", {**SMALL, "num_prototypes": [4, 25]})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.num_prototypes=[]", "one number for each clustering"),
        ("method.num_prototypes=[100,1]", "at least 2 each"),
    ],
)
def test_impossible_configs_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("deepcluster", [override])
