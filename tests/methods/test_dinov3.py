"""DINOv3 against the figures of the authors' code, and its Gram teacher over a run.

The authors' code computes in float32, so 1e-6 is what its figures can show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from figures import bits, draw
from selftask.batch import Batch
from selftask.errors import ConfigError, UserError
from selftask.methods.dinov2 import Masks, Predictions
from selftask.methods.dinov3 import DINOv3, gram_loss
from selftask.models.features.tokens import Features, Tokens
from selftask.models.losses.koleo import koleo
from selftask.models.network import PatchOutput
from selftask.task import Task

# facebookresearch/dinov3, loss/gram_loss.py: loss, and norm of its gradient, for two sets of inputs
GRAM: dict[str, list[tuple[float, float]]] = {
    "keep": [
        (0.13059675693511963, 0.024387067269119576),
        (0.15316735208034515, 0.02611312465013318),
    ],
    "drop": [
        (0.049862731248140335, 0.010607755651530843),
        (0.04774957895278931, 0.011477300109011336),
    ],
}
# loss/koleo_loss.py, dino_clstoken_loss.py (both global views in one Sinkhorn-Knopp; means over
# the pairs of global views and over those with a local one, and the gradient of their sum)
KOLEO = [-0.19169760564639649, -0.14989721109373857]
DINO = [
    (14.172943115234375, 14.664992332458496, 4.180333190770958),
    (18.66334342956543, 17.5886173248291, 4.539635921886368),
]
IBOT = [(17.76999855041504, 2.7626252905420325), (17.265628814697266, 3.243367907372871)]
SEEDS = (0, 500)


@pytest.mark.parametrize("negatives", ["keep", "drop"])
def test_gram_loss_is_that_of_the_authors_code(negatives: Any) -> None:
    for seed, (loss, gradient) in zip(SEEDS, GRAM[negatives], strict=True):
        patches = draw(seed, 3, 9, 12).requires_grad_()
        ours = gram_loss(patches, draw(seed + 1, 3, 9, 12), negatives=negatives)
        ours.backward()
        assert patches.grad is not None
        assert ours.item() == pytest.approx(loss, rel=1e-6)
        assert patches.grad.norm().item() == pytest.approx(gradient, rel=1e-6)


@pytest.mark.parametrize("case", [0, 1])
def test_other_terms_are_those_of_the_authors_code(case: int) -> None:
    """4 views, 2 of them global, of 6 images; patches of other images, 4 of them."""
    seed, method = SEEDS[case], DINOv3(DINOv3.Config(out_dim=16, koleo_weight=0.5)).double()
    views = draw(seed + 3, 4, 6, 16).requires_grad_()
    mask = bits(seed + 8, 4, 9, share=0.4)
    patches = draw(seed + 6, int(mask.sum()), 16).requires_grad_()
    targets = method.targets(draw(seed + 4, 2, 6, 16).flatten(0, 1), method.centers[0], 0.07)
    of_patches = method.targets(draw(seed + 7, int(mask.sum()), 16), method.centers[1], 0.07)
    terms = method(
        *_output_and_batch(draw(seed + 2, 6, 12), views, patches, mask, targets, of_patches)
    )
    pairs = 2 * 4 - 2
    global_mean, local_mean = terms["dino_global"] * pairs / 2, terms["dino_local"] * pairs / 12
    (global_mean + local_mean + terms["ibot"]).backward()
    assert views.grad is not None and patches.grad is not None
    figures = global_mean.item(), local_mean.item(), views.grad.norm().item()
    assert figures == pytest.approx(DINO[case], rel=1e-6)
    assert (terms["ibot"].item(), patches.grad.norm().item()) == pytest.approx(IBOT[case], rel=1e-6)
    assert terms["koleo"].item() == pytest.approx(KOLEO[case], rel=1e-6)  # two views, half weight
    assert terms["gram"].item() == 0.0  # before its start


def _output_and_batch(
    pooled: Tensor,
    views: Tensor,
    patches: Tensor,
    mask: Tensor,
    targets: Tensor,
    of_patches: Tensor,
) -> tuple[PatchOutput, Batch]:
    counts = mask.sum(dim=1)
    weights = (1 / counts.double()).repeat_interleave(counts)
    masks = Masks(mask, mask.flatten().nonzero().squeeze(1), weights)
    both = torch.cat([pooled, pooled])
    features = Features(both, Tokens(both[:, None], None, both[:, :0, None]), {})
    none = torch.empty(0, dtype=torch.int64)
    added = {"masks": masks, "image_targets": targets.unflatten(0, (2, -1))}
    added |= {
        "patch_targets": of_patches,
        "gram_patches": None,
        "gram_weight": 1.0,
        "local_weight": 3.0,
    }
    batch = Batch(views={}, labels=none, index=none, key=none, added=added)
    return PatchOutput(Predictions(views, patches), features), batch


def _task(folder: Path, *words: str) -> Task:
    return tiny.task("dinov3", folder, "run", "train.epochs=null", "train.max_steps=10", *words)


def test_the_gram_teacher_is_a_copy_of_the_teacher_at_its_steps(tmp_path: Path) -> None:
    """Copied at step 2 and after the start, at step 5, each two steps, twice."""
    task = _task(
        tmp_path,
        *("method.gram_copy=2", "method.gram_start=5", "method.gram_renew_every=2"),
        *("method.gram_renewals=2",),
    )
    copies, terms, before = [], [], torch.empty(0)
    for _ in task.steps():
        method = task.loss
        now = _weights(method.gram_teacher)
        if len(before) and not torch.equal(now, before):
            copies.append(task.steps_done)
            assert torch.equal(now, _weights(method.teacher.network.backbone))
        before = now
        terms.append(task.last_batch.terms["gram"].item())
    assert copies == [2, 7, 9]
    assert [term > 0 for term in terms] == [False] * 5 + [True] * 5


def _weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_views_of_the_gram_teacher_are_larger(tmp_path: Path) -> None:
    """Student and teacher see the reduced views; the patches are reduced to the student's grid."""
    task = _task(tmp_path, "method.gram_scale=2", "method.gram_start=0", "method.gram_copy=0")
    next(iter(task.steps()))
    batch, method = task.last_batch, task.loss
    large, (small, _) = batch.all_views[0], batch.input.global_views
    assert [2 * side for side in small.shape[-2:]] == list(large.shape[-2:])
    expected = F.interpolate(large, scale_factor=0.5, mode="bicubic", antialias=True)
    assert torch.equal(small, expected)
    assert batch["gram_patches"].shape == batch.output.features.patches.shape
    grid = method.grid_of(*small.shape[-2:])
    whole = method.gram_teacher(torch.cat(batch.all_views[:2])).tokens.map
    reduced = F.interpolate(whole, size=grid, mode="bicubic").flatten(2).mT
    torch.testing.assert_close(batch["gram_patches"], reduced)


