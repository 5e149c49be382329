"""Rows of the table of ``acceptance.py``, and what its checks run on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ON_DEVICE = "train.device=auto"


@dataclass(frozen=True)
class Result:
    """A row of the table; ``passed`` is None if nothing is expected."""

    check: str
    case: str
    figure: str
    expected: str = ""
    passed: bool | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks of speed: of the real recipes, or tiny for a test."""

    recipes: tuple[str, ...] = (
        "supervised/resnet50_imagenet",
        "simclr/resnet50_imagenet",
        "dino/vit_small_imagenet",
        "mae/vit_base_imagenet",
    )
    batch_size: int = 128
    images: int = 4096
    height: int = 256
    steps: int = 40
    more: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ("classes=1000",)  # words of a plan
    compiler: str = "inductor"


@dataclass(frozen=True)
class Setting:
    """Where and what to check."""

    device: str
    methods: list[str]
    folder: Path
    without_waits: Callable[[], AbstractContextManager[Any]]
    printed_losses: Callable[[list[str], str], dict[str, Any]]
    """Returns the losses of methods in a process with ``CUDA_LAUNCH_BLOCKING``."""
    run_command: Callable[..., subprocess.CompletedProcess[str]]
    """Trains a method in processes of their own."""
    ranks: int = 1
    sizes: Sizes = Sizes()

    @property
    def on_device(self) -> str:
        """Return the override that selects the device."""
        return "train.device=cpu" if self.device == "cpu" else ON_DEVICE
