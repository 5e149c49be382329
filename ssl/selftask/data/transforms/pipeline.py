"""Transforms in sequence on one image, and the conversion of batches to floats."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.config.schema import Component
from selftask.data import kernel
from selftask.data.transforms.channels import RGB, for_channels, list_problems, with_attribute
from selftask.data.transforms.normalize import Normalize
from selftask.data.transforms.own import check_image, is_own, read_only
from selftask.data.transforms.transform import Drawn, Nested, Transform
from selftask.errors import ConfigError
from selftask.registry import TRANSFORMS

UNIT = np.float32(1 / 255)  # scale without ``normalize``: values in [0, 1]
BLOCK = 1 << 17  # values per thread that stay in a CPU's cache: 512 KiB of floats


class Compose:
    """Transforms applied in sequence to one 8-bit image.

    ``pipeline(image, rng)`` takes and returns uint8 (H, W, C). ``pipeline.to_float`` converts a
    batch to floats once it is on its device. For images of three channels, consecutive transforms
    that the compiled kernel supports run in one call of the kernel. If such a call comes last and
    ``out`` has the result's shape, the result is written to ``out``, which is returned.

    Args:
        transforms: Instances of transforms, in order.
        channels: Number of channels of the images, C.
    """

    compiled = kernel.available()

    def __init__(self, transforms: Iterable[Any], channels: int = RGB) -> None:
        self.transforms = [for_channels(transform, channels) for transform in transforms]
        self.has_own = any(is_own(type(transform)) for transform in self.transforms)
        last = self.transforms[-1] if self.transforms else None
        if isinstance(last, Normalize):
            self.transforms.pop()
            self.to_float = Normalizer(*last.scale_and_shift(channels))
        else:
            self.to_float = Normalizer(
                np.full(channels, UNIT), np.zeros(channels, dtype=np.float32)
            )

    def for_view(self, number: int) -> Compose:
        """Return the pipeline for view ``number`` of its group, from 0.

        The number is assigned to the attribute ``view_number`` (int) of copies of the transforms
        that have it. If none has it, the pipeline itself is returned.
        """
        if not any(hasattr(transform, "view_number") for transform in self.transforms):
            return self
        pipeline = copy.copy(self)
        pipeline.transforms = [
            with_attribute(each, "view_number", number) if hasattr(each, "view_number") else each
            for each in self.transforms
        ]
        return pipeline

    def first(self, number: int) -> Compose:
        """Return the pipeline of the first ``number`` transforms."""
        pipeline = copy.copy(self)
        pipeline.transforms = self.transforms[:number]
        return pipeline

    def __call__(
        self,
        image: np.ndarray,
        rng: np.random.Generator,
        out: np.ndarray | None = None,
        steps: list[Drawn] | None = None,
    ) -> np.ndarray:
        """Return the changed image, which may be ``image`` itself.

        The draws of each ``Transform`` are appended to ``steps``.
        """
        program: list[float] = []  # pending operations of the kernel
        if self.has_own:
            image = read_only(image)
        height, width, channels = image.shape
        compiled = self.compiled and channels == RGB and kernel.fits(height, width)
        for transform in self.transforms:
            if not isinstance(transform, Transform):
                image = _run(program, image, height, width)
                nested = isinstance(transform, Nested)
                image = transform(image, rng, steps) if nested else transform(image, rng)
                check_image(transform, image, channels)
                program, (height, width) = [], image.shape[:2]
                continue
            drawn = transform.draw(rng, height, width)
            if steps is not None:
                steps.append(Drawn(transform, drawn, (height, width)))
            if drawn is None:
                continue
            instructions = transform.program(drawn) if compiled else None
            if instructions is None:
                image = transform.apply(_run(program, image, height, width), drawn)
                check_image(transform, image, channels)
                program, (height, width) = [], image.shape[:2]
                continue
            program += instructions
            if instructions and instructions[0] == kernel.Op.CROP_RESIZE:
                height, width = int(instructions[5]), int(instructions[6])
        return _run(program, image, height, width, out)


def _run(
    program: list[float],
    image: np.ndarray,
    height: int,
    width: int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Run a kernel program on an image (H, W, 3); return uint8 (height, width, 3).

    An empty program returns the image. The result is written to ``out`` if its shape is right.
    """
    if not program:
        return image
    if out is None or out.shape != (height, width, RGB):
        out = np.empty((height, width, RGB), dtype=np.uint8)
    kernel.run(image, program, out)
    return out


