"""DINOv2 against the figures of the authors' code and of iBOT's, loops, and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minitask import MiniTask, TinyTokens, largest_difference
from ranks import run_ranks
from selftask.batch import Batch, total
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.dinov2 import DINOv2, Masks, Predictions, patch_cross_entropy
from selftask.models.features.tokens import Features, Tokens
from selftask.models.network import PatchOutput

SMALL: dict[str, Any] = {
    "out_dim": 5,
    "hidden_dim": 7,
    "bottleneck": 4,
    "freeze_last_layer": 2,
    "teacher_temperature": {"name": "constant", "start": 0.07, "warmup": 2, "warmup_start": 0.04},
    "momentum": 0.9,
}
NUM_PATCHES = 9


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Inputs of the figures: standard normal numbers times ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def bits(seed: int, *shape: int, share: float) -> Tensor:
    """Masks of the figures: true below the quantile ``share``."""
    values = draw(seed, *shape)
    return values < values.flatten().sort().values[int(share * values.numel())]


def _method(**config: Any) -> DINOv2:
    return DINOv2(DINOv2.Config(**{"out_dim": 16, **config})).double()


def _output(pooled: Tensor, images: Tensor, patches: Tensor) -> PatchOutput:
    """Output for pooled features (2 * B, E) of the global views, and scores of the two heads."""
    tokens = Tokens(pooled[:, None], None, pooled[:, :0, None])
    return PatchOutput(Predictions(images, patches), Features(pooled, tokens, {}))


def _masks(mask: Tensor) -> Masks:
    counts = mask.sum(dim=1)
    weights = (1 / counts.double()).repeat_interleave(counts)
    return Masks(mask, mask.flatten().nonzero().squeeze(1), weights)


# From ``SSLMetaArch.forward_backward`` of facebookresearch/dinov2, with the identity as heads. It
# logs half of its KoLeo and iBOT terms; Sinkhorn runs in float32 there, in float64 here.
FIGURES = {
    "sinkhorn": {
        "loss": 35.12852908397436,
        "dino_local": 11.112076459214501,
        "dino_global": 3.8198077124691956,
        "koleo": 2 * -0.022219977247973713,
        "ibot": 2 * 10.120542433393306,
        "grad_cls": 0.8629845073459752,
        "grad_patches": 2.486493960388012,
        "grad_local": 1.86890618512717,
    },
    "centering0": {
        "loss": 36.94368284834326,
        "dino_local": 12.248302402589418,
        "dino_global": 3.5651312697400432,
        "koleo": 2 * -0.022219977247973713,
        "ibot": 2 * 10.587344565254874,
        "grad_cls": 0.9078130788110208,
        "grad_patches": 2.676744389106757,
        "grad_local": 2.1214156221086395,
    },
    "centering1": {
        "loss": 36.835139974115336,
        "dino_local": 12.18594692292012,
        "dino_global": 3.5845989983109843,
        "koleo": 2 * -0.022219977247973713,
        "ibot": 2 * 10.55451700369009,
        "grad_cls": 0.9069929448256561,
        "grad_patches": 2.670984302291824,
        "grad_local": 2.1067542162754282,
    },
}


def _figures(targets: str, centers: Tensor | None = None) -> tuple[dict[str, float], Tensor]:
    """Ours for the same inputs: 4 images, 2 global and 3 local views; and the scores' means."""
    method = _method(targets=targets, teacher_temperature=0.07)
    if centers is not None:
        method.centers.copy_(centers)
    cls, patches, local = draw(0, 8, 16), draw(1, 8, 9, 16), draw(2, 12, 16)
    for x in (cls, patches, local):
        x.requires_grad_()
    masks = _masks(bits(5, 8, 9, share=0.4))
    teacher = draw(3, 8, 16, scale=0.3), draw(4, 8, 9, 16, scale=0.3)[masks.mask]
    images, of_patches = (
        method.targets(scores, center, 0.07)
        for scores, center in zip(teacher, method.centers, strict=True)
    )
    added = {"masks": masks, "image_targets": images.view(2, 4, 16), "patch_targets": of_patches}
    scores = torch.cat([cls, local]).view(5, 4, 16)
    output = _output(cls, scores, patches[masks.mask])
    terms = method(output, _batch(**added))
    total(terms).backward()
    gradients = {"grad_cls": cls.grad, "grad_patches": patches.grad, "grad_local": local.grad}
    figures = {name: term.item() for name, term in terms.items()}
    figures |= {name: g.norm().item() for name, g in gradients.items() if g is not None}
    return {"loss": sum(t.item() for t in terms.values()), **figures}, torch.stack(
        [scores.mean(dim=0) for scores in teacher]
    )


