"""VICRegL against its paper as loops, and its matches against images whose cells can be found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.convnext import ConvNeXt
from torch import Tensor

import tiny
from minitask import predicted
from selftask.batch import Batch, total
from selftask.config.load import load_config
from selftask.methods.vicregl import (
    Match,
    VICRegL,
    global_terms,
    local_terms,
    matched_terms,
    nearest_cells,
)
from selftask.optim.param_groups import freeze_for_good
from selftask.registry import BACKBONES


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def slow_matches(here: list[Any], there: list[Any], num: int) -> list[tuple[int, int]]:
    """Of one image: the ``num`` cells whose nearest neighbor is nearest, in their order."""
    results = []
    for n, cell in enumerate(here):
        distances = [sum((a - b) ** 2 for a, b in zip(cell, other, strict=True)) for other in there]
        best = min(range(len(there)), key=distances.__getitem__)
        results.append((distances[best], n, best))
    chosen = sorted(results)[:num]
    return sorted((n, best) for _, n, best in chosen)


def slow_terms(first: list[Any], second: list[Any]) -> tuple[float, float, float]:
    """Invariance, variance and covariance of (B, D) each: VICReg's, halves of both sides."""
    num, dim = len(first), len(first[0])
    squares = [
        (a - b) ** 2 for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    ]
    variance = covariance = 0.0
    for rows in (first, second):
        means = [sum(row[j] for row in rows) / num for j in range(dim)]
        for i in range(dim):
            for j in range(dim):
                c = sum((r[i] - means[i]) * (r[j] - means[j]) for r in rows) / (num - 1)
                if i == j:
                    variance += max(0.0, 1 - (c + 1e-4) ** 0.5) / dim / 2
                else:
                    covariance += c**2 / dim / 2
    return sum(squares) / len(squares), variance, covariance


def test_the_loss_is_that_of_the_paper() -> None:
    """Equations 3 to 5 as loops: two large views and three small ones, two of them alike."""
    num_images, width = 4, 3
    sizes = (6, 6, 4, 4, 3)
    cells = [0.5 * draw(n, num_images, size, width) for n, size in enumerate(sizes)]
    centers = [10 * draw(10 + n, num_images, size, 2) for n, size in enumerate(sizes)]
    numbers = [6, 6, 4, 4, 3], [4, 4, 2, 2, 2]
    expected = [0.0, 0.0, 0.0]
    pairs = [(i, j) for i in range(2) for j in range(5) if i != j]
    for i, j in pairs:
        for places, matches in zip((cells, centers), numbers, strict=True):
            for a, b in ((i, j), (j, i)):
                matched = [
                    slow_matches(places[a][n].tolist(), places[b][n].tolist(), matches[a])
                    for n in range(num_images)
                ]
                for m in range(matches[a]):
                    first = [cells[a][n, matched[n][m][0]].tolist() for n in range(num_images)]
                    second = [cells[b][n, matched[n][m][1]].tolist() for n in range(num_images)]
                    for term, value in enumerate(slow_terms(first, second)):
                        expected[term] += value / matches[a] / 2 / len(pairs)
    ours = [term.item() for term in local_terms(cells, centers, *numbers)]
    assert ours == pytest.approx(expected, rel=1e-10)


def test_global_terms_are_means_over_pairs_and_views() -> None:
    views = [0.5 * draw(n, 5, 4) for n in range(3)]
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2)]
    terms = {(i, j): slow_terms(views[i].tolist(), views[j].tolist()) for i, j in pairs}
    alone = [slow_terms(view.tolist(), view.tolist()) for view in views]
    invariance, variance, covariance = (term.item() for term in global_terms(views))
    assert invariance == pytest.approx(sum(one[0] for one in terms.values()) / 4, rel=1e-12)
    assert variance == pytest.approx(sum(one[1] for one in alone) / 3, rel=1e-12)
    assert covariance == pytest.approx(sum(one[2] for one in alone) / 3, rel=1e-12)


def test_more_matches_than_cells_take_all_cells() -> None:
    here, there = draw(0, 2, 5, 2), draw(1, 2, 7, 2)
    (cells, neighbors), (back, others) = nearest_cells(here, there, 20, 4)
    assert cells.tolist() == [list(range(5))] * 2
    assert neighbors.shape == (2, 5)
    assert back.shape == others.shape == (2, 4)


def test_cells_that_are_the_same_cost_no_invariance() -> None:
    first, indices = draw(0, 4, 1, 3, 5), torch.arange(3).expand(4, 1, 3)
    match = Match((0,), (1,), indices, indices)
    terms = matched_terms({(0,): first, (1,): first}, None, [match])
    assert terms.shape == (3, 3) and terms[0].tolist() == [0, 0, 0]


