"""Errors on corrupted test images, by k-NN on the features of clean training images.

Hendrycks and Dietterich, ICLR 2019, arXiv:1903.12261: corruptions at five strengths. As for
CIFAR-10-C in AugMix, arXiv:1912.02781, errors are not divided by those of another network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from selftask.config.fields import setting
from selftask.config.schema import Component, Config
from selftask.data.loading.dataset import EvalDataset
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source, channels_of
from selftask.data.subset import Part, Subset
from selftask.data.transforms.pipeline import build_pipeline
from selftask.errors import UserError, nearest
from selftask.evaluate.features import Features, extract_features
from selftask.evaluate.knn import KNN
from selftask.evaluate.label_counts import LabelCounts, check_label_counts, count_shared_images
from selftask.evaluate.offline import eval_batches
from selftask.evaluate.online import evaluated_model
from selftask.logs import get_logger

log = get_logger(__name__)

STRENGTHS: dict[str, tuple[float, ...]] = {  # of ImageNet-C
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),  # share of the pixels
    "gaussian_blur": (1, 2, 3, 4, 6),  # sigma in pixels of an image of 224
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),  # factor
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),  # offset, on the scale [0, 1]
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),  # share of the side that is kept
}
_SIDE = 224  # pixels, of ImageNet-C


@dataclass(frozen=True, kw_only=True)
class RobustnessOptions:
    """Corruptions, and number of test images."""

    corruptions: list[str] = setting([*STRENGTHS])
    """Names of corruptions, each at five strengths."""
    images: int | None = setting(None, min=1)
    """Largest number of test images, in a random choice; null: all."""
    k: int = setting(20, min=1)
    """Number of neighbors that vote."""

    def problems(self) -> Iterator[str]:
        if not self.corruptions:
            yield f"corruptions: []; one or more of {', '.join(STRENGTHS)} are expected"
        for name in self.corruptions:
            if name not in STRENGTHS:
                yield f"corruptions: there is no {name!r}; {nearest(name, STRENGTHS)}"
        if len({*self.corruptions}) < len(self.corruptions):
            yield "corruptions: a name stands twice"


def measure_robustness(
    backbone: nn.Module,
    config: Config,
    sources: Sources,
    options: RobustnessOptions,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Return the errors of k-NN on clean and on corrupted test images.

    Images are corrupted before they are normalized. The draws depend on ``train.seed`` and on the
    position of the image among the test images.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.transforms``.
        sources: Training and test images, with labels.
        options: Corruptions, and number of test images.
        device: Device to compute features on.
        tell: Called with the rows of a table: a corruption and its error at each strength.

    Returns:
        ``clean_error``; ``corruption_error``, the mean over corruptions and strengths;
        ``relative_corruption_error``, this minus ``clean_error``; ``NAME_error`` for each
        corruption, the mean over strengths; ``test_images``.

    Raises:
        UserError: If there are no test images, labels or neighbors, or the features of several
            layers. Known labels are checked before features are computed.
    """
    if sources.val is None:
        raise UserError("data.val is missing: give the labeled images to test on, data.val=DIR")
    if len(config.eval.layers) > 1:
        raise UserError(
            "eval.layers: robustness is measured for one layer, such as eval.layers=[-1]"
        )
    test, knn = sources.val, Component(name="knn", args={"k": [options.k]})
    if options.images is not None and options.images < len(test):
        test = Subset(test, Part(count=options.images))
    counts = LabelCounts.of_sources(Sources(sources.train, test))
    if counts is not None:
        check_label_counts({"knn": knn}, counts)
    plain, model = config.eval.transforms, evaluated_model(backbone, config.eval).to(device)
    side = _side_of(test, plain, options.corruptions)

    def features(source: Source, key: str, transforms: list[Component]) -> Features:
        changed = replace(config, eval=replace(config.eval, transforms=transforms))
        batches = eval_batches(changed, source, device, key)
        result = extract_features(model, batches, device=device)
        if transforms is plain and (unreadable := batches.bad_files.summary()):
            tell(f"warning: {unreadable}")
        return result

    def error(shown: Features) -> float:
        return 1 - KNN(k=[options.k])(bank, shown)["knn_top1"]

    bank, shown = features(sources.train, "data", plain), features(test, "data.val", plain)
    if shared := count_shared_images(bank, shown):
        tell(f"warning: {shared} of {len(shown)} test images are also training images")
    clean = error(shown)
    tell(f"{'clean':15} {clean:.3f}")
    errors: dict[str, float] = {}
    for name in options.corruptions:
        of_strengths = [
            error(features(test, "data.val", corrupted(plain, name, strength, side)))
            for strength in STRENGTHS[name]
        ]
        errors[name] = sum(of_strengths) / len(of_strengths)
        tell(f"{name:15} {errors[name]:.3f}   {' '.join(f'{e:.3f}' for e in of_strengths)}")
    mean = sum(errors.values()) / len(errors)
    row = {
        "clean_error": clean,
        "corruption_error": mean,
        "relative_corruption_error": mean - clean,
    }
    return row | {f"{name}_error": e for name, e in errors.items()} | {"test_images": len(shown)}


def corrupted(
    transforms: list[Component], name: str, strength: float, side: int
) -> list[Component]:
    """Return the transforms with a corruption before the first ``normalize``.

    Args:
        transforms: Those of the evaluation.
        name: Name of the corruption.
        strength: One of its ``STRENGTHS``.
        side: Shorter side of the images before ``normalize``, in pixels.
    """
    first = _num_before_normalize(transforms)
    return [*transforms[:first], *_components(name, strength, side), *transforms[first:]]


def _components(name: str, strength: float, side: int) -> list[Component]:
    """Return the transforms of a corruption."""
    always: dict[str, Any] = {"p": 1.0}
    twice = [strength, strength]
    if name == "gaussian_noise":
        return [Component(name=name, args={"sigma": twice, **always})]
    if name == "impulse_noise":
        drawn = [-math.log1p(-strength)] * 2  # some pixels are drawn more than once
        return [Component(name="salt_and_pepper", args={"amount": drawn, **always})]
    if name == "gaussian_blur":
        sigma = [strength * side / _SIDE] * 2
        return [Component(name=name, args={"sigma": sigma, **always})]
    if name == "contrast":  # about the middle gray
        offset = [(1 - strength) / 2] * 2
        return [Component(name="contrast_noise", args={"contrast": twice, "offset": offset})]
    if name == "brightness":
        return [Component(name="contrast_noise", args={"offset": twice})]
    small = {"size": max(1, round(strength * side)), "interpolation": "bilinear"}
    large = {"size": side, "interpolation": "nearest"}
    return [Component(name="resize", args=small), Component(name="resize", args=large)]


def _num_before_normalize(transforms: list[Component]) -> int:
    names = [transform.name for transform in transforms]
    return names.index("normalize") if "normalize" in names else len(names)


def _side_of(source: Source, transforms: list[Component], corruptions: list[str]) -> int:
    """Return the shorter side of the first readable image before it is normalized, in pixels."""
    before = transforms[: _num_before_normalize(transforms)]
    dataset = EvalDataset(source, build_pipeline(before, "eval.transforms", channels_of(source)))
    for index in range(len(source)):
        for view in dataset.sample((0, index)).views:  # none if it cannot be read
            height, width = view.shape[:2]
            if height != width and "pixelate" in corruptions:
                raise UserError(
                    f"corruptions: pixelate needs square images, and eval.transforms gives {width}x"
                    f"{height}; add center_crop there, or leave pixelate out"
                )
            return min(height, width)
    raise UserError("data.val: no image can be read")
