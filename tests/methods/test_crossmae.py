"""CrossMAE against the figures of the authors' code, and what its decoder sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor

from figures import draw
from minitask import MiniTask, predicted
from selftask.batch import Batch
from selftask.errors import UserError
from selftask.methods.crossmae import CrossMAE
from selftask.methods.mae import MAE, normalize, patchify
from selftask.models.features.tokens import gather_tokens
from selftask.models.predictors.memory_predictor import MemoryBlock, MemoryPredictor

SMALL = {"decoder_dim": 8, "decoder_depth": 2, "decoder_heads": 2, "predicted_ratio": 0.25}
# seeds 0 and 500: loss, norm of its gradient, norm of the targets
FIGURES = [
    (1.94081603520745, 0.07109295622647437, 38.78141858672818),
    (2.0889078917147694, 0.0737554357409713, 38.78141785208757),
]


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors(case: int) -> None:
    seed, num_patches = 500 * case, 16
    images = draw(seed, 4, 3, 16, 16)
    first = draw(seed + 2, 4, num_patches).argsort(dim=1)[:, : num_patches // 2]
    predict = first.sort(dim=1).values  # a bool mask in the authors' code
    pixels = normalize(gather_tokens(patchify(images, 4), predict))
    prediction = draw(seed + 1, 4, num_patches // 2, 48).requires_grad_()
    method = CrossMAE(CrossMAE.Config())
    batch = Batch(views={}, labels=predict[:, 0], index=predict[:, 0], key=predict[:, :2])
    batch["pixels"] = pixels
    loss = method(predicted(prediction[:, None]), batch)
    (gradient,) = torch.autograd.grad(loss, prediction)
    computed = (loss.item(), gradient.norm().item(), pixels.norm().item())
    assert computed == pytest.approx(FIGURES[case], rel=1e-9)


@pytest.mark.parametrize(("share", "count"), [(0.25, 49), (0.5, 98), (0.75, 147)])
def test_as_many_patches_as_in_the_authors_code(share: float, count: int) -> None:
    method = CrossMAE(CrossMAE.Config(predicted_ratio=share))
    assert method.num_kept((14, 14)) == 49
    assert method.num_predicted((14, 14)) == count
    key = torch.tensor([[0, 5], [0, 6]])
    mask = method.draw_mask(1, key, (14, 14))
    of_mae = MAE(MAE.Config()).draw_mask(1, key, (14, 14))
    assert torch.equal(mask.keep, of_mae.keep)
    assert torch.equal(mask.predict, of_mae.predict[..., :count])


def test_more_than_the_masked_patches_cannot_be_predicted() -> None:
    method = CrossMAE(CrossMAE.Config(predicted_ratio=0.8))
    with pytest.raises(UserError, match=r"predicted_ratio=0\.8 is 156 of 196 .* 1 to 147 can"):
        method.num_predicted((14, 14))


def _vit() -> VisionTransformer:
    """16 patches of 2 x 2 pixels, two blocks."""
    return VisionTransformer(
        img_size=8, patch_size=2, embed_dim=12, depth=2, num_heads=2, num_classes=0
    )


def test_a_prediction_does_not_depend_on_other_predictions() -> None:
    predictor = MemoryPredictor(12, (4, 4), 2, dim=8, depth=2, num_heads=2, num_out=5).double()
    layers = [draw(1, 3, 7, 12), draw(2, 3, 7, 12)]
    predict = torch.tensor([[3, 9, 14]] * 3)
    together = predictor(layers, predict, (4, 4))
    for position in range(3):
        alone = predictor(layers, predict[:, position, None], (4, 4))[:, 0]
        assert torch.allclose(together[:, position], alone, rtol=1e-12)


def test_a_block_is_attention_as_written_out() -> None:
    """Softmax of scaled products for each head, in loops."""
    block = MemoryBlock(4, 6, 2).double()
    x, memory = draw(3, 1, 2, 4), draw(4, 1, 3, 6)
    queries = block.query(block.norm_queries(x))[0]
    keys, values = block.key_value(block.norm_memory(memory))[0].split(4, dim=1)
    expected = torch.zeros_like(queries)
    for query in range(2):
        for head in (slice(0, 2), slice(2, 4)):
            scores = keys[:, head] @ queries[query, head] / 2**0.5
            expected[query, head] = scores.softmax(dim=0) @ values[:, head]
    middle = x + block.project(expected)
    assert torch.allclose(block(x, memory), middle + block.mlp(block.norm_mlp(middle)), rtol=1e-12)


def test_each_block_reads_its_mixture_of_layers_and_all_are_trained() -> None:
    task = MiniTask("crossmae", SMALL, backbone=_vit, sizes=(8,))
    task.run(1)
    network = task.base_model
    assert network.head.mixture.shape == (2, 2)
    trained = [(n, p) for n, p in network.named_parameters() if p.requires_grad]
    without = [name for name, parameter in trained if parameter.grad is None]
    assert without == []
    assert task.last_batch.output.prediction.shape[1:] == (1, 4, 12)


def test_the_decoder_reads_all_layers_of_the_encoder_the_last_one_normalized() -> None:
    task = MiniTask("crossmae", SMALL, backbone=_vit, sizes=(8,))
    network: Any = task.base_model
    outputs: list[Tensor] = []
    read: list[Tensor] = []
    for block in network.backbone.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    network.head.register_forward_pre_hook(lambda module, inputs: read.extend(inputs[0]))
    task.forward(torch.arange(4))
    expected = [outputs[0], network.backbone.norm(outputs[1])]
    torch.testing.assert_close(read, expected)


def test_the_picture_shows_what_was_kept_and_what_was_predicted() -> None:
    task = MiniTask("crossmae", SMALL, backbone=_vit, sizes=(8,))
    batch = task.forward(torch.arange(4))
    shown = task.loss.visualize(batch.output, batch)
    masked, filled = (patchify(shown[name], 2) for name in ("masked", "reconstruction"))
    images: Tensor = patchify(batch.all_views[0], 2)
    for image in range(4):
        keep = batch["mask"].keep[image].tolist()
        predict = batch["mask"].predict[image, 0].tolist()
        for patch in range(16):
            assert torch.equal(masked[image, patch], images[image, patch] * (patch in keep))
            changed = not torch.equal(filled[image, patch], masked[image, patch])
            assert changed == (patch in predict)
