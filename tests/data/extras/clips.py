"""A source whose every field says which sample it belongs to, and the batches made of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source
from selftask.distributed.world import World

SIZE = 8
SMALL = ["train.batch_size=4", "eval.evaluations=null", "data.val=null", "train.device=cpu"]
CROP = "{name: random_crop, size: 8}"


class Clips(Source):
    """Pairs of images; every field says which sample it belongs to."""

    extras = {"caption": "text", "later": "image", "time": "array", "mask": "array"}

    def __init__(self, number: int = 12, without_caption: int = -1) -> None:
        self.number = number
        self.without_caption = without_caption

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((SIZE, SIZE, 3), index, np.uint8), -1

    def extra(self, index: int, name: str) -> Any:
        if name == "caption":
            return "" if index == self.without_caption else chr(ord("a") + index) * (index + 1)
        if name == "later":
            return np.full((SIZE + index, SIZE, 3), 100 + index, np.uint8)
        return index / 2 if name == "time" else np.full((3, 5), index, np.int16)

    def path(self, index: int) -> str:
        return f"clips[{index}]"

    def describe(self) -> str:
        return "clips"


def config(tmp_path: Path, *more: str) -> Config:
    views = (
        f"views={{main: null, now: {{transforms: [{CROP}, normalize]}}, "
        f"then: {{image: later, count: 2, transforms: [{CROP}, normalize]}}}}"
    )
    return load_config("swav/digits", [*SMALL, views, "method.queue_size=0", *more])


def batches(loaded: Config, source: Source, count: int = 3) -> list[Batch]:
    module = DataModule(loaded, Sources(source, None), World(), torch.device("cpu"))
    try:
        return list(itertools.islice(module.train_batches(0), count))
    finally:
        module.close()
