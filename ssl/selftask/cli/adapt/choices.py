"""Choices of ``selftask adapt``: each key with its value and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from selftask.config.checks.grid import patch_size
from selftask.config.schema import Component
from selftask.registry import METHODS

BATCH = 64
LARGEST_SIDE = 224  # pixels; the cost of a step grows with its square
FEW, SOME, MANY = 2_000, 20_000, 200_000  # images

_NOT_ONLY_IMAGES = {"labels", "numbers", "captions"}  # requirements of methods
_BY_NAME = {"dinov3": "dinov3", "dinov2": "dinov2", "dino": "dino", "mae": "mae", "clip": "dino"}
"""Part of a model's name -> method; the first part that the name contains decides."""


@dataclass(frozen=True)
class Choice:
    """A value for a key, and why it was chosen."""

    key: str
    value: Any
    reason: str


def choose_method(facts: dict[str, Any]) -> tuple[str, str]:
    """Return the method that continues a model, and the reason.

    Args:
        facts: Metadata of the model, see ``open_model``.
    """
    architecture = Component(**facts["architecture"])
    trained = str(facts.get("method"))
    needs = METHODS.declared(trained, "requires", ()) if trained in METHODS else _NOT_ONLY_IMAGES
    if _NOT_ONLY_IMAGES.isdisjoint(needs) and "distill" not in trained:
        return trained, "the model was trained with it"
    if patch_size(architecture) is None:
        return "moco", "a network without patches; the queue makes up for a small batch"
    name = str(architecture.args.get("model", architecture.name)).lower()
    for part, method in _BY_NAME.items():
        if part in name and part == method:
            return method, f"the name of the model has {part} in it"
        if part in name:
            return method, "an image tower of CLIP, and there are no captions"
    return "dino", "a transformer that was trained with labels"


def choose_side(facts: dict[str, Any]) -> list[Choice]:
    """Return a list with the choice of image size; empty if the model's input size is unknown.

    Sizes above ``LARGEST_SIDE`` pixels are reduced to it, rounded down to whole patches, or to a
    multiple of 32 pixels without patches.

    Args:
        facts: As in ``choose_method``.
    """
    architecture = Component(**facts["architecture"])
    side = facts.get("input_size") or architecture.args.get("img_size")
    patch = patch_size(architecture)
    if side is None:
        return []
    if side <= LARGEST_SIDE:
        return [Choice("image_size", side, "that of the model")]
    step = patch or 32
    size = LARGEST_SIDE // step * step
    return [Choice("image_size", size, f"{side} of the model costs more; a multiple of {step}")]


def choose_batch(num_images: int) -> Choice:
    """Return the choice of batch size: 64, halved until an epoch has 4 batches, but at least 8."""
    batch = BATCH
    while batch > 8 and 4 * batch > num_images:
        batch //= 2
    return Choice("train.batch_size", batch, f"{num_images:,} images")


def choose_schedule(
    num_images: int, batch: int, *, is_small: bool, has_layers: bool
) -> Iterator[Choice]:
    """Yield the choices of epochs, learning rate, layer decay and initially frozen parameters.

    Layer decay is chosen only for a transformer without adapters.

    Args:
        num_images: Number of training images.
        batch: Number of images in an optimizer step, for the reason.
        is_small: Whether adapters or few parameters are trained, which learn at higher rates.
        has_layers: Whether the backbone is a transformer.
    """
    epochs = 100 if num_images < FEW else 40 if num_images < SOME else 15
    epochs = epochs if num_images < MANY else 5
    yield Choice("train.epochs", epochs, f"{num_images:,} images")
    base = 1e-3 if is_small else 1e-4
    yield Choice(
        "optimizer.lr",
        {"base": base, "per": 256, "rule": "sqrt"},
        f"low, since the weights are trained already; for {batch} images a step"
        if not is_small
        else f"adapters start from 0; for {batch} images a step",
    )
    if has_layers and not is_small:
        yield Choice("optimizer.layer_decay", 0.8, "lower layers are more general")
    groups = [{"match": "backbone", "freeze": "10%"}]
    yield Choice("optimizer.groups", groups, "heads are new: first they learn alone")


def choose_preservation(num_images: int) -> Choice:
    """Return the choice of ``hooks.preserve.weight``."""
    weight = 1.0 if num_images < SOME else 0.3
    reason = "few images teach little" if num_images < SOME else "many images, more freedom"
    return Choice("hooks.preserve.weight", weight, f"{reason}; holds the features to the start")


def choose_measures(*, has_labels: bool) -> Iterator[Choice]:
    """Yield the choices of evaluation interval and, with labels, best checkpoint and early stop."""
    yield Choice("eval.every", "10%", "before, during and after")
    if has_labels:
        yield Choice("train.keep_best.metric", "knn_top1", "data and data.val have labels")
        stopping = {"metric": "knn_top1", "patience": 5}
        yield Choice("hooks.early_stopping", stopping, "half of the run without improvement")
