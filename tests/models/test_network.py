"""Network, teacher and the pieces of heads."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from selftask.errors import UserError
from selftask.models.heads import DINOHead, ProjectorPredictor, Prototypes, WeightNormLinear, mlp
from selftask.models.network import Network, forward_by_size
from selftask.models.teacher import Teacher


class _MeanColour(nn.Module):
    """Each image's mean color, and a count of the passes."""

    embed_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return images.mean(dim=(2, 3))


class _Returns(nn.Module):
    embed_dim = 3

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, images: torch.Tensor) -> Any:
        return self.change(images.mean(dim=(2, 3)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: (x, x), "a tuple"),
        (lambda x: {"x": x}, "a dict"),
        (lambda x: None, "a NoneType"),
        (lambda x: x[:, :, None, None], r"\(10, 3, 1, 1\)"),
        (lambda x: x.mean(), r"\(\)"),
        (lambda x: x[:5], r"\(5, 3\)"),
    ],
)
@pytest.mark.parametrize("per_view", [False, True])
def test_a_backbone_that_returns_no_features_is_named(
    change: Any, found: str, per_view: bool
) -> None:
    views = [torch.randn(5, 3, 8, 8)] * 2
    if per_view:
        found = found.replace("(5,", "(4,").replace("(10,", "(5,")
        change = (lambda x: x[:4]) if "(4," in found else change
    network = Network(_Returns(change), nn.Identity(), per_view=per_view)
    match = rf"test_network.py:\d+: the backbone _Returns must map .* and returned {found} for"
    with pytest.raises(UserError, match=match):
        network(views)


@pytest.mark.parametrize("sizes", [[8, 8], [8, 8, 4, 4, 4], [4, 8, 4, 8, 6]])
def test_views_of_one_size_share_a_pass_and_keep_their_order(sizes: list[int]) -> None:
    views = [torch.randn(5, 3, size, size) for size in sizes]
    backbone = _MeanColour()
    output = Network(backbone, nn.Identity())(views)
    assert backbone.passes == len(set(sizes))
    assert torch.allclose(output, torch.stack([v.mean(dim=(2, 3)) for v in views]))


@pytest.mark.parametrize("per_view", [True, False])
def test_a_fixed_vit_sees_small_views_as_a_vit_built_for_them(per_view: bool) -> None:
    """The reference: a model of timm for each size, its positions resized by timm itself."""
    torch.manual_seed(0)
    arguments = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 0}
    vit = timm.models.VisionTransformer(img_size=32, **arguments).eval()
    small = timm.models.VisionTransformer(img_size=16, **arguments).eval()
    state = vit.state_dict()
    positions = timm.layers.resample_abs_pos_embed(state["pos_embed"], [2, 2], num_prefix_tokens=1)
    small.load_state_dict({**state, "pos_embed": positions})
    views = [torch.randn(3, 3, size, size) for size in (32, 16, 32, 16)]
    network = Network(vit, nn.Identity(), per_view=per_view)
    expected = [(vit if view.shape[-1] == 32 else small)(view) for view in views]
    output = network(views)
    assert torch.allclose(output, torch.stack(expected), atol=1e-6)
    output[1].sum().backward()
    assert vit.pos_embed.grad is not None and vit.pos_embed.grad[0, 1:].abs().min() > 0


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """BatchNorm by its formula, with the statistics of these rows."""
    x = x.detach().double()
    return (x - x.mean(dim=0)) / (x.var(dim=0, correction=0) + 1e-5).sqrt()


@pytest.mark.parametrize("per_view", [True, False])
def test_batch_norm_sees_one_view_or_all(per_view: bool) -> None:
    """Outputs, and the running mean of the last view or of all, by the formula."""
    views = [torch.randn(5, 3, size, size) + place for place, size in enumerate((8, 8, 4))]
    backbone, norm = _MeanColour(), nn.BatchNorm1d(3)
    network = Network(backbone, norm, per_view=per_view)
    output = network(views)
    means = [view.mean(dim=(2, 3)) for view in views]
    together = _normalized(torch.cat(means)).view(3, 5, 3)
    expected = torch.stack([_normalized(mean) for mean in means]) if per_view else together
    assert torch.allclose(output.double(), expected, atol=1e-5)
    assert torch.equal(network.embedding, torch.cat(means))
    assert backbone.passes == (3 if per_view else 2)
    assert int(norm.num_batches_tracked) == (3 if per_view else 1)


