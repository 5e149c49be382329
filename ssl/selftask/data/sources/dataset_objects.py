"""Map-style data sets from torchvision or from the user's code."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from selftask.config.extensions.imports import import_object
from selftask.config.extensions.user_code import explain_failure
from selftask.config.fields import setting
from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.reading.files import now_reading
from selftask.data.reading.image import as_pixels, reason_of
from selftask.data.source import ExtraKind, Source
from selftask.errors import BadImage, UserError, check_known, explained
from selftask.files.paths import is_folder
from selftask.registry import register_source

_WHOLE = "iub"  # NumPy kinds of labels; False and True are classes 0 and 1


class DatasetSource(Source):
    """Source of a map-style data set, whose items are images or begin with (image, label).

    An item that is None counts as an unreadable image.

    If the data set has an attribute ``extras``, like that of ``Source``, its items are (image,
    label, extras), where ``extras`` is a dict.

    Args:
        dataset: The data set.
        name: Its name, for messages and the names of images.
        channels: Number of channels of each image.

    Raises:
        UserError: If the data set is not map-style or has no items, or an entry of its ``extras``
            is not a kind of field.
    """

    def __init__(self, dataset: Any, name: str, channels: int = 3) -> None:
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise UserError(
                    f"data.dataset: {name} has no {method}; a map-style data set is expected"
                )
        with explained(f"data.dataset: len({name})"):
            num_images = len(dataset)
        if num_images == 0:
            raise UserError(f"data.dataset: {name} has no images")
        self.dataset = dataset
        self.name = name
        self.channels = channels
        self.labels = _known_labels(dataset)
        self.extras = dict(getattr(dataset, "extras", {}))
        unknown = sorted({*self.extras.values()} - {*get_args(ExtraKind)})
        if unknown:
            kinds = ", ".join(get_args(ExtraKind))
            raise UserError(f"data.dataset: extras of {name}: {unknown[0]!r} is none of {kinds}")
        self._last: tuple[int, Any] = -1, None  # index and item

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        item = self._item(index)
        image, label = (*item, NO_LABEL)[:2] if isinstance(item, tuple | list) else (item, NO_LABEL)
        if isinstance(image, Mapping | tuple):
            kind = type(image).__name__
            expected = "the data set must return an image or (image, label), without views of it"
            raise BadImage(self.path(index), f"a {kind} is no image; {expected}")
        return self._pixels(image, index), _as_label(label)

    def extra(self, index: int, name: str) -> Any:
        """Return an extra field of an item; raises BadImage, or UserError if the item lacks it."""
        item = self._item(index)
        if not (isinstance(item, tuple | list) and len(item) > 2 and name in item[2]):
            raise UserError(
                f"{self.path(index)}: its item has no {name!r}; (image, label, extras) is expected "
                "of a data set with `extras`"
            )
        value = item[2][name]
        return self._pixels(value, index) if self.extras[name] == "image" else value

    def _item(self, index: int) -> Any:
        """Return an item of the data set; raises BadImage. With extras, the last one is cached."""
        if self.extras and self._last[0] == index:
            return self._last[1]
        now_reading(self.path(index))
        try:
            item = self.dataset[index]
        except OSError as error:  # raised by image libraries for damaged files
            raise BadImage(self.path(index), str(error) or type(error).__name__) from error
        except (MemoryError, UserError):
            raise
        except Exception as error:  # decoders may raise any error on damaged data
            raise BadImage(self.path(index), explain_failure(error)) from error
        if item is None:
            raise BadImage(self.path(index), "the data set returned None")
        if self.extras:
            self._last = index, item
        return item

    def _pixels(self, image: Any, index: int) -> np.ndarray:
        try:
            return as_pixels(image, self.channels)
        except MemoryError:
            raise
        except Exception as error:  # Pillow decodes an opened image only now
            raise BadImage(self.path(index), reason_of(error)) from error

    def path(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def describe(self) -> str:
        """Return a line such as ``50000 images, 10 classes (torchvision:CIFAR10)``.

        Instead of the number of classes, it has ``labels not known`` if images must be read first.
        """
        classes = f"{self.num_classes} classes" if self.num_classes else "labels not known"
        return f"{len(self)} images, {classes} ({self.name})"


@register_source("torchvision")
class Torchvision(DatasetSource):
    """torchvision data set on disk; nothing is downloaded."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        dataset: str
        """Name of torchvision's class, such as CIFAR10."""
        root: str = "data"
        """Folder that holds the downloaded data set."""
        split: str = "train"
        """Split to read, if the class has splits: train, val, test, ... A class that only
        distinguishes training images (``train=True``) reads the others for any name but train."""
        args: dict[str, Any] = field(default_factory=dict)
        """Other keyword arguments of the class; ``download`` is always false."""

    def __init__(self, config: Config) -> None:
        root = os.path.expanduser(config.root)
        if not is_folder(root):
            raise UserError(f"data.root: no such folder: {root} (nothing is downloaded)")
        super().__init__(_open_torchvision(config, root), f"torchvision:{config.dataset}")


