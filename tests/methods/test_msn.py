"""MSN and PMSN: figures of the authors, equations as loops, lightly, and two ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

import tiny
from minitask import MiniTask, largest_difference, predicted
from ranks import run_ranks
from selftask.batch import Batch, total
from selftask.config.load import load_config
from selftask.config.schema import FrozenModule
from selftask.distributed.collectives import all_reduce_mean
from selftask.errors import ConfigError
from selftask.methods.msn import MSN
from selftask.models.weights.trained import open_scores
from selftask.train_steps.grad_cache import GradCache

NONE = torch.empty(0, dtype=torch.int64)
SMALL: dict[str, Any] = {"out_dim": 4, "hidden_dim": 7, "num_prototypes": 5, "momentum": 0.9}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def method_of(**config: Any) -> MSN:
    method = MSN(MSN.Config(**{**SMALL, **config}))
    with torch.no_grad():
        method.prototypes.weight.copy_(draw(9, *method.prototypes.weight.shape))
    return method


def loss_terms(method: MSN, output: Tensor, features: Tensor) -> dict[str, Tensor]:
    added = {"targets": method.targets(features)}
    batch = Batch(views={}, labels=NONE, index=NONE, key=NONE, added=added)
    return method(predicted(output), batch)


# -- the loss --------------------------------------------------------------------------------------


def probabilities(feature: list[float], prototypes: list[list[float]], tau: float) -> list[float]:
    """Eq. 1: softmax of cosines."""

    def cosine(row: list[float]) -> float:
        lengths = math.sqrt(sum(x * x for x in feature) * sum(y * y for y in row))
        return sum(x * y for x, y in zip(feature, row, strict=True)) / lengths

    exps = [math.exp(cosine(row) / tau) for row in prototypes]
    return [e / sum(exps) for e in exps]


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 2: mean cross-entropy of sharpened targets, and the entropy of the mean prediction."""
    method = method_of(sinkhorn_iterations=0, me_max_weight=0.7, temperature=0.2, sharpening=0.5)
    output, features = draw(0, 3, 6, 4), draw(1, 6, 4)
    prototypes = method.prototypes.weight.tolist()
    targets = []
    for feature in features.tolist():
        sharp = [p ** (1 / 0.5) for p in probabilities(feature, prototypes, 0.2)]
        targets.append([p / sum(sharp) for p in sharp])
    predictions = [
        [probabilities(feature, prototypes, 0.2) for feature in view] for view in output.tolist()
    ]
    cross = [
        -sum(t * math.log(p) for t, p in zip(targets[b], view[b], strict=True))
        for view in predictions
        for b in range(6)
    ]
    mean = [sum(view[b][k] for view in predictions for b in range(6)) / 18 for k in range(5)]
    entropy = -sum(p * math.log(p) for p in mean)
    terms = loss_terms(method, output, features)
    assert terms["cross_entropy"].item() == pytest.approx(sum(cross) / 18, rel=1e-12)
    assert terms["me_max"].item() == pytest.approx(0.7 * (math.log(5) - entropy), rel=1e-10)


