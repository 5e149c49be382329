"""I-JEPA against its paper, its published arithmetic, lightly and itself on two ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor

from minitask import MiniTask, loss_of, predicted
from selftask.batch import Batch
from selftask.config.config_class import config_class
from selftask.errors import UserError
from selftask.methods.families.masked_patches import Kept
from selftask.methods.ijepa import IJEPA
from selftask.models.predictors.patch_predictor import sincos_positions
from selftask.registry import METHODS

SMALL: dict[str, Any] = {"predictor_dim": 8, "predictor_depth": 2, "predictor_heads": 2}


def _vit(**args: Any) -> VisionTransformer:
    """64 patches of one pixel."""
    sizes = {"img_size": 8, "patch_size": 1, "embed_dim": 12, "depth": 2, "num_heads": 2}
    layout = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    return VisionTransformer(num_classes=0, **{**sizes, **layout, **args})


def _task(**config: Any) -> MiniTask:
    return MiniTask("ijepa", {**SMALL, **config}, backbone=_vit, sizes=(8,), lr=0.1)


def _forward(task: MiniTask, index: Tensor | None = None) -> tuple[Batch, Tensor]:
    """A batch of four images and what the network predicts of their targets."""
    batch = task.forward(torch.arange(4) if index is None else index)
    return batch, batch.output.prediction


# -- the loss ----------------------------------------------------------------------------------


def test_loss_is_that_of_the_paper() -> None:
    """Section 3, with the code's smooth L1: a mean over images, blocks, patches and features."""
    task = _task()
    task.run(2)  # a teacher that is not the student
    batch, output = _forward(task)
    indices, padding = batch["mask"].predict, batch["mask"].predict_padding
    features = task.loss.teacher.network.backbone.forward_features(batch.all_views[0])
    total = 0.0
    for image in range(4):
        for block in range(4):
            of_block = []
            for place in range(indices.shape[2]):
                if padding[image, block, place]:
                    continue
                wanted = features[image, indices[image, block, place]].tolist()
                mean = sum(wanted) / 12
                variance = sum((x - mean) ** 2 for x in wanted) / 12
                wanted = [(x - mean) / math.sqrt(variance + 1e-5) for x in wanted]
                guess = output[image, block, place].tolist()
                far = [abs(a - b) for a, b in zip(guess, wanted, strict=True)]
                of_block.append(sum(d - 0.5 if d > 1 else d * d / 2 for d in far) / 12)
            total += sum(of_block) / len(of_block) / 4
    loss = task.loss(predicted(output), batch)
    assert loss.item() == pytest.approx(total / 4, rel=1e-9)


def test_loss_of_equal_blocks_is_the_published_one() -> None:
    method = IJEPA(IJEPA.Config())
    output, features = torch.randn(2, 3, 4, 5, 6).unbind()
    padding = torch.zeros(3, 4, 5, dtype=torch.bool)
    added = {"features": features, "mask": Kept(*[None] * 3, padding)}
    expected = F.smooth_l1_loss(output, features)
    assert loss_of(method, predicted(output), **added).item() == pytest.approx(
        expected.item(), rel=1e-6
    )
    assert loss_of(method, predicted(features), **added).item() == 0.0
    padding[0, 1, 2:] = True
    output[0, 1, 2:] = 1e6  # what fills rows does not count
    assert loss_of(method, predicted(output), **added).item() < 2


