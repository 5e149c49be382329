"""Transforms of other libraries, which take and return Pillow images."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from selftask.config.extensions import import_object
from selftask.data.transforms.channels import needs_rgb
from selftask.data.transforms.transform import Transform
from selftask.errors import UserError
from selftask.registry import register_transform


@register_transform("custom")
@dataclass(frozen=True, kw_only=True)
class Custom(Transform):
    """Apply a class or function for Pillow images: from AugLy, torchvision or your own code.

    The global generators of Python, NumPy and torch are seeded before each call and restored after
    it. So the draws depend only on (seed, epoch, image, view), like those of other transforms.
    """

    resizes = "unknown"

    affine: ClassVar[bool] = False

    transform: str
    """The class or function, as ``package.module:name``."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class, or of the function (without the image)."""

    def __post_init__(self) -> None:
        _ = self.callable  # to raise errors before the run

    @cached_property
    def callable(self) -> Callable[[Image.Image], Any]:
        """Instance of the class, or the function with ``args`` bound.

        Raises:
            UserError: There is no such object, or the class does not accept the arguments.
        """
        found = import_object(self.transform, "transform")
        if not isinstance(found, type):
            return partial(found, **self.args)
        try:
            made: Callable[[Image.Image], Any] = found(**self.args)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"args: {self.transform} takes no {self.args}: {error}") from error
        return made

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb("name: custom", channels, "register a transform of your own")

    def draw(self, rng: np.random.Generator, height: int, width: int) -> int:
        """Return a seed for the global generators."""
        return int(rng.random() * 2**32)

    def apply(self, image: np.ndarray, params: int) -> np.ndarray:
        with _seeded(params):
            made = self.callable(Image.fromarray(image))
        if isinstance(made, np.ndarray):
            made = Image.fromarray(made)
        if not isinstance(made, Image.Image):
            raise UserError(
                f"{self.transform} gave a {type(made).__name__}; a Pillow image or an array "
                "(H, W, 3) of bytes is expected"
            )
        return np.array(made.convert("RGB"))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds the global generators and restores their state afterwards."""
    torch: Any = sys.modules.get("torch")  # a transform that uses it has imported it
    python, numpy = random.getstate(), np.random.get_state()
    torch_state = torch and torch.default_generator.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        if torch:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch:
            torch.default_generator.set_state(torch_state)