def _batch(**added: Any) -> Batch:
    none = torch.empty(0, dtype=torch.int64)
    return Batch(views={}, labels=none, index=none, key=none, added=added)


def test_sinkhorn_is_that_of_the_authors_code() -> None:
    figures, _ = _figures("sinkhorn")
    assert figures == pytest.approx(FIGURES["sinkhorn"], rel=1e-5)


def test_centering_is_that_of_the_authors_code_over_two_steps() -> None:
    figures, means = _figures("centering")
    assert figures == pytest.approx(FIGURES["centering0"], rel=1e-9)
    figures, _ = _figures("centering", 0.1 * means)
    assert figures == pytest.approx(FIGURES["centering1"], rel=1e-9)


# From ``iBOTLoss`` of bytedance/ibot, over two steps: loss of patches, norm of its gradient.
IBOT = [(19.20057182635572, 2.3578126910474198), (20.2587609698416, 2.279590767371885)]


def test_patches_are_those_of_ibots_code() -> None:
    """There the loss is over all patches, weighted by the mask, and centers are of all patches."""
    center = torch.zeros(20, dtype=torch.float64)
    for step, (expected, gradient) in enumerate(IBOT):
        first = 100 * step
        student = draw(first + 1, 8, 9, 20).requires_grad_()
        teacher = draw(first + 3, 8, 9, 20, scale=0.3)
        views = [bits(first + 5 + view, 4, 3, 3, share=0.4).flatten(1) for view in range(2)]
        masks = _masks(torch.cat(views))
        targets = F.softmax((teacher - center) / 0.07, dim=2)[masks.mask]
        scores, weights = student[masks.mask], masks.weights
        loss = patch_cross_entropy(scores, targets, weights, temperature=0.1) / 8
        loss.backward()
        assert student.grad is not None
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        assert student.grad.norm().item() == pytest.approx(gradient, rel=1e-9)
        center = 0.9 * center + 0.1 * teacher.mean(dim=(0, 1))


def test_loss_of_images_is_a_mean_over_pairs_as_loops() -> None:
    method = _method(ibot_weight=0.0, koleo_weight=0.0)
    scores, targets = draw(0, 4, 3, 16), F.softmax(draw(1, 2, 3, 16), dim=2)
    terms = []
    for t in range(2):
        for v in range(4):
            if v == t:
                continue
            for b in range(3):
                exps = [math.exp(s / 0.1) for s in scores[v, b].tolist()]
                logs = [math.log(e / sum(exps)) for e in exps]
                pairs = zip(targets[t, b].tolist(), logs, strict=True)
                terms.append(-sum(p * q for p, q in pairs))
    masks = _masks(torch.zeros(6, NUM_PATCHES, dtype=torch.bool))
    batch = _batch(masks=masks, image_targets=targets, patch_targets=draw(2, 0, 16))
    loss = method(_output(draw(3, 6, 6), scores, draw(4, 0, 16)), batch)
    assert total(loss).item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)
    assert loss["ibot"].item() == 0.0


def _task(sizes: tuple[int, ...] = (9, 9, 6), **config: Any) -> MiniTask:
    task = MiniTask("dinov2", {**SMALL, **config}, backbone=TinyTokens, sizes=(8, 8))
    draws = torch.Generator().manual_seed(7)
    shapes = [(24, 3, size, size) for size in sizes]
    task.views = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    return task


def test_local_views_of_several_sizes() -> None:
    """A view's scores do not depend on the sizes of the other views."""
    several, one = _task((9, 9, 6, 3, 6)), _task((9, 9, 6))
    one.views = several.views[:3]
    together, alone = (task.forward(torch.arange(4)).output for task in (several, one))
    assert together.prediction.images.shape == (5, 4, 5)
    assert torch.allclose(together.prediction.images[:3], alone.prediction.images, atol=1e-12)
    assert several.run(1).losses


