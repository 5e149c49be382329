"""The same views by both engines, for the tests of the device engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import torch

from imagined_device import NAME, ImaginedDevice, in_process
from selftask.config.schema import Component, ViewConfig
from selftask.data.device.engine import Engine
from selftask.data.views import Views

SEED, EPOCH, IMAGES = 5, 1, 24
HEIGHT, WIDTH = 40, 48


def part(name: str, **args: Any) -> Component:
    """A transform of a config."""
    return Component(name=name, args=args)


def smooth_images(
    count: int, height: int, width: int, seed: int = 0, channels: int = 3
) -> np.ndarray:
    """Smooth and colorful, uint8 (count, height, width, channels)."""
    rng = np.random.default_rng(seed)
    shape = count, height // 5 + 2, width // 5 + 2, channels
    small = rng.integers(0, 256, shape, dtype=np.uint8)
    planes = [np.ascontiguousarray(one[..., at]) for one in small for at in range(channels)]
    grown = [cv2.resize(one, (width, height), interpolation=cv2.INTER_CUBIC) for one in planes]
    return np.ascontiguousarray(
        np.stack(grown).reshape(count, channels, height, width).transpose(0, 2, 3, 1)
    )


def views_of(transforms: list[Component], count: int = 2) -> dict[str, ViewConfig]:
    """One group of so many views."""
    return {"main": ViewConfig(count=count, transforms=transforms)}


def by_cpu(config: dict[str, ViewConfig], images: list[np.ndarray]) -> list[torch.Tensor]:
    """Picture by picture."""
    views = Views(config, images[0].shape[2])
    made = [views(image, SEED, EPOCH, number) for number, image in enumerate(images)]
    stacked = [torch.from_numpy(np.stack(view)) for view in zip(*made, strict=True)]
    return [to_float(v) for to_float, v in zip(views.to_float, stacked, strict=True)]


def by_device(
    config: dict[str, ViewConfig],
    images: list[np.ndarray],
    *,
    at_once: bool = False,
    room: int = 0,
) -> list[torch.Tensor]:
    """Drawn picture by picture, or all ``at_once``; in the canvas of the largest, or a larger."""
    channels = images[0].shape[2]
    engine = Engine(Views(config, channels), config)
    numbers = np.arange(len(images))
    if at_once:
        sent, sizes = images, np.array([image.shape[:2] for image in images])
        packed = engine.draw_batch(SEED, np.full(len(images), EPOCH), numbers, sizes)
    else:
        prepared = [engine.prepare([image], SEED, EPOCH, n) for n, image in enumerate(images)]
        sent = [
            image for each in zip(*(kept for kept, _ in prepared), strict=True) for image in each
        ]
        sizes = np.array([image.shape[:2] for image in sent])
        packed = engine.pack([traces for _, traces in prepared], sizes)
    canvas = np.full(
        (len(sent), *sizes.max(0) + room, channels), 77, np.uint8
    )  # what is outside counts not
    for place, image in zip(canvas, sent, strict=True):
        place[: image.shape[0], : image.shape[1]] = image
    return engine(torch.from_numpy(canvas), torch.from_numpy(sizes).float(), packed)


def assert_close(
    config: dict[str, ViewConfig], ours: list[torch.Tensor], cpu: list[torch.Tensor], most: float
) -> None:
    """Mean difference in gray levels."""
    assert len(ours) == len(cpu)
    black = torch.zeros(1, ours[0].shape[1], 1, 1)
    to_float = Views(config, black.shape[1]).to_float[0]
    level = to_float.of_planes(black + 1) - to_float.of_planes(black)
    for one, other in zip(ours, cpu, strict=True):
        assert one.shape == other.shape
        assert one.dtype == torch.float32
        difference = ((one - other) / level).abs()
        assert difference.mean() <= most + 1e-4, float(difference.mean())


def on_an_imagined_device(transforms: list[Component], sizes: np.ndarray) -> None:
    """All views on a device for whose values the host never waits; they are those of the CPU."""
    in_process(views_on_a_device, transforms, sizes)


def views_on_a_device(transforms: list[Component], sizes: np.ndarray) -> None:
    config = views_of(transforms)
    engine = Engine(Views(config), config)
    packed = engine.draw_batch(0, np.zeros(len(sizes), int), np.arange(len(sizes)), sizes)
    pixels = torch.from_numpy(smooth_images(len(sizes), HEIGHT, WIDTH))
    each = None if (sizes == sizes[0]).all() else torch.from_numpy(sizes).float()
    with ImaginedDevice() as device:
        sent = [x if x is None else x.to(NAME) for x in (pixels, each, packed.numbers)]
        engine(*sent[:2], replace(packed, numbers=sent[2]))  # the first call sends constants
        device.waits.clear()
        views = engine(*sent[:2], replace(packed, numbers=sent[2]))
        assert device.waits == [], device.waits
    expected = engine(pixels, each, packed)
    for view, other in zip(views, expected, strict=True):
        assert view.device.type == NAME
        assert view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)
        difference = (view.values - other).abs().mean()
        assert difference < 0.02, float(difference)  # products in float16