def test_a_given_gram_teacher_is_renewed_as_a_copy_is(tmp_path: Path) -> None:
    tiny.train("dinov3", tmp_path, "early", "train.epochs=1")
    early = f"{tmp_path / 'early'}@{tiny.STEPS_PER_EPOCH}"
    words = [f"method.gram_teacher={early}", "method.gram_start=2", "method.gram_renew_every=2"]
    task = _task(tmp_path, *words)
    task.prepare()
    method, exported = task.loss, tiny.last_state(tmp_path / "early")["method"]
    first = _weights(method.gram_teacher)
    saved = {k: v for k, v in exported.items() if k.startswith("teacher.network.backbone.")}
    names = [name for name, _ in method.gram_teacher.network.backbone.named_parameters()]
    theirs = [saved[f"teacher.network.backbone.{name}"].flatten() for name in names]
    assert torch.equal(first, torch.cat(theirs))
    copies = []
    for _ in task.steps():
        now = _weights(task.loss.gram_teacher)
        copies += [task.steps_done] * (not torch.equal(now, first))
        first = now
    assert copies == [4, 6, 8]


def test_the_gram_stage_goes_on_from_a_run_without_one(tmp_path: Path) -> None:
    """The first stage has no Gram teacher; in the second it is the teacher of the first."""
    tiny.train("dinov3", tmp_path, "first", "train.epochs=1", "method.gram_start=100%")
    first = tiny.last_state(tmp_path / "first")["method"]
    assert not [key for key in first if key.startswith("gram_teacher")]
    (checkpoint,) = (tmp_path / "first" / "checkpoints").glob("*.pt")
    steps = tiny.STEPS_PER_EPOCH
    task = tiny.train(
        *("dinov3", tmp_path, "second", f"resume={checkpoint}", "train.epochs=2"),
        *(f"method.gram_start={steps}", "method.gram_copy=0", "method.gram_renewals=0"),
    )
    second = tiny.last_state(tmp_path / "second")["method"]
    copied = {key: item for key, item in second.items() if key.startswith("gram_teacher.")}
    assert copied
    for key, item in copied.items():
        assert torch.equal(item, first[key.removeprefix("gram_")])
    assert task.last_batch.terms["gram"] > 0


def test_a_gram_teacher_of_another_architecture(tmp_path: Path) -> None:
    task = _task(tmp_path, "method.gram_teacher={model: timm:test_vit, weights: none}")
    with pytest.raises(
        UserError, match=r"method\.gram_teacher: it must be of the same architecture"
    ):
        task.prepare()


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"gram_copy=4: the Gram teacher is copied at step 4, after"
    ):
        _task(tmp_path, "method.gram_copy=4", "method.gram_start=3").prepare()
    for size in ("patch_out_dim", "patch_hidden_dim", "patch_bottleneck"):
        with pytest.raises(ConfigError, match="tied_heads: images and patches share one head"):
            _task(tmp_path, "method.tied_heads=true", f"method.{size}=8")
    with pytest.raises(ConfigError, match=r"koleo_group_size: 16 images .* groups of 3"):
        _task(tmp_path, "method.koleo_group_size=3")
    with pytest.raises(ConfigError, match=r"koleo_neighbors: an image has 3 others .* not 4"):
        _task(tmp_path, "method.koleo_group_size=4", "method.koleo_neighbors=4")


def test_neighbors_and_groups_of_koleo_are_those_of_the_config(tmp_path: Path) -> None:
    task = _task(
        tmp_path, "method.koleo_weight=0.5", "method.koleo_group_size=4", "method.koleo_neighbors=2"
    )
    next(iter(task.steps()))
    batch = task.last_batch
    pooled = batch.output.features.pooled.detach().chunk(2)
    terms = [koleo(group, neighbors=2) for view in pooled for group in view.split(4)]
    assert batch.terms["koleo"].item() == pytest.approx(sum(map(float, terms)) / 8, abs=1e-5)


def test_heads_of_other_sizes(tmp_path: Path) -> None:
    task = _task(
        tmp_path,
        *("method.patch_out_dim=24", "method.patch_hidden_dim=40", "method.patch_bottleneck=8"),
    )
    next(iter(task.steps()))
    predicted = task.last_batch.output.prediction
    assert predicted.images.shape[-1] != predicted.patches.shape[-1] == 24
    assert task.base_model.patch_head.last_layer.weight.shape == (24, 8)
