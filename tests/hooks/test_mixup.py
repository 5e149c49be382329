"""Mixup and CutMix against their formulas, pair by pair."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tiny
from selftask.batch import Batch
from selftask.errors import ConfigError, UserError
from selftask.hooks.mixup import Mixup, keep_mask, unmixed


def mixer(**args: Any) -> Mixup:
    hook = Mixup(**args)
    hook.on_start(
        SimpleNamespace(  # type: ignore[arg-type]
            config=SimpleNamespace(train=SimpleNamespace(batch_size=8, seed=3)),
            world=SimpleNamespace(size=1),
            loss=SimpleNamespace(requires=("labels",), num_classes=4),
        )
    )
    return hook


def batch(rows: slice = slice(None)) -> Batch:
    draws = torch.Generator().manual_seed(0)
    images, small = (torch.rand(8, 3, *size, generator=draws) for size in ((10, 6), (5, 3)))
    key = torch.tensor([[2, index] for index in (5, 1, 7, 0, 3, 2, 6, 4)])
    labels = torch.tensor([0, 1, 2, 3, 3, 2, 1, 1])
    return Batch(
        views={"main": [images[rows], small[rows]]},
        labels=labels[rows],
        index=key[rows, 1],
        key=key[rows],
    )


def test_mixup_by_its_formula() -> None:
    hook, before, mixed = mixer(cutmix=0), batch(), batch()
    hook.mix(mixed)
    lam, _, is_cut = hook.draw(before.key[::2].tolist())
    assert not is_cut.any()
    assert len(set(lam.tolist())) == 4
    one_hot = np.eye(4)[before.labels.numpy()]
    for i in range(8):
        j, share = i ^ 1, float(lam[i // 2])
        for view, actual in zip(before.all_views, mixed.all_views, strict=True):
            assert torch.allclose(actual[i], share * view[i] + (1 - share) * view[j], atol=1e-6)
        label = share * one_hot[i] + (1 - share) * one_hot[j]
        assert np.allclose(mixed.labels[i], label, atol=1e-6)


def test_cutmix_exchanges_a_box_and_counts_its_pixels() -> None:
    hook, before, mixed = mixer(mixup=0), batch(), batch()
    hook.mix(mixed)
    for i in range(8):
        shares = []
        for view, actual in zip(before.all_views, mixed.all_views, strict=True):
            is_own = (actual[i] == view[i]).all(dim=0)
            is_other = (actual[i] == view[i ^ 1]).all(dim=0)
            assert (is_own ^ is_other).all()
            rows, columns = is_other.any(dim=1), is_other.any(dim=0)
            assert torch.equal(is_other, rows[:, None] & columns), "it is a box"
            shares.append(float(is_own.float().mean()))
        share = sum(shares) / 2
        expected = (
            share * np.eye(4)[before.labels[i]] + (1 - share) * np.eye(4)[before.labels[i ^ 1]]
        )
        assert np.allclose(mixed.labels[i], expected, atol=1e-6)


def test_the_box_is_around_the_drawn_center_and_clipped() -> None:
    box = torch.tensor([[0.5, 0.25, 0.4, 0.3], [0.9, 0.1, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0]])
    lam, is_cut = torch.tensor([0.8, 0.75, 0.3]), torch.tensor([True, True, False])
    keep, area = keep_mask(lam, box, is_cut, 10, 20)
    expected = np.ones((3, 10, 20))
    expected[0, 3:7, 2:8] = 0  # 0.5 * 10 -+ 2 and 0.25 * 20 -+ 3
    expected[1, 6:10, 0:7] = 0  # 9 -+ 2.5 and 2 -+ 5, rounded to even
    expected[2] = 0.3
    assert np.allclose(keep[:, 0], expected.repeat(2, axis=0))
    assert np.allclose(area, expected.mean(axis=(1, 2)))


def test_only_images_of_training_are_mixed() -> None:
    for train in (True, False):
        (seen,) = mixer().wrap_batches(phase := Mock(train=train), iter([batch()]))
        same = map(torch.equal, seen.all_views, batch().all_views)
        assert all(same) is (seen.labels.ndim == 1) is not train
        assert phase.loss.prepare_batch.called is train


def test_shares_of_pairs_that_are_mixed_and_of_cutmix() -> None:
    keys = [[0, index] for index in range(4000)]
    lam, _, is_cut = mixer(mixup=0.4, cutmix=2.0, p=0.7, switch_p=0.2).draw(keys)
    mixed = lam < 1
    assert abs(mixed.mean() - 0.7) < 0.03
    assert not is_cut[~mixed].any()
    assert abs(is_cut[mixed].mean() - 0.2) < 0.03
    for alpha, some in ((0.4, mixed & ~is_cut), (2.0, is_cut)):
        assert abs(lam[some].var() - 0.25 / (2 * alpha + 1)) < 0.01  # of Beta(a, a)


def test_lambda_is_beta() -> None:
    lam, box, is_cut = mixer(mixup=0.4, cutmix=0.4).draw([[0, index] for index in range(4000)])
    assert abs(lam.mean() - 0.5) < 0.03
    assert abs(lam.var() - 0.4**2 / (0.8**2 * 1.8)) < 0.01  # of Beta(a, a)
    assert abs(is_cut.mean() - 0.5) < 0.03
    assert np.allclose(box[:, 2] * box[:, 3], 1 - lam, atol=1e-6)


def test_ranks_and_epochs() -> None:
    """Two ranks with half of the batch each mix as one; another epoch mixes otherwise."""
    whole, parts = batch(), [batch(slice(4)), batch(slice(4, None))]
    for one in (whole, *parts):
        mixer().mix(one)
    assert torch.equal(whole.views["main"][0], torch.cat([p.views["main"][0] for p in parts]))
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    later = batch()
    later.key[:, 0] += 1
    mixer().mix(later)
    assert not torch.equal(whole.views["main"][0], later.views["main"][0])


@pytest.mark.parametrize("engine", ["cpu", "device"])
def test_training_resumes_bit_for_bit(tmp_path: Path, engine: str) -> None:
    more = ("hooks.mixup={}", f"data.augment_on={engine}", "train.max_steps=6")
    tiny.train("supervised", tmp_path, "whole", *more)
    for stop in ("3", "null"):
        tiny.train("supervised", tmp_path, "parts", *more, f"train.stop_at={stop}")
    whole, parts = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert not tiny.differences(whole, parts)
    tiny.train("supervised", tmp_path, "plain", *more[1:])
    assert tiny.differences(whole["model"], tiny.last_state(tmp_path / "plain")["model"])


def test_without_labels(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run", "hooks.mixup={mixup: 1.0}")
    task.prepare()
    task.on_start()
    task.on_phase_start()
    task.step()
    labels = task.last_batch.labels
    assert labels.shape == (tiny.BATCH_SIZE,)
    assert unmixed(task, labels) is labels
    assert task.last_batch.input[0] is task.last_batch.all_views[0]
    task.close()


def test_mixup_without_strength_and_odd_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of them must be above 0"):
        tiny.task("supervised", tmp_path, "run", "hooks.mixup={mixup: 0, cutmix: 0}")
    task = tiny.task("supervised", tmp_path, "run", "hooks.mixup={}", "train.batch_size=15")
    task.prepare()
    with pytest.raises(UserError, match="a rank has 15 of train"):
        task.on_start()
    task.close()