class Normalizer:
    """Conversion of pixels x, uint8 (B, H, W, C), to x * scale + shift, float32 (B, C, H, W).

    It works on any device. The result keeps the memory order of the pixels
    (``torch.channels_last``). Nothing is transposed, and convolutions on a CPU are faster.

    Args:
        scale: float32 (C,).
        shift: float32 (C,).
    """

    def __init__(self, scale: np.ndarray, shift: np.ndarray) -> None:
        self._constants = [torch.from_numpy(np.asarray(c)) for c in (scale, shift)]
        self._rows: dict[tuple[int, torch.device], list[Tensor]] = {}

    def __call__(self, pixels: Tensor) -> Tensor:
        count, height, width, channels = pixels.shape
        together = max(1, count)  # images converted at once
        if pixels.device.type == "cpu":  # values stay in the cache between the three operations
            together = max(1, torch.get_num_threads() * BLOCK // (height * width * channels))
            values = _aligned_floats(pixels.shape)
        else:
            values = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
        scale, shift = self._for_rows(width, pixels.device)
        for block, raw in zip(values.split(together), pixels.split(together), strict=True):
            block.copy_(raw).view(-1, width * channels).mul_(scale).add_(shift)
        return values.permute(0, 3, 1, 2)

    def of_planes(self, values: Tensor) -> Tensor:
        """Normalize float32 (B, C, H, W) in 0..255, out of place; can be compiled.

        The result has the memory format ``torch.channels_last``.
        """
        scale, shift = (c[:, None, None] for c in self._for_rows(1, values.device))
        pixels = torch.empty_like(values, memory_format=torch.channels_last)
        return torch.mul(values, scale, out=pixels).add_(shift)

    def _for_rows(self, width: int, device: torch.device) -> list[Tensor]:
        """Return scale and shift repeated for a row, as three channels are too few to vectorize."""
        key = width, device
        if key not in self._rows:
            self._rows[key] = [c.repeat(width).to(device) for c in self._constants]
        return self._rows[key]


def _aligned_floats(shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialized float32 tensor on the host, aligned to 64 bytes as torch's own are.

    torch requests this alignment from glibc. If small objects are allocated in between, glibc does
    not reuse the memory of an earlier batch: a process grew by one batch each time. NumPy requests
    memory without alignment, and huge pages.
    """
    size = math.prod(shape)
    room = np.empty(size + 16, dtype=np.float32)
    start = -room.ctypes.data % 64 // 4
    return torch.from_numpy(room[start : start + size].reshape(shape))


def build_pipeline(
    transforms: Sequence[Component], key: str = "transforms", channels: int = RGB
) -> Compose:
    """Build the pipeline of a config's list of transforms.

    Args:
        transforms: Transforms in order.
        key: Config key of the list, for error messages.
        channels: Number of channels of the images.

    Raises:
        ConfigError: If a transform comes after ``normalize``, has invalid arguments, or does not
            support this number of channels.
    """
    problems = list(list_problems(transforms, key, channels))
    if problems:
        raise ConfigError(problems)
    built: list[Any] = []
    for position, component in enumerate(transforms):
        if built and isinstance(built[-1], Normalize):
            problem = (
                f"{key}[{position}]: {component.name} works on 8-bit images and cannot come after "
                "normalize; put it before"
            )
            raise ConfigError([problem])
        built.append(TRANSFORMS[component.name](**component.args))
    return Compose(built, channels)
