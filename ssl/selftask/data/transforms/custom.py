"""Transforms from other libraries or user code, for Pillow images or arrays."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from selftask.config.extensions.imports import import_object
from selftask.data.transforms.channels import needs_rgb
from selftask.data.transforms.own import describe, read_only
from selftask.data.transforms.transform import Transform
from selftask.errors import UserError, explained
from selftask.registry import register_transform


@register_transform("custom")
@dataclass(frozen=True, kw_only=True)
class Custom(Transform):
    """Apply a class or function for Pillow images: from AugLy, torchvision or your own code.

    It gets a Pillow image. If its second argument is called ``rng``, it gets a read-only array,
    uint8 (H, W, C), and a NumPy generator instead. It returns a Pillow image or such an array. The
    global generators of Python, NumPy and torch (on the CPU) are seeded before each call and
    restored after it. The draws therefore depend only on (seed, epoch, image, view), as for other
    transforms.
    """

    resizes = "unknown"

    affine: ClassVar[bool] = False

    transform: str
    """The class or function, as ``package.module:name``; from Python also the object itself."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class, or of the function (without the image)."""

    def __post_init__(self) -> None:
        _ = self.callable  # to raise errors before the run

    @cached_property
    def callable(self) -> Callable[..., Any]:
        """Instance of the class, or the function with ``args`` bound.

        Raises:
            UserError: If there is no such object, or the class does not accept the arguments. The
                arguments of a function are not checked.
        """
        target = import_object(self.transform, "transform")
        if not isinstance(target, type):
            return partial(target, **self.args)
        problem = f"args: {self.transform} takes no {self.args}"
        with explained(problem, TypeError, ValueError, AssertionError):
            made: Callable[..., Any] = target(**self.args)
        return made

    @cached_property
    def takes_array(self) -> bool:
        """Whether the callable gets an array and a generator: its second argument is ``rng``."""
        try:
            names = [*inspect.signature(self.callable).parameters]
        except (TypeError, ValueError):  # of C code, which has no signature
            return False
        return names[1:2] == ["rng"]

    def channel_problems(self, channels: int) -> Iterator[str]:
        if self.takes_array:
            return iter(())
        return needs_rgb("name: custom", channels, "register a transform of your own")

    def draw(self, rng: np.random.Generator, height: int, width: int) -> int:
        """Return a seed for the global generators."""
        return int(rng.random() * 2**32)

    def apply(self, image: np.ndarray, params: int) -> np.ndarray:
        with _seeded(params):
            if self.takes_array:
                made = self.callable(read_only(image), np.random.default_rng(params))
            else:
                made = self.callable(Image.fromarray(image))
        if isinstance(made, Image.Image):
            made = np.array(made.convert("RGB"))
        expected = (np.uint8, 3, image.shape[2])
        if not isinstance(made, np.ndarray) or (made.dtype, made.ndim, made.shape[-1]) != expected:
            raise UserError(
                f"{self.transform} gave {describe(made)}; a Pillow image or an array "
                f"(H, W, {image.shape[2]}) of bytes (uint8) is expected; `normalize` makes tensors"
            )
        return made


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
