"""A user's own folder: a module of toy things and a recipe made of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from selftask.registry import REGISTRIES

TOY = '''
from dataclasses import dataclass
from typing import Any, Literal
from selftask.registry import (
    register_backbone, register_hook, register_method, register_optimizer, register_source,
    register_transform,
)

@register_method("toy_method")
class ToyMethod:
    """A toy."""

    loss_reduction = "samples"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        temperature: float = 0.5
        crops: int = 2
        mode: Literal["sum", "mean"] = "mean"

        def problems(self, config: dict[str, Any]):
            views = sum(group["count"] for group in config["views"].values())
            if self.crops != views:
                yield f"crops: {self.crops} wanted, but the views are {views}"

@register_method("toy_other")
class ToyOther:
    loss_reduction = "gathered"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        temperature: float = 0.9

@register_backbone("toy_net")
@dataclass(frozen=True, kw_only=True)
class ToyNet:
    width: int = 8

    def build(self, channels=3):
        raise NotImplementedError

@register_backbone("toy_wide")
@dataclass(frozen=True, kw_only=True)
class ToyWide:
    factor: int = 2

    def build(self, channels=3):
        raise NotImplementedError

@register_source("toy_source")
@dataclass(frozen=True, kw_only=True)
class ToySource:
    path: str
    size: int | None = None

    def __post_init__(self) -> None:
        raise AssertionError("reading a config must not open the data")

    def problems(self, config: dict[str, Any]):
        return []

@register_transform("toy_crop")
@dataclass(frozen=True, kw_only=True)
class ToyCrop:
    size: int
    scale: tuple[float, float] = (0.2, 1.0)

@register_optimizer("toy_sgd")
@dataclass(frozen=True, kw_only=True)
class ToySGD:
    momentum: float = 0.9

    def build(self, groups):
        raise NotImplementedError

@register_optimizer("toy_adam")
@dataclass(frozen=True, kw_only=True)
class ToyAdam:
    betas: tuple[float, float] = (0.9, 0.999)

    def build(self, groups):
        raise NotImplementedError

@register_hook("toy_hook")
class ToyHook:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        every: int = 1
'''

RECIPE = """\
import: [toy]
data: {name: toy_source, path: here}
views:
  main:
    count: 2
    transforms:
      - {name: toy_crop, size: 32}
      - normalize
backbone: {name: toy_net, width: 16}
method: {name: toy_method, temperature: 0.2}
train: {epochs: 3, batch_size: 8}
optimizer: {name: toy_sgd, lr: 0.1, momentum: 0.8}
hooks:
  toy_hook: {every: 5}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with ``toy.py`` and ``my.yaml``, as current folder; names are forgotten after."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "my.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    known = {r: (dict(r._registered), dict(r._addresses)) for r in REGISTRIES.values()}
    yield tmp_path
    for registry, kept in known.items():  # what selftask itself registered meanwhile stays
        now = registry._registered, registry._addresses
        ours = [n for n, thing in now[0].items() if thing.__module__.startswith("selftask.")]
        registry._registered, registry._addresses = (
            {**before, **{name: after[name] for name in ours if name in after}}
            for before, after in zip(kept, now, strict=True)
        )
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