@register_source("custom")
class Custom(DatasetSource):
    """Your own map-style class or function, ``package.module:Dataset``."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        dataset: str
        """Class or function that returns the data set, as ``package.module:Dataset``."""
        args: dict[str, Any] = field(default_factory=dict)
        """Keyword arguments of the class or function."""
        channels: int = setting(3, min=1)
        """Number of channels of each image."""

    def __init__(self, config: Config) -> None:
        factory = import_object(config.dataset, "data.dataset")
        with explained(f"data.args: {config.dataset}", TypeError):
            inspect.signature(factory).bind(**config.args)
        try:
            dataset = factory(**config.args)
        except UserError:
            raise
        except Exception as error:  # user code may raise any error
            message = f"data.dataset: {config.dataset!r} {explain_failure(error)}"
            raise UserError(message) from error
        super().__init__(dataset, config.dataset, config.channels)


def _open_torchvision(config: Torchvision.Config, root: str) -> Any:
    import torchvision

    if config.dataset in ("LSUN", "LSUNClass"):
        raise UserError(
            f"data.dataset: torchvision's {config.dataset} unpickles whatever `_cache_*` is in the "
            "current folder; data=NAME_lmdb reads a folder of it"
        )
    classes = [name for name in torchvision.datasets.__all__ if name != "VisionDataset"]
    check_known(
        config.dataset, classes, f"data.dataset: torchvision has no data set {config.dataset!r}"
    )
    factory = getattr(torchvision.datasets, config.dataset)
    parameters = inspect.signature(factory).parameters
    args = dict(config.args)
    if "train" in parameters:
        args.setdefault("train", config.split == "train")
    elif "split" in parameters:
        args.setdefault("split", config.split)
    if "download" in parameters:
        args["download"] = False
    try:
        return factory(root, **args)
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        raise UserError(
            f"data: torchvision's {config.dataset} (split {config.split}) cannot be opened under "
            f"{root}: {error} (selftask downloads nothing)"
        ) from error


def _known_labels(dataset: Any) -> np.ndarray | None:
    """Return the labels in ``targets`` or ``labels`` of a data set, int64 (N,).

    None if neither holds an integer or bool for each item.
    """
    for name in ("targets", "labels"):
        values = getattr(dataset, name, None)
        if values is None or callable(values):
            continue
        labels = np.asarray(values)
        if labels.shape == (len(dataset),) and labels.dtype.kind in _WHOLE:
            return labels.astype(np.int64)
    return None


def _as_label(label: Any) -> int:
    """Convert an integer or bool, or an array with one, to int; others, such as boxes, to -1."""
    array = np.asarray(label) if not isinstance(label, str | dict | list | tuple) else None
    if array is None or array.size != 1 or array.dtype.kind not in _WHOLE:
        return NO_LABEL
    return int(array.reshape(()))
