"""TCN against the triplets of its paper as loops, on one rank and on two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from figures import draw
from ranks import run_ranks
from selftask.config.load import load_config
from selftask.data.sources.digits import Digits
from selftask.distributed.collectives import all_reduce_mean, rank, world_size
from selftask.errors import ConfigError, UserError
from selftask.methods.tcn import triplet_loss


def _slow(clips: Any, margin: float, radii: tuple[int, int], other_clips: bool) -> float:
    """For each close pair, the semi-hard negative: the nearest of those farther than the positive.

    If none is farther, the farthest (FaceNet; svtcn_loss of the authors' code).
    """
    frames = {
        (clip, time): np.array(frame) / math.sqrt(math.fsum(x * x for x in frame))
        for clip, row in enumerate(clips.tolist())
        for time, frame in enumerate(row)
    }
    losses = []
    for clip, time in frames:
        apart = {key: ((frames[clip, time] - f) ** 2).sum() for key, f in frames.items()}
        distant = [
            distance
            for (other, moment), distance in apart.items()
            if (other_clips if other != clip else abs(moment - time) > radii[1])
        ]
        for (other, moment), positive in apart.items():
            if other == clip and 0 < abs(moment - time) <= radii[0] and distant:
                farther = [distance for distance in distant if distance > positive]
                negative = min(farther) if farther else max(distant)
                losses.append(max(0.0, positive - negative + margin))
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize("other_clips", [False, True])
@pytest.mark.parametrize("radii", [(1, 1), (1, 2), (2, 3)])
def test_loss_is_that_of_the_authors(radii: tuple[int, int], other_clips: bool) -> None:
    clips = draw(0, 3, 6, 4)
    options: Any = {"margin": 0.5, "radii": radii, "other_clips": other_clips}
    assert triplet_loss(clips, **options).item() == pytest.approx(_slow(clips, **options), rel=1e-9)


def test_frames_without_distant_ones_are_left_out() -> None:
    """Of four frames only the first and the last are more than two apart."""
    clips = draw(1, 2, 4, 3).requires_grad_()
    loss = triplet_loss(clips, margin=5.0, radii=(1, 2), other_clips=False)
    assert loss.item() == pytest.approx(_slow(clips.detach(), 5.0, (1, 2), False), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, clips)
    assert gradient.isfinite().all()


def test_even_features_have_the_loss_at_chance_and_ordered_ones_none() -> None:
    same = torch.ones(2, 5, 3, dtype=torch.float64)
    assert triplet_loss(same, margin=0.2, radii=(1, 2), other_clips=True).item() == pytest.approx(
        0.2
    )
    angle = torch.arange(5.0) * math.pi / 5  # neighbors differ by 36 degrees, others by 108 or more
    turning = torch.stack([angle.cos(), angle.sin()], dim=1)[None]
    assert triplet_loss(turning, margin=0.2, radii=(1, 2), other_clips=False) == 0


def _of_rank(unused: int) -> tuple[float, torch.Tensor]:
    clips = draw(0, 4, 5, 3)
    mine = clips.chunk(world_size())[rank()].requires_grad_()
    loss = triplet_loss(mine, margin=1.0, radii=(1, 2), other_clips=True)
    (gradient,) = torch.autograd.grad(loss, mine)
    return all_reduce_mean(loss.detach()).item(), gradient / world_size()


def test_clips_of_other_ranks_are_negatives() -> None:
    loss, gradient = _of_rank(0)
    (first, of_first), (second, of_second) = run_ranks(_of_rank, 2)
    assert first == second == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.cat([of_first, of_second]), gradient)


def test_too_short_clips_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="negative_radius: 1 is less than positive_radius=2"):
        load_config("tcn/digits", ["method.negative_radius=1", "method.positive_radius=2"])
    task = tiny.task("tcn", tmp_path, "run", "method={negative_radius: 5, other_clips: false}")
    with pytest.raises(UserError, match="negative_radius=5: no two of 6 frames are farther apart"):
        task.prepare()


def test_digits_turn_in_both_directions() -> None:
    """Frame 1 and -1 of the same image, and more with each frame."""
    source = Digits(Digits.Config(size=32, clip=4))
    assert source.extras == dict.fromkeys(["frame_1", "frame_2", "frame_3"], "image")
    still = source[0][0].astype(float)
    apart = [abs(source.extra(0, f"frame_{n}") - still).mean() for n in (1, 2, 3)]
    assert 0 < apart[0] < apart[1] < apart[2]
    from PIL import Image

    left = Image.fromarray(source.images[0]).rotate(10, Image.Resampling.BICUBIC)
    right = Image.fromarray(source.images[1]).rotate(-10, Image.Resampling.BICUBIC)
    for number, turned in enumerate((left, right)):
        assert np.array_equal(source.extra(number, "frame_1")[:, :, 0], np.asarray(turned))
