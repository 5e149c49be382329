"""Images with any number of channels: OpenCV's limits, and config checks of transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from selftask.config.schema import Component
from selftask.data.transforms.own import check_class, check_own
from selftask.errors import UserError, with_noun
from selftask.registry import TRANSFORMS

RGB = 3
_AT_ONCE = 4  # most channels that all OpenCV functions accept


def by_groups(change: Callable[[np.ndarray], np.ndarray], image: np.ndarray) -> np.ndarray:
    """Apply an OpenCV function to an image (H, W, C) with any number of channels.

    ``change`` is called with images of three or four channels, or with single planes (H, W). Some
    OpenCV functions reject other numbers of channels. Others compute coordinates differently.
    """
    channels = image.shape[2]
    if channels in (RGB, _AT_ONCE):
        return change(image)
    in_groups = channels - channels % _AT_ONCE
    groups = [image[..., first : first + _AT_ONCE] for first in range(0, in_groups, _AT_ONCE)]
    planes = [image[..., first] for first in range(in_groups, channels)]
    parts = [change(np.ascontiguousarray(group)) for group in groups]
    parts += [change(np.ascontiguousarray(plane))[..., None] for plane in planes]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


def for_channels(transform: Any, channels: int) -> Any:
    """Return a copy of the transform with ``channels`` set, or the transform itself.

    The attribute is set only if the class has it, as an integer. An instance attribute of that name
    is a config key and is kept.
    """
    asks = isinstance(getattr(type(transform), "channels", None), int)
    if not asks or "channels" in vars(transform) or transform.channels == channels:
        return transform
    return with_attribute(transform, "channels", channels)


def with_attribute(transform: Any, name: str, value: int) -> Any:
    """Return a copy of the transform that has the value in place of a class attribute."""
    copied = copy.copy(transform)
    object.__setattr__(copied, name, value)  # most are frozen dataclasses
    return copied


def channel_problems(transform: Any, channels: int) -> Iterator[str]:
    """Yield ``key: why`` for each key that does not work with this number of channels."""
    if hasattr(transform, "channel_problems"):
        yield from transform.channel_problems(channels)


def list_problems(transforms: Iterable[Component], key: str, channels: int) -> Iterator[str]:
    """Build the transforms of a list, and yield each config problem with its key.

    Args:
        transforms: Transforms in order.
        key: Config key of the list.
        channels: Number of channels of the images.
    """
    for position, component in enumerate(transforms):
        kind = TRANSFORMS[component.name]
        try:
            check_class(kind, component.name, component.args)
        except UserError as error:
            yield f"{key}.{position}: {error}"
            continue
        try:
            transform = kind(**component.args)
        except UserError as error:
            yield f"{key}.{position}.{error}"
            continue
        try:
            check_own(transform)
        except UserError as error:
            yield f"{key}.{position}: {error}"
            continue
        for problem in channel_problems(transform, channels):
            yield f"{key}.{position}.{problem}"


def needs_rgb(subject: str, channels: int, instead: str) -> Iterator[str]:
    """Yield a problem if the images do not have three channels.

    Args:
        subject: Key and value that need three channels.
        channels: Number of channels of the images.
        instead: Advice to the user.
    """
    if channels != RGB:
        yield f"{subject} needs 3 channels, the data have {channels}; {instead}"


def needs_number(subject: str, number: int, channels: int, instead: str) -> Iterator[str]:
    """Yield a problem if a list of ``number`` values does not have one for each channel.

    Args:
        subject: Key and value.
        number: Number of values.
        channels: Number of channels of the images.
        instead: Advice to the user.
    """
    if number != channels:
        yield (
            f"{subject} is for {with_noun(number, 'channel')}, the data have {channels}; {instead}"
        )