def test_about_half_of_the_views_are_masked_by_a_tenth_to_a_half() -> None:
    method = _method()
    key = torch.stack([torch.zeros(400, dtype=torch.long), torch.arange(400)], dim=1)
    masks = method.draw_masks(0, key, (14, 14))
    counts = masks.mask.sum(dim=1)
    is_masked = counts > 0
    assert 0.43 < is_masked.float().mean() < 0.57
    assert counts.max() <= 98
    assert 0.2 < (counts[is_masked] / 196).mean() < 0.35
    assert (is_masked[:400] & is_masked[400:]).any() and (is_masked[:400] ^ is_masked[400:]).any()
    assert torch.equal(masks.mask.flatten()[masks.indices], torch.ones(len(masks.indices)).bool())
    sums = torch.zeros(800).index_add(0, masks.indices // 196, masks.weights)
    assert torch.allclose(sums, is_masked.float(), atol=1e-5)


def test_the_student_sees_masked_patches_as_the_token_and_the_teacher_all() -> None:
    task = _task(mask_probability=1.0, mask_ratio=[0.5, 0.5])
    batch = task.forward(torch.arange(8))
    masks = batch["masks"]
    assert masks.mask.any(dim=1).all()
    network, teacher = task.base_model, task.loss.teacher.network
    images = torch.cat(batch.all_views[:2])
    seen = network.backbone.extract(images, mask=masks.mask, mask_token=network.mask_token)
    whole = teacher.backbone.extract(images)
    assert torch.equal(batch.output.features.pooled, seen.pooled)
    expected = network.patch_head(seen.tokens.patches[masks.mask])
    assert torch.allclose(batch.output.prediction.patches, expected, rtol=0, atol=1e-12)
    local = network.head(network.backbone.extract(batch.all_views[2]).pooled)
    assert torch.allclose(batch.output.prediction.images[2], local, rtol=0, atol=1e-12)
    targets = task.loss.targets(teacher.patch_head(whole.tokens.patches[masks.mask]), 0.0, 0.04)
    assert torch.allclose(batch["patch_targets"], targets, rtol=0, atol=1e-9)


def test_the_temperature_of_the_targets_warms_up_by_the_step() -> None:
    task, seen = _task(), []
    targets = task.loss.targets

    def note(scores: Tensor, center: Any, temperature: float) -> Tensor:
        seen.append(temperature)
        return targets(scores, center, temperature)

    task.loss.targets = note
    task.run(3)
    # Twice a step: of the class token and of the patches.
    assert seen == pytest.approx([0.04, 0.04, 0.055, 0.055, 0.07, 0.07])


def test_heads_are_tied_or_not() -> None:
    tied, untied = _task(tied_heads=True).base_model, _task().base_model
    assert tied.head is tied.patch_head
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 7


def test_last_layers_wait_and_the_mask_token_is_trained() -> None:
    task = _task(norm_last_layer=False)
    heads = task.base_model.head, task.base_model.patch_head
    last = [parameter for head in heads for parameter in head.last_layer.parameters()]
    before = [parameter.clone() for parameter in last]
    task.run(2)
    assert len(last) == 4 and all(torch.equal(*pair) for pair in zip(last, before, strict=True))
    assert task.base_model.mask_token.abs().sum() > 0
    task.run(1)
    assert not any(torch.equal(*pair) for pair in zip(last, before, strict=True))


def test_centres_follow_the_mean_scores_of_an_update() -> None:
    task = _task(targets="centering")
    batch = task.forward(torch.arange(8))
    teacher = task.loss.teacher.network
    tokens = teacher.backbone.extract(torch.cat(batch.all_views[:2]))
    images = teacher.head(tokens.pooled).mean(dim=0)
    patches = teacher.patch_head(tokens.tokens.patches[batch["masks"].mask]).mean(dim=0)
    task.loss.pending.clear()
    task.run(1)
    expected = 0.1 * torch.stack([images, patches])
    assert torch.allclose(task.loss.centers, expected, rtol=0, atol=1e-12)


def test_centers_are_resumed() -> None:
    whole, half = _task(targets="centering").run(5), _task(targets="centering").run(2)
    rest = _task(targets="centering").resume(half.state()).run(3)
    assert half.losses + rest.losses == whole.losses
    assert torch.equal(rest.loss.centers, whole.loss.centers)


def test_centers_and_entropy_are_those_of_all_ranks() -> None:
    """Also if ranks have different numbers of masked patches."""
    alone = _four_updates(0)
    for one in run_ranks(_four_updates, 2):
        assert largest_difference(one, alone) < 1e-9


def _four_updates(rank: int) -> dict[str, Any]:
    task = _task(targets="centering").run(4)
    return {**task.state(), "target_entropy": task.logged["target_entropy"]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.mask_ratio=[0.5,0.1]", "the smallest and the largest share"),
        ("method.mask_ratio=[0.1,1.5]", "must be at most 1"),
        ("method.targets=softmax", "sinkhorn"),
        ("method.temperature=0", "must be above 0"),
    ],
)
def test_impossible_configs_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("dinov2", [override])
