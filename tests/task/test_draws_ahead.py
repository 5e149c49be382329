"""Draws of methods and dropout layers for a batch: made by the loader, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure

import tiny
from imagined_device import in_process
from selftask.random.keyed import LAYER_DRAWS, LayerDraws
from selftask.registry import METHODS
from selftask.task import Task
from task.test_imagined_device import run as run_on_device

# masks of blocks, kept patches, kept patches of one of two views; all with stochastic depth
MASKED = {"dinov2": "cpu", "mae": "device", "msn": "cpu"}
DEPTH = "backbone.drop_path=0.3"
WORKERS = "data.num_workers=2"


def prepared(method: str, folder: Path, *more: str) -> Task:
    task = tiny.task(method, folder, "run", *more)
    task.prepare()
    task.on_start()
    task.on_phase_start()
    return task


@pytest.mark.parametrize(("method", "engine"), MASKED.items())
def test_workers_draw_what_the_step_would(
    method: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws of a batch are those of its keys; this process makes none of them."""
    task = prepared(method, tmp_path, DEPTH, f"data.augment_on={engine}", WORKERS)
    batches, calls = [next(task.batches)], []  # now the workers exist
    with monkeypatch.context() as patch:
        patch.setattr(METHODS[method], "draw", lambda *args: calls.append("method"))
        patch.setattr(LayerDraws, "draw", lambda *args: calls.append("layers"))
        batches += [next(task.batches) for _ in range(tiny.STEPS_PER_EPOCH - 1)]
    assert calls == []
    for batch in batches:
        sizes = [tuple(view.shape[2:]) for view in batch.all_views]
        expected = {
            "layers": LAYER_DRAWS.draw(batch.key, len(sizes)),
            "method": task.loss.draw(task.config.train.seed, batch.key, sizes),
        }
        assert equal(batch.drawn, expected)
        inside = {id(tensor) for tensor in tensors(batch.input)}
        assert {id(tensor) for tensor in tensors(batch.drawn["method"])} <= inside
    task.close()


def equal(one: Any, other: Any) -> bool:
    assert tree_structure(one) == tree_structure(other)
    pairs = [*zip(tensors(one), tensors(other), strict=True)]
    return len(pairs) >= 2 and all(torch.equal(a, b) for a, b in pairs)


def tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def test_a_run_with_workers_has_the_bits_of_one_without(tmp_path: Path) -> None:
    """Stopped in between, with masks and stochastic depth of the loader."""
    options = [DEPTH, "train.epochs=1"]
    tiny.train("data2vec", tmp_path, "alone", *options)
    tiny.train("data2vec", tmp_path, "workers", *options, WORKERS, "train.stop_at=3")
    tiny.train("data2vec", tmp_path, "workers", *options, WORKERS, "train.stop_at=null")
    states = [tiny.last_state(tmp_path / out) for out in ("alone", "workers")]
    assert tiny.differences(*states) == []


def test_nothing_is_drawn_for_a_method_that_draws_nothing(tmp_path: Path) -> None:
    task = prepared("simclr", tmp_path)
    batch = next(task.batches)
    assert batch.drawn == {}
    assert task.data_module.draw is None
    assert LAYER_DRAWS.words is None
    task.close()


def on_device(folder: Path) -> list[str]:
    """Waits and races of steps whose views and masks a side stream brings."""
    options = (DEPTH, "train.max_steps=4", "data.augment_on=device", WORKERS)
    return run_on_device("dinov2", folder, *options)[0]


@pytest.mark.slow
def test_draws_reach_the_device_without_a_wait(tmp_path: Path) -> None:
    """From page-locked memory; and they are recorded for the stream that uses them."""
    assert in_process(on_device, tmp_path) == []
