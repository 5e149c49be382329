"""Open the frozen modules of a config, and check that they match the images of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from selftask.config.schema import FrozenModule
from selftask.data.transforms.normalize import moments_of
from selftask.errors import UserError
from selftask.hooks.base import Task
from selftask.logs import get_logger
from selftask.models.weights.frozen import Frozen
from selftask.models.weights.trained import TrainedNetwork, build_own, open_features, open_scores

log = get_logger(__name__)

T = TypeVar("T")


def open_frozen(value: str | FrozenModule, key: str, task: Task) -> Frozen:
    """Return a frozen module: a backbone, or your own ``package.module:Class``.

    Args:
        value: The value in the config.
        key: Its key, for messages.
        task: The task, whose images the module gets.

    Raises:
        UserError: If the module or its weights cannot be opened, or if a backbone takes images with
            another number of channels than the data have.
    """
    module = FrozenModule.of(value)
    if module.is_code:  # may return tokens or scores of any form
        return Frozen(_named(key, module, lambda: build_own(module)), key)
    network = open_trained(module, key, task).network
    backbone: nn.Module = network.backbone  # type: ignore[assignment]
    return Frozen(backbone, key)


def open_trained(
    value: str | FrozenModule, key: str, task: Task, *, scores: bool = False
) -> TrainedNetwork:
    """Return a trained network that outputs features, or with ``scores`` the scores of its head.

    Logs a warning if its weights are random, or if its training images had another normalization.

    Args:
        value: The value in the config.
        key: Its key, for messages.
        task: The task, whose images the network gets.
        scores: Whether the network must have a head for classes or prototypes.

    Raises:
        UserError: If the network, its weights or its head cannot be opened, or if it takes images
            with another number of channels than the data have.
    """
    module = FrozenModule.of(value)
    channels = task.data_module.channels
    trained = _named(
        key, module, lambda: open_scores(module) if scores else open_features(module, channels)
    )
    if trained.channels != channels:
        raise UserError(
            f"{key}: {module.model} takes images of {trained.channels} channels, and the data have "
            f"{channels}"
        )
    if module.weights == "none":
        log.warning("%s: %s has random weights (%s.weights=none)", key, module.model, key)
    else:
        _compare_normalization(trained, key, task)
    return trained


def _named(key: str, module: FrozenModule, build: Callable[[], T]) -> T:
    """Return the result of ``build``; prefix the message of a UserError with key and value."""
    try:
        return build()
    except UserError as error:
        reason = str(error).removeprefix("backbone.model: ")
        raise UserError(f"{key}={module.model}: {reason}") from error


def _compare_normalization(trained: TrainedNetwork, key: str, task: Task) -> None:
    shown = [transform.to_dict() for transform in task.config.eval.transforms]
    theirs = moments_of(trained.transforms, trained.channels)
    ours = moments_of(shown, trained.channels)
    if theirs is None or ours is None:
        return
    (mean, std), (our_mean, our_std) = theirs, ours
    pairs = zip((*mean, *std), (*our_mean, *our_std), strict=True)
    if any(abs(first - second) > 1e-3 for first, second in pairs):
        log.warning(
            "%s: it was trained on images with mean %s and std %s, and the views have %s and %s; "
            "set views and eval.transforms to its own",
            *(key, mean, std, our_mean, our_std),
        )
