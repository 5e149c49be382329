"""CAE against the figures of mmselfsup, and what its networks see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from figures import draw
from minitask import loss_of, predicted
from selftask.batch import Batch
from selftask.config.schema import FrozenModule
from selftask.methods.cae import CAE, MaskedPredictions, RegressorDecoder
from selftask.models.features.extract import adapter_of
from selftask.models.predictors.patch_predictor import sincos_positions

# open-mmlab/mmselfsup for seeds 0 and 500: both terms, gradients of scores and of features
FIGURES = [
    (2.8696610433557384, 3.3375472388105196, 0.3172047866926985, 0.5777150888466147),
    (3.4882047669105822, 3.405601663317666, 0.33298989477357316, 0.5835753304687978),
]
NUM_TOKENS = 12


def _cae() -> CAE:
    method = CAE(CAE.Config(tokenizer=FrozenModule(model="-")))
    method.num_tokens = NUM_TOKENS
    return method


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_published_code(case: int) -> None:
    seed = 500 * case
    scores = draw(seed + 1, 10, NUM_TOKENS).requires_grad_()
    features = draw(seed + 2, 10, 8).requires_grad_()
    tokens = (torch.arange(10) * 7 % NUM_TOKENS).view(2, 5)
    prediction = MaskedPredictions(
        features.view(2, 5, 8), scores.view(2, 5, NUM_TOKENS), draw(seed + 3, 10, 8).view(2, 5, 8)
    )
    batch = Batch(views={}, labels=tokens, index=tokens, key=tokens, added={"tokens": tokens})
    terms = _cae()(predicted(prediction), batch)
    grads = torch.autograd.grad(sum(terms.values()), (scores, features))
    computed = (*(term.item() for term in terms.values()), *(g.norm().item() for g in grads))
    assert computed == pytest.approx(FIGURES[case], rel=1e-9)


def test_chance_is_the_loss_of_equal_scores_and_of_zeros() -> None:
    targets = draw(0, 2, 5, 8)
    targets = targets / targets.square().mean().sqrt()
    prediction = MaskedPredictions(torch.zeros(2, 5, 8), torch.zeros(2, 5, NUM_TOKENS), targets)
    tokens, method = torch.zeros(2, 5, dtype=torch.int64), _cae()
    loss = loss_of(method, predicted(prediction), tokens=tokens)
    assert loss.item() == pytest.approx(method.chance_loss)


def test_the_decoder_sees_predicted_features_and_positions_alone() -> None:
    head: Any = RegressorDecoder(8, (4, 4), dim=16, depth=2, num_heads=2, num_tokens=6).double()
    predict = torch.tensor([[3, 9, 14]])
    first, second = (head(draw(seed, 1, 6, 8), predict, (4, 4)) for seed in (0, 1))
    assert not torch.allclose(first[1], second[1])
    head.regressor.forward = lambda *args: first[0]
    again = head(draw(1, 1, 6, 8), predict, (4, 4))
    assert torch.equal(again[1], first[1])
    head.regressor.forward = lambda *args: torch.ones(1, 3, 8, dtype=torch.float64)
    (scores,) = head(draw(1, 1, 6, 8), predict, (4, 4))[1]
    assert not torch.allclose(scores[0], scores[1])


def test_tokens_are_those_of_the_masked_patches(tmp_path: Path) -> None:
    """And a network that loads no weights has fixed sine-cosine positions."""
    task = tiny.task("cae", tmp_path, "run", "method.mask_ratio=0.25")
    task.prepare()
    positions = adapter_of(task.base_model.backbone).positions
    assert not positions.requires_grad
    width = positions.shape[-1]
    assert torch.equal(positions[0, -64:].detach(), sincos_positions(width, (8, 8)))
    task.on_start(), task.on_phase_start(), task.step()
    batch, predict = task.last_batch, task.last_batch["mask"].predict[:, 0]
    tokens = task.loss.tokenizer.on_grid(batch.all_views[0], (8, 8))
    assert predict.shape[1] == 16 and len(tokens.unique()) > 1
    for image, numbers in enumerate(predict.tolist()):
        assert batch["tokens"][image].tolist() == [tokens[image, n].item() for n in numbers]
    task.close()


def test_targets_are_the_masked_patches_encoded_alone(tmp_path: Path) -> None:
    """They need no gradient, and neither side sees the pixels of the other."""
    task = tiny.task("cae", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, network = task.last_batch, task.base_model.eval()
    images, mask = batch.all_views[0], batch["mask"]
    predict = mask.predict[:, 0]
    output = network((images, mask)).prediction
    expected = network.extract(images, keep=predict).patches
    torch.testing.assert_close(output.targets, expected)
    assert not output.targets.requires_grad and output.features.requires_grad
    assert torch.equal(torch.cat([mask.keep, predict], 1).sort(1).values[0], torch.arange(64))

    def blanked(patches: Tensor) -> Any:
        """MaskedPredictions for images in which these patches are black."""
        side = images.shape[-1] // 8
        blank = images.unflatten(2, (8, side)).unflatten(4, (8, side)).clone()  # B C 8 s 8 s
        for image, numbers in enumerate(patches.tolist()):
            for number in numbers:
                blank[image, :, number // 8, :, number % 8] = 0
        return network((blank.flatten(4, 5).flatten(2, 3), mask)).prediction

    without_masked, without_kept = blanked(predict), blanked(mask.keep)
    torch.testing.assert_close(without_masked.features, output.features)
    assert not torch.allclose(without_masked.targets, output.targets)
    torch.testing.assert_close(without_kept.targets, output.targets)
    assert not torch.allclose(without_kept.features, output.features)
    task.close()