def test_predictions_are_those_of_lightly() -> None:
    """Its predictor takes blocks of one size, without padding."""
    modules = pytest.importorskip("lightly.models.modules.ijepa_timm")
    task = _task()
    ours = task.base_model.head
    theirs = modules.IJEPAPredictorTIMM(
        num_patches=64, depth=2, mlp_dim=12, predictor_embed_dim=8, num_heads=2
    ).double()
    theirs.predictor_embed.load_state_dict(ours.embed.state_dict())
    theirs.predictor_proj.load_state_dict(ours.project.state_dict())
    theirs.decoder.norm.load_state_dict(ours.norm.state_dict())
    theirs.decoder.blocks.load_state_dict(ours.blocks.state_dict())
    theirs.decoder.mask_token.data.copy_(ours.mask_token.data)
    encoded = torch.randn(3, 20, 12, dtype=torch.float64)
    keep = torch.stack([torch.randperm(64)[:20] for _ in range(3)])
    predict = torch.stack([torch.randperm(64)[:28].view(4, 7) for _ in range(3)])  # (B, M, Q)
    expected = theirs(encoded.clone(), keep, list(predict.unbind(dim=1)))  # (M * B, Q, E)
    expected = expected.unflatten(0, (4, 3)).transpose(0, 1)
    # the table of positions is in double precision here and was rounded there
    assert torch.allclose(ours(encoded, keep, predict), expected, rtol=0, atol=1e-5)


# -- the network -------------------------------------------------------------------------------


def test_only_the_context_reaches_the_network() -> None:
    task = _task()
    images = task.views[0][:4].clone().requires_grad_()
    batch = task.batch(torch.arange(4))
    mask = batch.input[1]
    task.base_model((images, mask)).prediction.sum().backward()
    seen = images.grad.abs().sum(dim=1).flatten(1) > 0  # (4, 64)
    for image in range(4):
        shown = mask.keep[image][~mask.padding[image]]
        assert seen[image].nonzero().flatten().tolist() == shown.sort().values.tolist()


def test_views_of_another_size_have_blocks_of_their_own_grid() -> None:
    method, key = _task().loss, torch.arange(12).view(6, 2)
    (keep, padding), (predict, predict_padding) = method.build_masks((5, 6)).draw(3, key)
    drawn = method.draw_blocks(3, key, (5, 6))
    assert all(map(torch.equal, drawn, (keep, predict, padding, predict_padding)))
    assert predict.max() < 30 == method.masks.num_patches


def test_an_image_is_predicted_alone_as_in_any_batch() -> None:
    task = _task()
    batch, output = _forward(task, torch.arange(8))
    wanted = ~batch["mask"].predict_padding
    assert bool((~wanted).any())  # blocks do differ in size
    for image in range(8):
        _, alone = _forward(task, torch.tensor([image]))
        inside = wanted[image]
        assert torch.allclose(alone[0][inside], output[image][inside], rtol=0, atol=1e-12)


def test_teacher_is_an_average_and_what_is_kept() -> None:
    """theta' <- m theta' + (1 - m) theta, with m rising linearly to 1."""
    task = _task(momentum={"name": "linear", "start": 0.9, "end": 1.0})
    for update in range(3):
        where = update / 9
        teacher = [p.clone() for p in task.loss.teacher.parameters()]
        task.run(1)
        momentum = 0.9 + 0.1 * where
        student = task.base_model.backbone.parameters()
        for old, new, own in zip(teacher, task.loss.teacher.parameters(), student, strict=True):
            assert torch.allclose(new, momentum * old + (1 - momentum) * own, rtol=0, atol=1e-12)
            assert not new.requires_grad
    exported = task.loss.export_backbone(task.base_model)
    assert exported is task.loss.teacher.network.backbone
    _vit().double().load_state_dict(exported.state_dict(), strict=True)
    assert exported(task.views[0][:2]).shape == (2, 12)


def test_embedding_is_the_mean_of_the_context() -> None:
    task = _task()
    batch = task.batch(torch.arange(2))
    task.base_model(batch.input)
    vit = task.base_model.backbone
    keep, padding = batch.input[1].keep, batch.input[1].padding
    for image in range(2):
        own = keep[image][~padding[image]]
        tokens = vit.patch_embed(batch.all_views[0][image : image + 1]) + vit.pos_embed
        mean = vit.norm(vit.blocks(tokens[:, own])).mean(dim=1)[0]
        assert torch.allclose(task.base_model.embedding[image], mean, rtol=0, atol=1e-12)


