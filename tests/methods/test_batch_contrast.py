"""Methods that compare the views of a batch, against their authors' figures and their papers.

Figures are (loss, gradient of the first view, of the second) for the inputs of seeds 0 and 500.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from figures import draw
from minitask import MiniTask, loss_of
from selftask.batch import Batch
from selftask.errors import UserError
from selftask.methods.dcl import dcl_loss
from selftask.methods.directclr import direct_loss
from selftask.methods.hcl import hcl_loss
from selftask.methods.hypersphere import Hypersphere, alignment, uniformity
from selftask.methods.macl import macl_loss
from selftask.methods.supcon import BASE_TEMPERATURE, supcon_loss
from selftask.task import Task

SEEDS = (0, 500)
# raminnakhli/Decoupled-Contrastive-Learning: DCL, and DCLW, whose weights have gradients
DCL = [
    (4.925767469487643, 0.8448749922424645, 0.8212516087697695),
    (5.536843497492313, 0.7821030107190018, 0.7708580024549214),
]
DCLW = [
    (6.046878274418388, 1.1794721562796375, 1.1811955993080563),
    (6.707905362839854, 1.0822207530689756, 1.0616686925591345),
]
# joshr17/HCL, with beta 1 and 0
HCL = [
    (2.575032412873728, 0.30296361159694585, 0.28171514462532393),
    (3.223898594943334, 0.33866863872030806, 0.2943928213074415),
]
DEBIASED = [
    (2.3529321549357953, 0.2702871893889255, 0.282226691049379),
    (2.876255682774533, 0.29739467924917934, 0.25836029649120756),
]
MACL = [  # lightly, whose weights divide by 1 - P in a form that is rounded to 1e-8
    (6.444794031881134, 1.0245493397915317, 0.9949843988954274),
    (7.281442345990324, 1.0683169448121559, 1.047148124904042),
]
DIRECT = [  # facebookresearch/directclr
    (6.778262801875217, 2.5077151696688564, 1.2640121305569578),
    (7.504046494537475, 1.1195567724524262, 0.9960655883686649),
]
# SsnL/align_uniform for (seed, power, scale, weights): alignment, uniformity, gradients of the sum
HYPERSPHERE = {
    (0, 2, 2, 1.0, 1.0): (
        *(1.8945913041386682, -3.071819098850174),
        *(0.24240858191827414, 0.2397368339757365),
    ),
    (10, 1, 3, 0.98, 0.96): (
        *(1.5264040079533925, -4.0243902376461005),
        *(0.2575902522574402, 0.22542516293168177),
    ),
}
# HobbitLong/SupContrast: all views as anchors, no labels, three images without a positive;
# solo-learn's formula: loss, gradient
SUPCON = {
    "all": [(7.240585153272072, 0.8950201899939917), (7.362596059289769, 0.8537083152243349)],
    "unlabeled": [
        (7.407320683056526, 1.534987074543091),
        (9.188952470684528, 1.5726719592525733),
    ],
    "alone": [(3.731778335906876, 1.8532868536244353), (3.3917585504834507, 1.7235245686861047)],
    "solo": [(1.9132200608232584, 0.7250306626143471), (2.182672980593384, 0.6896640190820384)],
}


def _pair(seed: int, n: int, d: int) -> list[Tensor]:
    return [draw(seed + view, n, d).requires_grad_() for view in range(2)]


def _check(
    loss: Tensor, views: list[Tensor], figures: tuple[float, ...], rel: float = 1e-9
) -> None:
    gradients = torch.autograd.grad(loss, views)
    computed = (loss.item(), *(gradient.norm().item() for gradient in gradients))
    assert computed == pytest.approx(figures, rel=rel)


@pytest.mark.parametrize("case", [0, 1])
def test_losses_are_those_of_the_authors_code(case: int) -> None:
    views = _pair(SEEDS[case], 12, 16)
    _check(dcl_loss(*views, temperature=0.1, sigma=None), views, DCL[case])
    _check(dcl_loss(*views, temperature=0.1, sigma=0.5), views, DCLW[case])
    views = _pair(SEEDS[case], 6, 12)
    for hardness, figures in ((1.0, HCL), (0.0, DEBIASED)):
        loss = hcl_loss(
            *views, temperature=0.5, same_class=0.1, hardness=hardness, num_negatives=10
        )
        _check(loss, views, figures[case])
    views = _pair(SEEDS[case], 12, 10)
    _check(macl_loss(*views, temperature=0.1, slope=0.5, start=0.0), views, MACL[case], 1e-7)
    views = _pair(SEEDS[case], 12, 24)
    cut = torch.stack([view[:, :6] for view in views])
    _check(direct_loss(cut, temperature=0.1), views, DIRECT[case])


@pytest.mark.parametrize("case", HYPERSPHERE)
def test_alignment_and_uniformity_are_those_of_the_authors_code(case: Any) -> None:
    seed, power, scale, align_weight, uniform_weight = case
    views = _pair(seed, 16, 8)
    output = torch.stack(views)
    align, uniform = alignment(output, power=power), uniformity(output, scale=scale)
    figures = HYPERSPHERE[case]
    assert (align.item(), uniform.item()) == pytest.approx(figures[:2], rel=1e-9)
    loss = align_weight * align + uniform_weight * uniform
    _check(loss, views, (loss.item(), *figures[2:]))


@pytest.mark.parametrize("name", SUPCON)
def test_supcon_is_that_of_the_authors_code(name: str) -> None:
    for seed, figures in zip(SEEDS, SUPCON[name], strict=True):
        x = draw(seed, 12, 2, 16).requires_grad_()
        views, labels = x.transpose(0, 1), torch.arange(12) % 4
        if name == "unlabeled":
            labels = torch.full((12,), -1)
        if name == "alone":
            views = views[:1]
            labels[:3] = torch.tensor([10, 11, 12])
        loss = supcon_loss(views, labels, temperature=0.1, inside=name == "solo")
        if name != "solo":
            loss = loss * 0.1 / BASE_TEMPERATURE
        _check(loss, [x], figures)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def test_decoupled_loss_is_that_of_the_paper() -> None:
    """Eq. 5 and 6 of arXiv:2110.06848, as loops over rows."""
    first, second = draw(1, 4, 5), draw(2, 4, 5)
    rows = [*first, *second]
    exponentials = [math.exp(_cosine(first[i], second[i]) / 0.5) for i in range(4)]
    for sigma in (None, 0.5):
        loss = 0.0
        for i in range(8):
            pull = _cosine(rows[i], rows[(i + 4) % 8]) / 0.3
            weight = 2 - exponentials[i % 4] / (sum(exponentials) / 4) if sigma else 1.0
            push = sum(
                math.exp(_cosine(rows[i], rows[k]) / 0.3) for k in range(8) if k % 4 != i % 4
            )
            loss += math.log(push) - weight * pull
        ours = dcl_loss(first, second, temperature=0.3, sigma=sigma)
        assert ours.item() == pytest.approx(loss / 8, rel=1e-12)


def test_supervised_loss_is_that_of_the_paper() -> None:
    """Eq. 2 and 3 of arXiv:2004.11362, as loops; 3 and 5 have no label, 4 no second image."""
    views, labels = draw(1, 2, 6, 5), torch.tensor([0, 1, 0, -1, 2, -1])
    rows, classes = [*views[0], *views[1]], [*labels.tolist()] * 2
    outside = inside = 0.0
    for i in range(12):
        others = [k for k in range(12) if k != i]
        total = sum(math.exp(_cosine(rows[i], rows[k]) / 0.2) for k in others)
        logs = [
            _cosine(rows[i], rows[k]) / 0.2 - math.log(total)
            for k in others
            if k % 6 == i % 6 or classes[k] == classes[i] >= 0
        ]
        outside -= sum(logs) / len(logs) / 12
        inside -= math.log(sum(map(math.exp, logs))) / 12
    for expected, is_inside in ((outside, False), (inside, True)):
        ours = supcon_loss(views, labels, temperature=0.2, inside=is_inside)
        assert ours.item() == pytest.approx(expected, rel=1e-12)


def test_uniformity_is_lowest_for_images_in_opposite_directions() -> None:
    """Of two images: squared distance 4, as the formula says, and 0 if they are the same."""
    apart = torch.tensor([[[1.0, 0.0], [-3.0, 0.0]]]).double()
    assert uniformity(apart, scale=2.0).item() == pytest.approx(-8.0, rel=1e-12)
    assert uniformity(apart.abs(), scale=2.0).item() == pytest.approx(0.0, abs=1e-12)
    assert alignment(torch.cat([apart, -apart]), power=2.0).item() == pytest.approx(4.0)
    method = Hypersphere(Hypersphere.Config(alignment_weight=0.5, uniformity_weight=2.0))
    terms = method(torch.cat([apart, -apart]), None)
    assert terms["alignment"].item() == pytest.approx(2.0)
    assert terms["uniformity"].item() == pytest.approx(-16.0)


def test_hard_negatives_at_a_low_temperature_do_not_overflow() -> None:
    """exp(beta / tau) is beyond float32 here; float64 has it."""
    first, second = _pair(0, 6, 5)
    options = {"same_class": 0.1, "hardness": 10.0, "num_negatives": 10, "temperature": 0.07}
    expected = hcl_loss(first, second, **options)
    assert hcl_loss(first.float(), second.float(), **options).item() == pytest.approx(
        expected.item(), rel=1e-4
    )


def test_views_in_one_place_give_zero_gradients_and_no_nan() -> None:
    same = torch.ones(2, 4, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(alignment(same, power=1.0), same)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["dcl", "hcl", "macl", "directclr"])
def test_chance_is_the_loss_of_equal_similarities(name: str) -> None:
    config = {"num_features": 3} if name == "directclr" else {}
    method = MiniTask(name, config, batch_size=4).loss
    loss = loss_of(method, torch.ones(2, 4, 5, dtype=torch.float64))
    assert loss.item() == pytest.approx(method.chance_loss, rel=1e-9)


def test_chance_of_supcon() -> None:
    method = MiniTask("supcon", {}, batch_size=4).loss
    batch = Batch(
        views={}, labels=torch.tensor([0, 0, 1, -1]), index=torch.arange(4), key=torch.arange(4)
    )
    loss = method(torch.ones(2, 4, 5, dtype=torch.float64), batch)
    assert loss.item() == pytest.approx(method.chance_loss, rel=1e-9)


def test_more_features_than_the_backbone_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"method.num_features=33: the backbone has 32 features"):
        Task(tiny.config("directclr", tmp_path, "run", "method.num_features=33")).prepare()