def test_embedding_is_a_detached_reference_in_row_order_and_never_state() -> None:
    head = nn.Linear(3, 2)
    network = Network(nn.Sequential(_MeanColour(), nn.Linear(3, 3)), head)
    output = network([torch.randn(4, 3, 8, 8), torch.randn(4, 3, 6, 6)])
    assert network.embedding is not None and not network.embedding.requires_grad
    assert torch.equal(head(network.embedding).view(2, 4, 2), output)
    assert "embedding" not in network.state_dict()
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert twin.embedding is None
        assert all(
            torch.equal(a, b) for a, b in zip(twin.parameters(), network.parameters(), strict=True)
        )
    assert network.embedding is not None
    torch.save(network.state_dict(), io.BytesIO())


def test_one_size_is_not_copied() -> None:
    features = torch.randn(6, 4)
    backbone = nn.Module()
    backbone.forward = lambda images: features  # type: ignore[method-assign]
    assert forward_by_size(backbone, [torch.zeros(3, 3, 2, 2)] * 2) is features


def test_views_of_different_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 3\]"):
        forward_by_size(_MeanColour(), [torch.zeros(4, 3, 2, 2), torch.zeros(3, 3, 2, 2)])


def test_teacher_follows_by_the_formula_and_keeps_its_own_statistics() -> None:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    teacher = Teacher(student)
    expected = [p.detach().double().clone() for p in student.parameters()]
    for step in range(5):
        momentum = 1 - 0.1 / (step + 1)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(torch.randn_like(parameter))
        student(torch.randn(8, 3))
        teacher.update(student, momentum=momentum)
        for e, p in zip(expected, student.parameters(), strict=True):
            e.copy_(momentum * e + (1 - momentum) * p.double())
    for e, p in zip(expected, teacher.parameters(), strict=True):
        assert torch.allclose(e.float(), p, atol=1e-6)
        assert not p.requires_grad
    statistics = teacher.state_dict()
    assert torch.equal(statistics["network.1.running_mean"], torch.zeros(4))
    assert not teacher(torch.randn(8, 3)).requires_grad
    assert not torch.equal(teacher.state_dict()["network.1.running_mean"], torch.zeros(4))


def test_teacher_shares_nothing_with_its_student() -> None:
    student = nn.Linear(2, 2)
    teacher = Teacher(student)
    teacher.update(student, momentum=0.5)
    assert {p.data_ptr() for p in student.parameters()}.isdisjoint(
        p.data_ptr() for p in teacher.parameters()
    )
    with pytest.raises(ValueError, match="2 parameters cannot follow 4"):
        teacher.update(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), momentum=0.9)


def test_a_frozen_teacher_stays_whatever_the_student_becomes() -> None:
    student = nn.Linear(2, 2)
    teacher, before = Teacher(student), copy.deepcopy(student.state_dict())
    with torch.no_grad():
        student.weight.fill_(torch.inf)
    teacher.update(student, momentum=1.0)
    assert all(torch.equal(p, before[n]) for n, p in teacher.network.state_dict().items())


def _kinds(module: nn.Sequential) -> list[str]:
    return [type(layer).__name__ for layer in module]


def test_mlp_has_the_layers_of_the_papers() -> None:
    assert _kinds(mlp(8, 16, 4)) == ["Linear", "BatchNorm1d", "ReLU", "Linear"]  # BYOL
    assert _kinds(mlp(8, 16, 4, norm=False)) == ["Linear", "ReLU", "Linear"]  # MoCo v2
    simsiam = mlp(8, 16, 16, 4, bias=False, last_norm=True, last_affine=False)
    assert _kinds(simsiam) == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert simsiam[0].bias is None and simsiam[-2].bias is not None and simsiam[-1].weight is None
    assert _kinds(mlp(8, 4)) == ["Linear"]
    with pytest.raises(ValueError, match="sizes"):
        mlp(8)