def test_registers_and_class_token_go_along() -> None:
    layout = {"class_token": True, "reg_tokens": 2}
    task = MiniTask("ijepa", SMALL, backbone=lambda: _vit(**layout), sizes=(8,), lr=0.1)
    task.run(3)
    assert all(math.isfinite(loss) for loss in task.losses)


@pytest.mark.parametrize("std", [0.02, None])
def test_weights_start_as_the_published_code_leaves_them(std: float | None) -> None:
    """0.02 in every block (fix_init_weight is undone there); or 1 / sqrt(3 n), / sqrt(2 l)."""
    network = _task(predictor_dim=48, init_std=std).base_model
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    }
    assert len(layers) == 2 * 4 + 2 * 4 + 3  # two blocks each; patches, embed, project
    for name, layer in layers.items():
        expected = std or 1 / math.sqrt(3 * layer.weight[0].numel())
        if std is None and name.endswith(("attn.proj", "mlp.fc2")):
            expected /= math.sqrt(2 * (int(name.split(".")[2]) + 1))
        deviation = layer.weight.detach().std().item()
        assert deviation == pytest.approx(expected, rel=0.25 if layer.weight.numel() < 99 else 0.1)
        assert not layer.bias.any()


def test_positions_are_fixed_and_loaded_weights_stay() -> None:
    vit = _task().base_model.backbone
    assert torch.equal(vit.pos_embed[0].float(), sincos_positions(12, (8, 8)))
    assert not vit.pos_embed.requires_grad

    loaded = _vit()
    weights = {key: value.clone() for key, value in loaded.state_dict().items()}
    config = SimpleNamespace(init=SimpleNamespace(backbone="weights.pt"))
    IJEPA(IJEPA.Config(**SMALL)).build_network(loaded, SimpleNamespace(config=config))
    assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())


# -- the run -----------------------------------------------------------------------------------


def test_ijepa_training_lowers_the_loss() -> None:
    losses = _task().run(8).losses
    assert losses[-1] < 0.98 * losses[0]


def test_impossible_configs_are_told() -> None:
    schema: Any = config_class(METHODS, "ijepa")
    wrong = schema(
        target_scale=(0.5, 0.2),
        context_scale=(0.5, 1.5),
        target_ratio=(2.0, 1.0),
        predictor_dim=30,
    )
    whole = {"backbone": {"name": "vit_tiny", "pool": "token"}}
    keys = [problem.partition(":")[0] for problem in wrong.problems(whole)]
    expected = ["backbone.pool", "target_scale", "context_scale", "target_ratio", "predictor_dim"]
    assert keys == expected
    backbone = {"name": "vit_tiny", "patch_size": 16, "pool": "avg"}
    right = {"backbone": backbone}
    assert not list(schema().problems(right))
    long = schema(target_scale=(0.15, 0.8)).problems(right)
    assert [problem.partition(":")[0] for problem in long] == ["target_ratio"]


def test_what_only_the_backbone_shows_is_told() -> None:
    with pytest.raises(UserError, match="gives one vector an image"):
        MiniTask("ijepa", SMALL)
    pooled = {"class_token": True, "global_pool": "token"}
    with pytest.raises(UserError, match="global_pool: avg"):
        MiniTask("ijepa", SMALL, backbone=lambda: _vit(**pooled), sizes=(8,))
    with pytest.raises(UserError, match="smaller than a patch where there are 1x1; raise target_s"):
        MiniTask("ijepa", SMALL, backbone=lambda: _vit(patch_size=8), sizes=(8,))
    with pytest.raises(UserError, match="raise context_scale"):
        MiniTask("ijepa", {**SMALL, "context_scale": (0.001, 1.0)}, backbone=_vit, sizes=(8,))