def test_loss_and_gradients_are_those_of_lightly_with_sinkhorn() -> None:
    """They divide and take powers of probabilities, as the published code does."""
    theirs = pytest.importorskip("lightly.loss").MSNLoss(temperature=0.1, sinkhorn_iterations=3)
    method = method_of()
    prototypes = method.prototypes.weight
    output, features = draw(0, 3, 6, 4).requires_grad_(), draw(1, 6, 4)
    ours = total(loss_terms(method, output, features))
    expected = theirs(output.flatten(0, 1), features, prototypes, target_sharpen_temperature=0.25)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-10)
    for one, other in zip(
        torch.autograd.grad(ours, [output, prototypes]),
        torch.autograd.grad(expected, [output, prototypes]),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


# facebookresearch/msn, src/losses.py: cross-entropy, regularizer of the mean prediction, norms of
# the targets and of the gradients of anchors and prototypes; prototypes without label smoothing
AUTHORS = {
    0: (
        *(4.206505334661181, 0.07303404301187033, 3.9630915966978755),
        *(0.47697630519757694, 0.4544164281864333),
    ),
    3: (
        *(4.536740982062468, 0.07303404301187033, 3.7672645812539796),
        *(0.49018229007062863, 0.4892679379956487),
    ),
}


@pytest.mark.parametrize("iterations", AUTHORS)
def test_loss_and_gradients_are_those_of_the_authors_code(iterations: int) -> None:
    method = method_of(out_dim=16, num_prototypes=10, sinkhorn_iterations=iterations)
    prototypes = method.prototypes.weight
    with torch.no_grad():
        prototypes.copy_(draw(2, 10, 16))
    anchors, features = draw(0, 24, 16).unflatten(0, (3, 8)).requires_grad_(), draw(1, 8, 16)
    terms = loss_terms(method, anchors, features)
    gradients = torch.autograd.grad(total(terms), [anchors, prototypes])
    targets = method.targets(features).expand(3, -1, -1)  # the same for each view
    norms = [value.norm().item() for value in (targets, *gradients)]
    values = [terms["cross_entropy"].item(), terms["me_max"].item(), *norms]
    assert values == pytest.approx(AUTHORS[iterations], rel=1e-9)


def test_pmsn_measures_the_divergence_from_a_power_law() -> None:
    method = method_of(power=0.25, me_max_weight=2.0)
    output, features = draw(0, 2, 6, 4), draw(1, 6, 4)
    cosines = F.normalize(output, dim=2) @ F.normalize(method.prototypes.weight, dim=1).T
    mean = Categorical((cosines / 0.1).softmax(dim=2).mean(dim=(0, 1)))
    prior = Categorical(torch.tensor([k**-0.25 for k in range(1, 6)]))
    expected = 2 * kl_divergence(mean, prior)
    assert loss_terms(method, output, features)["me_max"].item() == pytest.approx(expected.item())


def test_balanced_targets_follow_the_prior() -> None:
    features = draw(1, 40, 4)
    for power in (0.0, 1.0):
        method = method_of(power=power, sinkhorn_iterations=200, sharpening=1.0, temperature=0.5)
        shares = method.targets(features).mean(dim=0)
        prior = torch.tensor([k**-power for k in range(1, 6)])
        assert torch.allclose(shares, prior / prior.sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_ignorance_costs_chance(power: float) -> None:
    method = method_of(power=power, me_max_weight=3.0)
    with torch.no_grad():
        method.prototypes.weight.copy_(torch.ones(5, 4))
    value = total(loss_terms(method, draw(0, 2, 6, 4), draw(1, 6, 4))).item()
    assert value == pytest.approx(method.chance_loss, rel=1e-9)


# -- views, patches, teacher -----------------------------------------------------------------------


def _vit() -> VisionTransformer:
    """16 patches of two pixels."""
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2}
    return VisionTransformer(num_classes=0, **sizes)


def _task(step: Any = "standard", **config: Any) -> MiniTask:
    config = {**SMALL, "norm": False, "masked_views": 2, "mask_ratio": 0.28, **config}
    return MiniTask("msn", config, backbone=_vit, sizes=(8, 8, 8, 4, 4), lr=0.1, step=step)


def test_masked_views_lose_patches_and_focal_views_and_the_teachers_none() -> None:
    task = _task()
    task.run(2)  # a teacher that is not the student
    batch = task.forward(torch.arange(8))
    network, teacher = task.base_model, task.loss.teacher.network
    keep = batch.input[1]
    assert keep.shape == (8, 2, 11)  # 16 patches, less 28 %: 11.52, rounded down
    assert len({tuple(row.sort().values.tolist()) for row in keep.flatten(0, 1)}) > 8

    def embedded(vit: Any, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """timm's own layers; the class token of these patches."""
        x = vit.patch_embed(images) + vit.pos_embed[:, 1:]
        if kept is not None:
            x = torch.stack([row[places] for row, places in zip(x, kept, strict=True)])
        token = (vit.cls_token + vit.pos_embed[:, :1]).expand(len(x), -1, -1)
        return vit.norm(vit.blocks(torch.cat([token, x], dim=1)))[:, 0]

    whole, first, second, *focal = batch.all_views
    for view, images in enumerate((first, second)):
        features = embedded(network.backbone, images, keep[:, view])
        assert torch.allclose(
            batch.output.prediction[view], network.head(features), rtol=0, atol=1e-9
        )
    for view, images in enumerate(focal):  # of 2 x 2 patches, with interpolated positions
        alone = network(([images], None, [])).prediction[0]
        assert torch.allclose(batch.output.prediction[2 + view], alone, rtol=0, atol=1e-9)
    features = teacher.head(embedded(teacher.backbone, whole))
    assert torch.allclose(batch["targets"], task.loss.targets(features), rtol=0, atol=1e-9)
    assert task.loss.export_backbone(network) is teacher.backbone


def test_masks_belong_to_the_image() -> None:
    task = _task()
    whole = task.batch(torch.arange(8)).input[1]
    part = task.batch(torch.tensor([5, 2])).input[1]
    assert torch.equal(part, whole[[5, 2]])
    everything = _task(mask_ratio=0.0).batch(torch.arange(4)).input[1]
    assert everything.shape == (4, 2, 16)


def test_batch_statistics_are_those_of_views_of_one_size() -> None:
    task = _task(norm=True)
    batch = task.forward(torch.arange(8))
    norm = task.base_model.head[1]
    assert norm.num_batches_tracked == 2  # masked views, then focal ones
    assert task.loss.teacher.network.head[1].num_batches_tracked == 1
    focal = task.base_model((batch.input[2], None, [])).prediction
    assert torch.allclose(batch.output.prediction[2:], focal, rtol=0, atol=1e-9)


def test_prototypes_are_trained_and_the_teacher_follows() -> None:
    task = _task(sinkhorn_iterations=0)
    prototypes = task.loss.prototypes.weight
    before = prototypes.detach().clone(), task.base_model.head[0].weight.detach().clone()
    task.run(1)
    student, teacher = task.base_model.head[0].weight, task.loss.teacher.network.head[0].weight
    assert not torch.equal(prototypes, before[0])
    assert torch.allclose(teacher, 0.9 * before[1] + 0.1 * student, rtol=0, atol=1e-12)
    assert not task.last_batch["targets"].requires_grad


def test_a_student_can_learn_its_scores(tmp_path: Path) -> None:
    """For `distill`: those of the teacher, from a checkpoint."""
    torch.set_default_dtype(torch.float32)
    task = tiny.train("msn", tmp_path, "run", "train.epochs=1")
    task.save_checkpoint()
    task.close()
    images = draw(0, 4, 3, 32, 32).float()
    trained = open_scores(FrozenModule(model=str(tmp_path / "run")))
    teacher = task.loss.teacher.network.eval()
    with torch.no_grad():
        actual = trained.network.eval()([images])[0]
        features = teacher.head(teacher.backbone(images))
        targets = F.softmax(actual / trained.scores.temperature, dim=1)
        expected = task.loss.log_probs(features, 0.1 * 0.25).exp()
    assert torch.allclose(targets, expected, atol=1e-5)
    assert trained.scores.targets == "sinkhorn"
    assert trained.width == task.loss.config.num_prototypes


def test_the_report_shows_the_masked_view() -> None:
    task = _task()
    batch = task.forward(torch.arange(4))
    shown = task.loss.visualize(batch.output, batch)
    assert torch.equal(shown["image"], batch.all_views[0])
    patches = (shown["masked"] != 0).any(dim=1).unflatten(2, (4, 2)).unflatten(1, (4, 2))
    seen = patches.any(dim=4).any(dim=2).flatten(1)  # (4, 16)
    for row, keep in zip(seen, batch.input[1][:, 0], strict=True):
        assert row.nonzero().flatten().tolist() == keep.sort().values.tolist()


def test_a_batch_in_chunks_is_the_whole_batch() -> None:
    """Of grad_cache: the loss has statistics of the whole batch."""
    whole, chunks = _task().run(2), _task(GradCache(chunks=3)).run(2)
    assert largest_difference(chunks.state(), whole.state()) < 1e-9


# -- ranks and configs -----------------------------------------------------------------------------


def test_the_divergence_is_that_of_all_ranks() -> None:
    """The run, and the regulariser by itself with its gradient, averaged over ranks."""
    alone = _on_rank(0, 1)
    for one in run_ranks(_on_rank, 2, 2):
        assert largest_difference(one, alone) < 1e-9


def _on_rank(rank: int, size: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    method = method_of(power=0.25)
    output, features = draw(0, 2, 6, 4), draw(1, 6, 4)
    mine = slice(rank * 6 // size, (rank + 1) * 6 // size)
    divergence = loss_terms(method, output[:, mine], features[mine])["me_max"]
    divergence.backward()
    gradient = method.prototypes.weight.grad
    assert gradient is not None
    alone = {"me_max": divergence.item(), "gradient": all_reduce_mean(gradient)}
    return {"alone": alone, "run": _task().run(4).state()}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.masked_views=4", "with the teacher's view these are 5 views, and `views` makes"),
        ("method.mask_ratio=1", "must be below 1"),
        ("method.sharpening=0", "must be above 0"),
        ("backbone={name: small_resnet, width: 8}", "msn needs"),
    ],
)
def test_impossible_configs_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("msn", [override])