def test_the_centers_of_two_views_of_one_place_are_matched(tmp_path: Path) -> None:
    """A batch of the real loader: cells matched by location lie within a cell of each other."""
    task = tiny.task("vicregl", tmp_path, "run", "eval.evaluations={}")
    task.prepare()
    task.on_start()
    task.on_phase_start()
    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    first, second = batch["centers"]
    rows, columns = batch.output.prediction["cells"][0].shape[2:]
    assert first.shape == (len(batch.index), rows * columns, 2)
    (here, there), _ = nearest_cells(first, second, rows * columns, rows * columns)
    apart = first.gather(1, here[..., None].expand(-1, -1, 2)) - second.gather(
        1, there[..., None].expand(-1, -1, 2)
    )
    sides = [draws.matrix[:, :, :2].norm(dim=1) / rows for draws in batch.draws["main"]]
    largest = torch.stack(sides).amax()
    assert apart.norm(dim=2).median() < largest
    task.step()
    assert {*task.last_batch.terms} == {
        f"{kind}_{name}"
        for kind in ("global", "local")
        for name in ("invariance", "variance", "covariance")
    }
    loss = total(task.loss(task.last_batch.output, task.last_batch))
    assert loss.isfinite()
    task.close()


def test_terms_are_weighted() -> None:
    config = VICRegL.Config(alpha=0.9, invariance_weight=2.0, variance_weight=3.0)
    method = VICRegL(config)
    output = {
        "pooled": [draw(n, 4, 5) for n in range(2)],
        "cells": [draw(2 + n, 4, 3, 2, 2) for n in range(2)],
    }

    class Known:
        def __getitem__(self, name: str) -> list[Tensor]:
            return [draw(5 + n, 4, 4, 2) for n in range(2)]

    terms = method(predicted(output), Known())  # type: ignore[arg-type]
    whole = global_terms(output["pooled"])
    cells = [view.flatten(2).mT for view in output["cells"]]
    local = local_terms(cells, Known()["centers"], [4, 4], [20, 20])
    weights = (2.0, 3.0, 1.0)
    expected = [0.9 * w * v for w, v in zip(weights, whole, strict=True)]
    expected += [0.1 * w * v for w, v in zip(weights, local, strict=True)]
    assert [term.item() for term in terms.values()] == pytest.approx([e.item() for e in expected])


@pytest.mark.parametrize("all_features", [True, False])
def test_large_and_small_views_have_their_numbers_of_matches(all_features: bool) -> None:
    method = VICRegL(
        VICRegL.Config(num_matches=5, num_small_matches=2, match_all_features=all_features)
    )
    sides = (3, 3, 2)
    output = {
        "pooled": [draw(n, 4, 5) for n in range(3)],
        "cells": [draw(3 + n, 4, 3, side, side) for n, side in enumerate(sides)],
    }
    centers = [draw(6 + n, 4, side * side, 2) for n, side in enumerate(sides)]
    none = torch.empty(0, dtype=torch.int64)
    batch = Batch(views={}, labels=none, index=none, key=none, added={"centers": centers})
    terms = method(predicted(output), batch)
    cells = [view.flatten(2).mT for view in output["cells"]]
    expected = local_terms(cells, centers, [9, 9, 4] if all_features else [5, 5, 2], [5, 5, 2])
    share = 1 - method.config.alpha
    assert terms["local_covariance"].item() == pytest.approx(share * expected[2].item())
    weight = share * method.config.invariance_weight
    assert terms["local_invariance"].item() == pytest.approx(weight * expected[0].item())


def test_the_convnext_recipe_has_no_layer_scale_and_layer_norm_in_its_heads() -> None:
    """As in the published code: timm's ConvNeXt without gammas computes and trains the same."""
    config = load_config("vicregl/convnext_small_imagenet", [])
    small: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 8, 8, 8)}
    args = {**config.backbone.args["args"], **small}
    backbone = BACKBONES["timm"](model="convnext_small", args=args).build().eval()
    plain = ConvNeXt(num_classes=0, ls_init_value=None, **small).eval()
    plain.load_state_dict({k: v for k, v in backbone.state_dict().items() if "gamma" not in k})
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(backbone(images), plain(images))
    network = torch.nn.ModuleDict({"backbone": backbone})
    freeze_for_good([("network", network)], config.optimizer.groups)
    frozen = {name for name, p in backbone.named_parameters() if not p.requires_grad}
    assert frozen == set(backbone.state_dict()) - set(plain.state_dict()) and len(frozen) == 5

    method = VICRegL(VICRegL.Config(**{**config.method.args, "hidden_dim": 6, "local_dim": 4}))
    for head in method.build_head(8).values():
        kinds = [type(part).__name__ for part in head]
        assert kinds == ["Linear", "LayerNorm", "ReLU"] * 2 + ["Linear"]
        assert head[0].bias is not None and head[-1].bias is None


def test_the_convnext_recipe_blurs_and_solarizes_by_view() -> None:
    """The published code alternates its two settings, among small crops too."""
    views = load_config("vicregl/convnext_small_imagenet", []).views.values()
    chances = []
    for view in views:
        chance = {t.name: t.args.get("p") for t in view.transforms}
        size = view.transforms[0].args["size"]
        chances += [(size, chance["gaussian_blur"], chance.get("solarize", 0))] * view.count
    assert chances[:2] == [(224, 1.0, 0), (224, 0.1, 0.2)]
    assert sorted(chances[2:]) == [(96, 0.1, 0.2)] * 3 + [(96, 1.0, 0)] * 3
