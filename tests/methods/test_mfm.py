"""MFM against the figures of the authors' code, and a filter that keeps all frequencies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from figures import draw
from selftask.batch import Batch
from selftask.errors import UserError
from selftask.methods.mfm import MFM, frequency_distance, remove
from selftask.models.frequencies import low_frequencies

RADIUS, SIDE = 4, 16
MEAN = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64)[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64)[:, None, None]
# seeds 0 and 500: norm of the filtered images, loss, norm of its gradient
LOW = [
    (28.095108438299242, 1.2160495737858859, 0.019873215796970177),
    (27.83623561152938, 1.2511135919724325, 0.019873215837898986),
]
HIGH = [
    (7.430471979176993, 1.3113100284365593, 0.04303314693090912),
    (7.394934611053717, 1.1905901410651427, 0.043033146877880575),
]


def test_the_disc_of_low_frequencies() -> None:
    disc = low_frequencies((SIDE, SIDE), RADIUS, torch.device("cpu"))
    assert disc.sum() == 45
    assert bool(disc[0, 0])
    assert bool(disc[-3, 2])  # 9 + 4 < 16
    assert not disc[4, 0]


@pytest.mark.parametrize("case", [0, 1])
@pytest.mark.parametrize("figures", [LOW, HIGH], ids=["low", "high"])
def test_filter_and_loss_are_those_of_the_authors(figures: list, case: int) -> None:
    seed = 500 * case
    pixels = draw(seed, 4, 3, SIDE, SIDE).sigmoid()
    disc = low_frequencies((SIDE, SIDE), RADIUS, pixels.device)
    removed = (disc if figures is HIGH else ~disc).expand(4, -1, -1)
    predicted = draw(seed + 5, 4, 3, SIDE, SIDE).requires_grad_()
    loss = frequency_distance(predicted, (pixels - MEAN) / STD, removed)
    (gradient,) = torch.autograd.grad(loss, predicted)
    computed = (remove(pixels, removed).norm().item(), loss.item(), gradient.norm().item())
    assert computed == pytest.approx(figures[case], rel=1e-5)  # float32 in the authors' FFT


def test_an_image_counts_by_the_number_of_its_removed_frequencies() -> None:
    """As in the authors' code, where those of all images of a batch have one mean."""
    predicted, images = draw(1, 2, 3, SIDE, SIDE), draw(2, 2, 3, SIDE, SIDE)
    disc = low_frequencies((SIDE, SIDE), RADIUS, images.device)
    removed = torch.stack([disc, ~disc])
    alone = [
        frequency_distance(*(x[k : k + 1] for x in (predicted, images, removed))) for k in (0, 1)
    ]
    expected = (45 * alone[0] + (SIDE**2 - 45) * alone[1]) / SIDE**2
    assert frequency_distance(predicted, images, removed) == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_both_parts_add_up_to_the_image() -> None:
    """Without clamping: with values whose parts lie in [0, 1]."""
    pixels = 0.5 + 0.01 * draw(0, 2, 3, SIDE, SIDE)
    disc = low_frequencies((SIDE, SIDE), RADIUS, pixels.device).expand(2, -1, -1)
    low = remove(pixels, ~disc)
    high = torch.fft.ifft2(torch.fft.fft2(pixels).masked_fill(disc[:, None], 0.0)).real
    assert torch.allclose(low + high, pixels, atol=1e-12)
    assert frequency_distance(pixels, pixels, disc) == pytest.approx(1e-6)  # the root of 1e-12


def test_a_radius_beyond_all_frequencies_is_refused() -> None:
    method = MFM(MFM.Config(radius=6))
    method.mean = method.std = torch.ones(3, 1, 1)
    task = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(seed=0)))
    keys = torch.stack([torch.zeros(8, dtype=torch.int64), torch.arange(8)], dim=1)
    for side in (9, 8):  # 2 * 4 * 4 < 6 * 6
        batch = Batch(
            views={"main": [torch.zeros(8, 3, side, side)]}, labels=keys, index=keys, key=keys
        )
        with pytest.raises(UserError, match=f"radius=6: all frequencies of views of {side}x{side}"):
            method.prepare_batch(batch, task)
    batch = Batch(views={"main": [torch.zeros(8, 3, 10, 10)]}, labels=keys, index=keys, key=keys)
    method.prepare_batch(batch, task)
    assert (batch["removed"].sum(dim=(1, 2)) > 0).all()


def test_pixels_are_those_before_normalize() -> None:
    moments = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    normalize = SimpleNamespace(to_dict=lambda: {"name": "normalize", **moments})
    task: Any = SimpleNamespace(
        data_module=SimpleNamespace(channels=3),
        config=SimpleNamespace(views={"main": SimpleNamespace(count=1, transforms=[normalize])}),
    )
    method = MFM(MFM.Config())
    method.read_moments(task)
    pixels = torch.rand(2, 3, 4, 4)
    mean, std = (torch.tensor(values)[:, None, None] for values in moments.values())
    torch.testing.assert_close((pixels - mean) / std * method.std + method.mean, pixels)


def test_images_that_keep_low_frequencies_are_a_share() -> None:
    """The network sees pixels of the kept frequencies, normalized again."""
    keys = torch.stack([torch.zeros(400, dtype=torch.int64), torch.arange(400)], dim=1)
    task: Any = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(seed=0)))
    images = (draw(3, 400, 3, SIDE, SIDE).sigmoid() - MEAN) / STD
    for share in (0.0, 0.25, 1.0):
        method = MFM(MFM.Config(radius=RADIUS, low_share=share))
        method.mean, method.std = MEAN, STD
        batch = Batch(views={"main": [images]}, labels=keys, index=keys, key=keys)
        method.prepare_batch(batch, task)
        is_low = ~batch["removed"][:, 0, 0]
        assert is_low.double().mean().item() == pytest.approx(share, abs=0.07 * (0 < share < 1))
        disc = low_frequencies((SIDE, SIDE), RADIUS, images.device)
        kept = torch.where(is_low[:, None, None], disc, ~disc)
        spectrum = torch.fft.fft2(images * STD + MEAN) * kept[:, None]
        pixels = torch.fft.ifft2(spectrum).real.clamp(0, 1)
        torch.testing.assert_close(batch.input, (pixels - MEAN) / STD, rtol=0, atol=1e-4)
