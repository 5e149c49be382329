"""Checks of users' own transforms: their arguments and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from selftask.config.extensions.user_code import check_takes, source_of
from selftask.data.transforms.transform import Transform
from selftask.errors import UserError

PACKAGE = __name__.partition(".")[0] + "."


def is_own(kind: type) -> bool:
    """Return whether a class of transforms is a user's, not one of selftask's."""
    return not kind.__module__.startswith(PACKAGE)


def read_only(image: np.ndarray) -> np.ndarray:
    """Return a read-only view of an image, since changes in place would last in data and caches."""
    view = image.view()
    view.flags.writeable = False
    return view


def check_class(kind: Any, name: str, args: Mapping[str, Any]) -> None:
    """Raise UserError if a registered transform is a function, or a class that cannot be built.

    Args:
        kind: The class or function.
        name: Its registered name.
        args: Its arguments in the config; empty for a class that is no dataclass.
    """
    if not isinstance(kind, type):
        raise UserError(
            f"{source_of(kind)}: the transform {name} is a function; register a dataclass with "
            "__call__(self, image, rng)"
        )
    if not args:
        check_takes(kind, [], f"the transform {name}, which is no dataclass,")


def check_own(transform: Any) -> None:
    """Raise UserError if a user's transform cannot be called with image and generator.

    Transforms of selftask and subclasses of ``Transform`` are not checked.
    """
    kind = type(transform)
    if not is_own(kind) or isinstance(transform, Transform):
        return
    if not callable(transform):
        raise UserError(f"{source_of(kind)}: {kind.__name__} has no __call__(self, image, rng)")
    check_takes(transform, ["image", "rng"], f"the transform {kind.__name__}")


def check_image(transform: Any, image: Any, channels: int) -> None:
    """Raise UserError unless a user's transform has returned an 8-bit image (H, W, C) with pixels.

    Results of selftask's own transforms are not checked.

    Args:
        transform: The transform.
        image: Its result.
        channels: Number of channels, C.
    """
    if not is_own(type(transform)):
        return
    is_bytes = isinstance(image, np.ndarray) and image.dtype == np.uint8
    if is_bytes and image.ndim == 3 and image.shape[2] == channels and image.size:
        return
    name = getattr(transform, "__name__", type(transform).__name__)  # of a function, or a class
    raise UserError(
        f"{source_of(transform)}: the transform {name} returned {describe(image)}; an array "
        f"(H, W, {channels}) of bytes (uint8) is expected"
    )


def describe(made: Any) -> str:
    """Describe the type of a result; for an array, also its dtype and shape."""
    if made is None:
        return "None"
    of = f" of {made.dtype} {made.shape}" if isinstance(made, np.ndarray) else ""
    return f"a {type(made).__name__}{of}"
