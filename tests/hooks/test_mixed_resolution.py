"""The hook ``mixed_resolution``: views whose size differs from batch to batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny
from selftask.errors import ConfigError, UserError
from selftask.hooks.mixed_resolution import MixedResolution

VIEWS = "views.local={transforms: [{name: random_resized_crop, size: 8}, normalize]}"
SIZES = "hooks.mixed_resolution={sizes: {main: [8, 16], local: [4, 8]}, shares: [0.25, 0.75]}"
TWO = (VIEWS, SIZES)


def test_entries_have_their_shares_and_differ_between_seeds() -> None:
    hook = MixedResolution(sizes={"main": [1, 2, 3]}, shares=[0.5, 0.3, 0.2])
    drawn = []
    for hook.seed in (0, 1):
        drawn.append([hook.entry(number) for number in range(5000)])
    assert drawn[0] != drawn[1]
    for counts in map(Counter, drawn):
        for entry, share in enumerate(hook.shares or []):
            spread = (share * (1 - share) / 5000) ** 0.5
            assert counts[entry] / 5000 == pytest.approx(share, abs=4 * spread)


def test_all_views_of_a_batch_get_the_sizes_of_one_entry(tmp_path: Path) -> None:
    """Masks and Gram matrices have the sizes, too, or the step fails."""
    gram = ("method.gram_scale=2", "method.gram_start=0", "method.gram_copy=0")
    task = tiny.task("dinov3", tmp_path, "run", *TWO, *gram)
    sizes = [[view.shape[-1] for view in task.last_batch.all_views] for _ in task.steps()]
    hook = task.named_hooks["mixed_resolution"]
    entries = [hook.entry(number) for number in range(len(sizes))]
    assert set(entries) == {0, 1}
    assert sizes == [[[8, 8, 4], [16, 16, 8]][entry] for entry in entries]


def test_views_are_those_of_the_loader_reduced_without_aliasing(tmp_path: Path) -> None:
    plain = tiny.task("dinov2", tmp_path, "plain", VIEWS)
    mixed = tiny.task(
        "dinov2", tmp_path, "mixed", VIEWS, "hooks.mixed_resolution.sizes={main: [8]}"
    )
    for task in (plain, mixed):
        next(iter(task.steps()))
    before, after = plain.last_batch, mixed.last_batch
    for large, small in zip(before.views["main"], after.views["main"], strict=True):
        expected = F.interpolate(large, size=(8, 8), mode="bicubic", antialias=True)
        assert torch.equal(small, expected)
    assert torch.equal(before.views["local"][0], after.views["local"][0])
    assert after.input.masks.mask.shape[1] == 4


@pytest.mark.slow
def test_a_run_of_mixed_sizes_resumes_exactly(tmp_path: Path) -> None:
    whole = tiny.train("dinov3", tmp_path, "whole", *TWO)
    tiny.train("dinov3", tmp_path, "half", *TWO, "train.stop_at=7")
    resumed = tiny.train("dinov3", tmp_path, "half", *TWO)
    for name, value in whole.base_model.state_dict().items():
        assert torch.equal(resumed.base_model.state_dict()[name], value), name


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    task = tiny.task("dinov2", tmp_path, "run", "hooks.mixed_resolution.sizes={main: [16, 64]}")
    with pytest.raises(UserError, match=r"64 pixels are more than the 32 of views\.main"):
        next(iter(task.steps()))
    for words, message in (
        ("{sizes: {mains: [8]}}", "sizes.mains: no such group of views; did you mean"),
        ("{sizes: {main: [10]}}", "10 pixels cannot be divided into patches of 4; try 8 or 12"),
        ("{sizes: {main: [8, 16], other: [4]}}", "sizes: groups with"),
        ("{sizes: {main: []}}", "sizes"),
        ("{sizes: {main: [8, 16]}, shares: [1.0]}", "shares: 1 shares of 2 sizes"),
        ("{sizes: {main: [8, 16]}, shares: [0.5, 0.6]}", "shares: their sum is 1.1, not 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny.task("dinov2", tmp_path, "run", f"hooks.mixed_resolution={words}")
