"""CAPI against the figures of its authors' code, its paper as loops, and its network by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from figures import draw
from minitask import MiniTask, predicted
from selftask.batch import Batch
from selftask.config.config_class import config_class
from selftask.config.run_length import RunLength
from selftask.errors import UserError
from selftask.methods.capi import CAPI, cluster_scores
from selftask.methods.families.masked_patches import Kept
from selftask.models.backbones.vit import ViTMicro
from selftask.models.heads import UnitLength, WeightNormLinear
from selftask.models.predictors.cross_predictor import CrossPredictor
from selftask.optim.schedules import build_schedule
from selftask.registry import METHODS

# facebookresearch/capi, model.py:OnlineClustering: loss, assignments (norm, largest), gradients of
# weight and bias; position by position, and all positions together. It computes in float32.
CLUSTERING = {
    (0, True): (2.5735156536, 6.0863062922, 0.9999999847, 1.2015937782, 2.0010895126),
    (0, False): (2.6123645306, 6.3935024476, 0.9999999760, 1.3417561408, 2.5085388427),
    (500, True): (3.3871462345, 6.0427844234, 0.9999967629, 1.1886418302, 2.0006847257),
    (500, False): (2.0260121822, 6.4910024559, 0.9999999401, 1.2888933071, 2.1922842780),
}
# loss of a prediction by L2NormLinear; gradients of its input, and of the lengths of its rows
PREDICTION = {
    0: (5.5100655953, 0.4876412307, 1.5717853577),
    500: (4.6792619775, 0.4884382932, 1.2284139924),
}
MOMENTUM = {0: 1.0, 10: 0.999, 50: 0.9992808144266054, 99: 0.9998961448216775}

SMALL: dict[str, Any] = {
    "num_clusters": 5,
    "predicted": 0.5,
    "predictor_dim": 16,
    "predictor_depth": 2,
    "predictor_heads": 2,
}


def _method(weight: Tensor, bias: Tensor, **config: Any) -> CAPI:
    method = CAPI(CAPI.Config(num_clusters=len(weight), **config))
    method.clusters = nn.Linear(weight.shape[1], len(weight)).double()
    method.clusters.load_state_dict({"weight": weight, "bias": bias})
    return method


def _terms(method: CAPI, scores: Tensor, patches: Tensor) -> dict[str, Tensor]:
    """The loss of an image whose patches are all predicted."""
    images, positions = patches.shape[:2]
    mask = Kept(*[torch.arange(positions).expand(images, 1, -1)] * 2)
    none = torch.empty(0, dtype=torch.int64)
    added = {"patches": patches, "mask": mask}
    return method(
        predicted(scores), Batch(views={}, labels=none, index=none, key=none, added=added)
    )


def _vit(**args: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"img_size": 8, "patch_size": 2, "depth": 2, "pool": "avg", "class_token": False}
    return ViTMicro(**{**sizes, "positions": "rope_capi", "registers": 4, **args}).build()


def _task(backbone: Any = _vit, **config: Any) -> MiniTask:
    return MiniTask("capi", {**SMALL, **config}, backbone=backbone, sizes=(8,), lr=0.1)


# -- the loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "position_wise"), CLUSTERING)
def test_clustering_is_that_of_the_authors_code(seed: int, position_wise: bool) -> None:
    bias = draw(seed + 2, 10, scale=0.1)
    method = _method(draw(seed + 1, 10, 8), bias, position_wise=position_wise)
    patches = draw(seed, 4, 12, 8).transpose(0, 1)
    loss = _terms(method, torch.zeros(12, 4, 10).double(), patches)["clustering"]
    weights = method.clusters.weight, method.clusters.bias
    gradients = torch.autograd.grad(loss, weights)
    assigned = method.assign(cluster_scores(patches, *weights).detach())
    figures = loss, assigned.norm(), assigned.max(), *(x.norm() for x in gradients)
    expected = CLUSTERING[seed, position_wise]
    assert [x.item() for x in figures] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", PREDICTION)
def test_prediction_is_that_of_the_authors_code(seed: int) -> None:
    method = _method(draw(seed + 1, 10, 8), draw(seed + 2, 10, scale=0.1))
    layer = WeightNormLinear(8, 10, trained_length=True).double()
    layer.weight.data.copy_(draw(seed + 4, 10, 8))
    features = draw(seed + 3, 48, 8).requires_grad_()
    scores = layer(UnitLength()(features)).view(12, 4, 10)
    loss = _terms(method, scores, draw(seed, 4, 12, 8).transpose(0, 1))["cluster_prediction"]
    gradients = torch.autograd.grad(loss, [features, layer.length])
    figures = loss, *(x.norm() for x in gradients)
    assert [x.item() for x in figures] == pytest.approx(PREDICTION[seed], rel=1e-6)


def test_loss_is_that_of_the_paper() -> None:
    """Section 3: Sinkhorn-Knopp over images at each position, and cross-entropies, as loops."""
    images, positions, k = 6, 3, 4
    method = _method(draw(1, k, 5), draw(2, k, scale=0.1), target_temperature=0.5)
    patches, predictions = draw(3, images, positions, 5), draw(4, images, positions, k)
    unit = patches / patches.square().sum(dim=2, keepdim=True).sqrt()
    scores = (unit @ draw(1, k, 5).T + draw(2, k, scale=0.1)).tolist()
    expected = [0.0, 0.0]
    for position in range(positions):
        q = [[math.exp(s / 0.5) for s in scores[image][position]] for image in range(images)]
        for _ in range(3):
            columns = [sum(row[j] for row in q) for j in range(k)]
            q = [[row[j] / columns[j] for j in range(k)] for row in q]
            q = [[x / sum(row) for x in row] for row in q]
        for image in range(images):
            rows = scores[image][position], predictions[image, position].tolist()
            for term, row in enumerate(rows):
                log_sum = math.log(sum(math.exp(s / 0.12) for s in row))
                cross = sum(p * (s / 0.12 - log_sum) for p, s in zip(q[image], row, strict=True))
                expected[term] -= cross / images / positions
    terms = _terms(method, predictions, patches)
    actual = [terms[name].item() for name in ("clustering", "cluster_prediction")]
    assert actual == pytest.approx(expected, rel=1e-6)


def test_clusters_get_equal_shares_of_each_position() -> None:
    scores = draw(5, 20, 3, 4)
    shares = {
        position_wise: _method(draw(1, 4, 2), draw(2, 4), position_wise=position_wise)
        for position_wise in (True, False)
    }
    for position_wise, method in shares.items():
        method.config = CAPI.Config(
            position_wise=position_wise, sinkhorn_iterations=200, target_temperature=1.0
        )
        sums = method.assign(scores).sum(dim=0)  # (3, 4)
        assert torch.allclose(sums.sum(dim=0), torch.tensor(15.0).double(), atol=1e-4)
        assert torch.allclose(sums, torch.tensor(5.0).double(), atol=1e-4) == position_wise


def test_equal_scores_have_the_loss_at_chance() -> None:
    method = _method(torch.zeros(7, 3).double(), torch.zeros(7).double())
    terms = _terms(method, torch.ones(4, 2, 7).double(), draw(0, 4, 2, 3))
    assert sum(terms.values()).item() == pytest.approx(method.chance_loss, rel=1e-6)


def test_clusters_learn_from_one_term_and_the_network_from_the_other() -> None:
    task = _task()
    batch = task.forward(torch.arange(8))
    terms = task.loss(batch.output, batch)
    parts = [*task.loss.clusters.parameters()], [*task.base_model.head.parameters()]
    for name, part in zip(("cluster_prediction", "clustering"), parts, strict=True):
        gradients = torch.autograd.grad(terms[name], part, retain_graph=True, allow_unused=True)
        assert all(gradient is None for gradient in gradients)
    (rule,) = task.loss.group_rules()
    assert (rule.match, rule.lr, rule.weight_decay) == ("loss.clusters", 0.5, 0.01)


# -- the network -------------------------------------------------------------------------------


def _rotated(x: Tensor, at: tuple[float, float]) -> Tensor:
    """Features (F,) at (row, column): the first half turned by the row, the second by the column.

    Feature i is paired with i + F / 2, as in the authors' code.
    """
    half, quarter = len(x) // 2, len(x) // 4
    frequencies = [7 * 1e4 ** (-i / (quarter - 1)) for i in range(quarter)] * 2
    out = x.clone()
    for i, frequency in enumerate(frequencies):
        down, right = (2 * math.pi * frequency * place for place in at)
        out[i] = x[i] * math.cos(down) - x[i + half] * math.sin(down)
        out[i + half] = x[i + half] * math.cos(right) + x[i] * math.sin(right)
    return out


def _attended(part: Any, x: Tensor, at: Any, context: Tensor, context_at: list[Any]) -> Tensor:
    """Attention of one query (D,) as loops over heads and tokens; None: not rotated."""
    out = []
    for rows in (slice(0, 8), slice(8, 16)):  # two heads
        query = _rotated(part.query.weight[rows] @ x, at)
        keys = [part.key.weight[rows] @ token for token in context]
        keys = [
            key if place is None else _rotated(key, place)
            for key, place in zip(keys, context_at, strict=True)
        ]
        scores = torch.stack([query @ key for key in keys]) / math.sqrt(8)
        values = torch.stack([part.value.weight[rows] @ token for token in context])
        out.append(torch.softmax(scores, dim=0) @ values)
    return part.proj.weight @ torch.cat(out)


def _rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt()


def test_predictor_is_that_of_the_paper() -> None:
    """Blocks of cross-attention and MLP, one patch at a time; a prefix token has no position."""
    torch.manual_seed(0)
    predictor = CrossPredictor(6, (3, 3), dim=16, depth=2, num_heads=2, num_registers=4).double()
    predictor.rope.angular = predictor.rope.angular.double()
    encoded, keep, predict = draw(1, 1, 8, 6), torch.tensor([[4, 5, 8]]), torch.tensor([[0, 7]])
    corners = [(0.5, 0.5), (1.0, 0.5), (1.0, 1.0), (0.5, 1.0)]
    context_at = [None, *corners, (0.5, 0.5), (0.5, 1.0), (1.0, 1.0)]
    actual = predictor(encoded, keep, predict, (3, 3))
    for number, at in enumerate([(0.0, 0.0), (1.0, 0.5)]):
        x = predictor.mask_token
        for block in predictor.blocks:
            x = x + _attended(block.attn, _rms(x), at, encoded[0], context_at)
            x = x + block.mlp[2].weight @ nn.functional.gelu(block.mlp[0].weight @ _rms(x))
        assert torch.allclose(actual[0, number], _rms(x), rtol=0, atol=1e-5)


def test_a_prediction_does_not_depend_on_others_nor_on_hidden_patches() -> None:
    task = _task()
    images = task.views[0][:4].clone().requires_grad_()
    batch = task.forward(torch.arange(4), images)
    mask = batch["mask"]
    assert mask.keep.shape == (4, 6) and mask.predict.shape == (4, 1, 5)
    batch.output.prediction.sum().backward()
    seen = images.grad.abs().unfold(2, 2, 2).unfold(3, 2, 2).sum(dim=(1, 4, 5)).flatten(1) > 0
    assert torch.equal(seen, torch.zeros(4, 16, dtype=torch.bool).scatter(1, mask.keep, True))
    assert not seen.gather(1, mask.predict[:, 0]).any()
    fewer = task.base_model((images, Kept(mask.keep, mask.predict[:, :, 3:])))
    assert torch.allclose(fewer.prediction, batch.output.prediction[:, 3:], rtol=0, atol=1e-12)


def test_any_hidden_patch_may_be_predicted() -> None:
    """A quarter of eight hidden patches, drawn for each image, wherever they are."""
    key = torch.stack([torch.arange(4000), torch.zeros(4000, dtype=torch.long)], dim=1)
    method = CAPI(CAPI.Config(num_clusters=2, mask_ratio=0.5, predicted=0.25))
    mask = method.draw_mask(3, key, (4, 4))
    assert mask.predict.shape == (4000, 1, 2)
    predict, kept = (
        torch.zeros(4000, 16).scatter(1, index, 1) for index in (mask.predict[:, 0], mask.keep)
    )
    assert not (predict * kept).any() and (predict.sum(dim=1) == 2).all()
    assert ((predict.sum(dim=0) / (1 - kept).sum(dim=0) - 0.25).abs() < 0.05).all()


def test_registers_of_the_backbone_have_positions_in_the_predictor() -> None:
    assert _task().base_model.head.num_registers == 4
    learned = _task(lambda: _vit(positions="learned", class_token=True))
    assert learned.base_model.head.num_registers == 0
    assert learned.forward(torch.arange(4)).output.prediction.isfinite().all()


def test_teacher_sees_whole_images_and_its_momentum_is_that_of_the_authors_code() -> None:
    task = _task(momentum=0.9)
    batch = task.forward(torch.arange(4))
    teacher = task.loss.teacher.network.backbone
    assert torch.equal(batch["patches"], teacher.forward_features(batch.all_views[0])[:, 4:])
    assert task.loss.export_backbone(task.base_model) is teacher
    length = RunLength(num_samples=800, batch_size=8, accumulate=1, epochs=1)
    momentum = build_schedule(CAPI.Config().momentum, length)
    actual = {step: momentum(step / 100) for step in MOMENTUM}
    assert actual == pytest.approx(MOMENTUM, abs=1e-9)


def test_capi_training_lowers_the_loss() -> None:
    losses = _task(momentum=0.99).run(9).losses
    assert losses[-1] < losses[0]
    assert all(math.isfinite(loss) for loss in losses)


def test_impossible_configs_are_refused() -> None:
    schema: Any = config_class(METHODS, "capi")
    config = schema(predictor_dim=24, predictor_heads=4)
    assert [*config.problems({"backbone": {"pool": "token"}})] == [
        "backbone.pool: capi trains patches, not the class token; use pool: avg",
        "predictor_dim: 24 must be divisible by 4 (its positions) times predictor_heads=4",
    ]
    with pytest.raises(UserError, match=r"mask_ratio=0.05 hides 0 of the 16 patches"):
        _task(mask_ratio=0.05)
