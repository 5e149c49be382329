"""Objects in place of names in a config: each run and each thread has its own."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import selftask
from selftask.api.objects import overrides
from selftask.api.trainer import Trainer
from selftask.api.training import Run
from selftask.config.extensions.imports import import_object
from selftask.errors import UserError


class Gray:
    """Images of one level."""

    def __init__(self, level: int) -> None:
        self.level, self.reads = level, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.reads += 1
        return np.full((8, 8, 3), self.level, np.uint8), index % 2


def small_run(out: Path, data: Gray, network: nn.Module, transform: Any, **more: Any) -> Run:
    words = {"train.batch_size": 4, "train.max_steps": 1, "train.device": "cpu"}
    words |= {"views.main.transforms": [transform, "normalize"], "data.num_workers": 0}
    words |= {"eval.transforms": ["normalize"], "eval.evaluations": {}}
    task = selftask.create_task("simclr", data=data, backbone=network, out=out, **words, **more)
    return Run(task)


def test_each_run_keeps_its_own_objects(tmp_path: Path, forget_names: None) -> None:
    """Objects of one class have the same name in the config, so that each would be the last one."""
    kinds = [nn.Tanh(), nn.ReLU()]
    body = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 8)
    networks = [copy.deepcopy(nn.Sequential(*body, kind)) for kind in kinds]
    data = [Gray(50), Gray(51)]
    levels: list[list[int]] = [[], []]

    def watched(number: int) -> Any:
        def watch(image: np.ndarray, rng: Any) -> np.ndarray:
            levels[number].append(int(image.max()))
            return image

        return watch

    runs = [
        small_run(tmp_path / str(n), data[n], networks[n], watched(n), **{"hooks.export": {}})
        for n in range(2)
    ]
    for run in runs:
        Trainer().train(run.task)
    assert set(levels[0]) == {50} and set(levels[1]) == {51}
    images = torch.randn(2, 3, 8, 8)
    for run, network, own in zip(runs, networks, data, strict=True):
        assert torch.equal(run.load()(images), network.eval()(images))
        before = own.reads
        assert selftask.evaluate(run, k=[3])["test_images"] == own.reads - before == 8


def test_each_thread_has_its_own_objects(forget_names: None) -> None:
    def names(level: int) -> list[str]:
        return overrides({"data": Gray(level)})

    def opened() -> Any:
        return import_object("selftask.api.objects:data_Gray", "data.dataset")()

    with (
        ThreadPoolExecutor(1) as first,
        ThreadPoolExecutor(1) as second,
        ThreadPoolExecutor(1) as other,
    ):
        words = [pool.submit(names, level).result() for pool, level in ((first, 1), (second, 2))]
        assert words[0] == words[1]
        assert [pool.submit(lambda: opened().level).result() for pool in (first, second)] == [1, 2]
        assert other.submit(lambda: opened().level).result() == 2


def test_numbers_of_numpy_and_lists_of_images(forget_names: None) -> None:
    settings = {"a.k": np.array([1, 5]), "a.lr": np.float32(0.5), "a.seed": np.int64(3)}
    assert overrides(settings) == ["a.k=[1, 5]", "a.lr=0.5", "a.seed=3"]
    assert overrides({"data": ["a", Path("b")]}) == ['data=["a", "b"]']
    images = [np.zeros((8, 8, 3), np.uint8)] * 2
    overrides({"data": images})
    assert import_object("selftask.api.objects:data_list", "data.dataset")() is images


def test_objects_of_another_session_are_told() -> None:
    with pytest.raises(UserError, match="backbone_Net was an object of another Python session"):
        import_object("selftask.api.objects:backbone_Net", "backbone.model")
