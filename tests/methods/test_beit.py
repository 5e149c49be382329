"""BEiT against the figures of its authors' code, and its tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from figures import draw
from minitask import loss_of, predicted
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.beit import BEiT
from selftask.models.block_mask import BlockMask
from selftask.models.distillation.patch_targets import TokenTargets
from selftask.models.features.tokens import gather_tokens

# microsoft/unilm beit for seeds 0 and 500: loss, gradient of the scores
LOSS = [(4.034517752500845, 0.3186669624292439), (3.634568683286762, 0.3132261727929537)]


def _beit(num_tokens: int) -> BEiT:
    method = BEiT(BEiT.Config(tokenizer=FrozenModule(model="-")))
    method.num_tokens = num_tokens
    return method


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors_code(case: int) -> None:
    scores = draw(500 * case, 10, 32).requires_grad_()
    tokens = (torch.arange(10) * 7 % 32).view(2, 5)
    hidden = (torch.empty(0), torch.zeros(2, 5, dtype=torch.bool))
    loss = loss_of(_beit(32), predicted(scores.view(2, 5, 32)), tokens=tokens, hidden=hidden)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert (loss.item(), gradient.norm().item()) == pytest.approx(LOSS[case], rel=1e-9)


def test_padding_does_not_count_and_images_weigh_the_same() -> None:
    scores, tokens = draw(1, 2, 4, 6), torch.tensor([[0, 5, 2, 1], [3, 4, 0, 0]])
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    of_image = []
    for image, number in ((0, 4), (1, 2)):
        log_probs = [scores[image, row].log_softmax(0) for row in range(number)]
        terms = [-log_probs[row][tokens[image, row]].item() for row in range(number)]
        of_image.append(sum(terms) / number)
    added = {"tokens": tokens, "hidden": (torch.empty(0), padding)}
    loss = loss_of(_beit(6), predicted(scores), **added)
    assert loss.item() == pytest.approx(sum(of_image) / 2, rel=1e-12)
    padding[1] = True  # nothing is hidden in the second image
    none = loss_of(_beit(6), predicted(scores), **added)
    assert none.item() == pytest.approx(of_image[0] / 2, rel=1e-12)


def test_chance_is_the_loss_of_equal_scores() -> None:
    tokens, padding = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.bool)
    added = {"tokens": tokens, "hidden": (torch.empty(0), padding)}
    method = _beit(6)
    even = loss_of(method, predicted(torch.zeros(2, 4, 6)), **added)
    assert even.item() == pytest.approx(method.chance_loss)


def test_masks_are_those_of_the_authors_code() -> None:
    """The mean number hidden within 3 standard errors of both, and more in the middle."""
    method, grid = _beit(2), (14, 14)
    method.config = BEiT.Config(tokenizer=FrozenModule(model="-"), mask_ratio=75 / 196)
    key = torch.stack([torch.zeros(2000, dtype=torch.int64), torch.arange(2000)], dim=1)
    masks = method.draw_mask(0, key, grid)
    number = masks.sum(dim=1)
    assert number.float().mean().item() == pytest.approx(74.503, abs=3 * 2**0.5 * 0.02155)
    assert number.min() >= 60 and number.max() == 75
    share = masks.float().mean(dim=0).view(grid)
    assert share[0, 0].item() == pytest.approx(0.04, abs=0.02)
    assert share[7, 7].item() == pytest.approx(0.7255, abs=0.05)


# -- tokenizers ------------------------------------------------------------------------------------


class Brightness(nn.Module):
    """Images -> 8 tokens, by the mean of patches of 8 pixels."""

    num_tokens, patch_size = 8, 8

    def forward(self, images: Tensor) -> Tensor:
        means = F.avg_pool2d(images.mean(dim=1, keepdim=True), 8).flatten(1)
        return ((means + 1) * 4).long().clamp(0, 7)


def test_a_run_of_vqkd_is_a_tokenizer(tmp_path: Path) -> None:
    """Its tokens are the codes that its own network gives, also after it was read again."""
    trained = tiny.train("vqkd", tmp_path, "vqkd", "train.epochs=1")
    trained.save_checkpoint()
    task = tiny.task("beit", tmp_path, "run", f"method.tokenizer={tmp_path / 'vqkd'}")
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, (indices, padding) = task.last_batch, task.last_batch["hidden"]
    trained.base_model.eval()
    with torch.no_grad():
        codes = trained.base_model(batch.all_views[0]).prediction.codes  # (B, N)
    assert torch.equal(batch["tokens"], codes.gather(1, indices))
    assert (
        len(codes.unique()) > 1 and task.loss.num_tokens == trained.config.method.args["num_codes"]
    )
    mask = batch["mask"]
    assert torch.equal((~padding).sum(dim=1), mask.sum(dim=1))
    assert mask.gather(1, indices)[~padding].all()
    assert task.model.head.out_features == task.loss.num_tokens
    trained.close(), task.close()


def test_own_tokenizers_see_as_many_patches_as_the_student(tmp_path: Path) -> None:
    """Here patches of 8 pixels, and of 4 in the student: images are enlarged."""
    task = tiny.task("beit", tmp_path, "run", f"method.tokenizer={__name__}:Brightness")
    task.prepare()
    images = draw(3, 2, 3, 16, 16).float()
    twice = F.interpolate(images, scale_factor=2, mode="bicubic", antialias=True)
    assert torch.equal(task.loss.tokenizer.on_grid(images, (4, 4)), Brightness()(twice))
    task.close()


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"method\.tokenizer: a Linear is no tokenizer; it needs"):
        TokenTargets(nn.Linear(2, 2), "method.tokenizer")
    tokenizer = Brightness()
    tokenizer.patch_size = None  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"gives tokens \(4,\) for an image, and .* 4x4 patches"):
        TokenTargets(tokenizer, "method.tokenizer").on_grid(draw(3, 2, 3, 16, 16), (4, 4))
    task = tiny.task("beit", tmp_path, "run", "method.min_block=60")
    with pytest.raises(UserError, match=r"method\.min_block=60 is more than the \d+ patches"):
        task.prepare()


# -- the branch of BEiT v2 -------------------------------------------------------------------------


def test_the_branch_gets_the_last_layer_through_its_class_token_alone(tmp_path: Path) -> None:
    words = ["method.branch_depth=1", "method.branch_layer=-2", "method.branch_heads=4"]
    task = tiny.task("beit", tmp_path, "run", *words)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, network = task.last_batch, task.base_model.eval()
    images, mask, indices = batch.input
    with torch.no_grad():
        features = network.extract(
            images, mask=mask, mask_token=network.mask_token, layers=(-2, -1)
        )
        early, last = features.hidden.values()
        first = last.prefix[:, :1] if last.prefix.shape[1] else last.patches.mean(1, keepdim=True)
        states = network.norm(network.branch(torch.cat([first, early.patches], dim=1)))
        expected = [features.patches, states[:, 1:]]
        scores = network(batch.input).prediction.chunk(2, dim=1)
        for part, patches in zip(scores, expected, strict=True):
            assert torch.allclose(part, network.head(gather_tokens(patches, indices)), atol=1e-5)
        assert not torch.allclose(*scores, atol=1e-3)
        terms = task.loss(network(batch.input), batch)
    assert list(terms) == ["tokens", "branch"]
    even = task.loss(predicted(torch.zeros_like(torch.cat(scores, dim=1))), batch)
    assert sum(even.values()).item() == pytest.approx(task.loss.chance_loss, rel=1e-6)
    assert all(p.grad is not None for p in network.branch.parameters())
    task.close()


def test_blocks_are_those_of_the_config() -> None:
    sampler = BlockMask((14, 14), min_patches=16, max_patches=196)
    key = torch.stack([torch.zeros(5, dtype=torch.int64), torch.arange(5)], dim=1)
    expected = sampler.draw(3, key, torch.full((5,), 78))
    assert torch.equal(_beit(2).draw_mask(3, key, (14, 14)), expected)