def test_projector_and_predictor_come_side_by_side() -> None:
    projector, predictor = mlp(5, 8, 3), mlp(3, 4, 3)
    head, x = ProjectorPredictor(projector, predictor), torch.randn(6, 5)
    projection, prediction = Network(nn.Flatten(), head)([x[:3], x[3:]]).unbind(2)  # (2, 3, 3)
    assert torch.equal(projection.flatten(0, 1), projector(x))
    assert torch.equal(prediction.flatten(0, 1), predictor(projector(x)))


def test_prototypes_return_to_the_unit_sphere() -> None:
    prototypes = Prototypes(4, 6)
    assert torch.allclose(prototypes.weight.norm(dim=1), torch.ones(6))
    with torch.no_grad():
        prototypes.weight.mul_(3)
    directions = F.normalize(prototypes.weight.detach(), dim=1)
    prototypes.normalize_()
    assert torch.allclose(prototypes.weight, directions)
    x = torch.randn(2, 5, 4)
    assert torch.allclose(prototypes(x), x @ prototypes.weight.T)


def test_weight_norm_is_torchs_with_length_one() -> None:
    ours = WeightNormLinear(5, 7)
    reference = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7, bias=False))
    with torch.no_grad():
        reference.parametrizations.weight.original0.fill_(1.0)
        reference.parametrizations.weight.original1.copy_(ours.weight)
    x, y = torch.randn(4, 5), torch.randn(4, 7)
    assert torch.allclose(ours(x), reference(x), atol=1e-6)
    (ours(x) * y).sum().backward()
    (reference(x) * y).sum().backward()
    expected = reference.parametrizations.weight.original1.grad
    assert torch.allclose(ours.weight.grad, expected, atol=1e-6)


def test_trained_lengths_are_torchs_weight_norm() -> None:
    """DINOv2's last layer: directions and lengths, which start at 1, and their gradients."""
    ours = WeightNormLinear(5, 7, trained_length=True)
    assert torch.equal(ours.length, torch.ones(7, 1))
    reference = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7, bias=False))
    lengths, directions = reference.parametrizations.weight.parameters()
    with torch.no_grad():
        ours.length.copy_(torch.rand(7, 1) + 0.5)
        lengths.copy_(ours.length)
        directions.copy_(ours.weight)
    x, y = torch.randn(4, 5), torch.randn(4, 7)
    assert torch.allclose(ours(x), reference(x), atol=1e-6)
    (ours(x) * y).sum().backward()
    (reference(x) * y).sum().backward()
    assert torch.allclose(ours.length.grad, lengths.grad, atol=1e-5)
    assert torch.allclose(ours.weight.grad, directions.grad, atol=1e-5)


@pytest.mark.parametrize("kind", [Prototypes, WeightNormLinear])
def test_rows_in_bfloat16_are_normalized_in_float32(kind: type[nn.Module]) -> None:
    """Sharded networks have such weights in the forward pass. Lengths are exact to one rounding."""
    layer = kind(64, 50).bfloat16()
    with torch.no_grad():
        layer.weight.mul_(1.7)
    exact = F.normalize(layer.weight.double(), dim=1).T
    if kind is Prototypes:
        layer.normalize_()
    else:
        assert torch.allclose(layer(torch.eye(64)).double(), exact, rtol=1e-5, atol=0)
    for features in (torch.eye(64), torch.eye(64).bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            scores = layer(features)
        assert ((scores.double() - exact).abs() <= 2**-8 * exact.abs()).all()


def test_dino_head_scores_are_cosines() -> None:
    head = copy.deepcopy(DINOHead(8, 12, hidden=16, bottleneck=4))
    assert _kinds(head.mlp) == ["Linear", "GELU", "Linear", "GELU", "Linear"]
    x = torch.randn(32, 8) * 100
    scores = head(x)
    directions = [F.normalize(rows, dim=1) for rows in (head.mlp(x), head.last_layer.weight)]
    assert torch.allclose(scores, directions[0] @ directions[1].T, atol=1e-6)
    assert scores.shape == (32, 12) and scores.abs().max() <= 1 + 1e-6
    assert math.isclose(head.mlp[0].weight.std().item(), 0.02, rel_tol=0.3)
    assert "BatchNorm1d" in _kinds(DINOHead(8, 12, hidden=16, norm=True).mlp)
