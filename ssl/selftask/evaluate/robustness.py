"""Errors on corrupted test images, by k-NN on the features of clean training images.

Hendrycks and Dietterich, ICLR 2019, arXiv:1903.12261: corruptions at five strengths. As for
CIFAR-10-C in AugMix (arXiv:1912.02781), errors are not divided by the errors of a reference
network; for ImageNet they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selftask.config.fields import setting
from selftask.config.schema import Component, Config
from selftask.data.loading.dataset import EvalDataset
from selftask.data.loading.open_data import Sources, open_val
from selftask.data.source import Source, channels_of
from selftask.data.transforms.pipeline import build_pipeline
from selftask.errors import UserError, nearest
from selftask.evaluate.corruptions import CORRUPTIONS
from selftask.evaluate.dense.patches import limited
from selftask.evaluate.features import Features, collect
from selftask.evaluate.knn import KNN
from selftask.evaluate.label_counts import LabelCounts, check_label_counts, count_shared_images
from selftask.evaluate.offline import iterate_source
from selftask.evaluate.on_ranks import part_of_rank
from selftask.evaluate.online import evaluated_model
from selftask.logs import get_logger

log = get_logger(__name__)

Images = tuple[Source, str, list[Component]]  # with their config key and transforms

_CLASSES = 1000  # of ImageNet, whose errors the paper divides by AlexNet's
ALEXNET = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
    "jpeg": 0.606500,
}
"""Error of AlexNet on each corruption that ImageNet-C counts, mean over the strengths."""
_UNCOUNTED = "alexnet: ImageNet-C counts none of these corruptions; use alexnet=false"


@dataclass(frozen=True, kw_only=True)
class RobustnessOptions:
    """Corruptions, and number of test images."""

    corruptions: list[str] = setting([*CORRUPTIONS], nonempty=True)
    """Names of corruptions, each at five strengths."""
    folder: str | None = None
    """Folder of corrupted images, CORRUPTION/STRENGTH/CLASS/IMAGE as in ImageNet-C; null: images
    are corrupted by selftask.
    """
    images: int | None = setting(None, min=1)
    """Maximum number of test images, chosen at random; null: all."""
    k: int = setting(20, min=1)
    """Number of neighbors that vote."""
    alexnet: bool = False
    """Whether errors are also divided by AlexNet's on ImageNet-C; for ImageNet's classes only."""

    def problems(self) -> Iterator[str]:
        for name in self.corruptions:
            if name not in CORRUPTIONS:
                yield f"corruptions: there is no {name!r}; {nearest(name, CORRUPTIONS)}"
        if len({*self.corruptions}) < len(self.corruptions):
            yield "corruptions: a name stands twice"
        if self.alexnet and self.folder is None and not ALEXNET.keys() & {*self.corruptions}:
            yield _UNCOUNTED
        if self.folder is not None and self.corruptions != [*CORRUPTIONS]:
            yield "corruptions: the folder has its own; leave corruptions out"


def measure_robustness(
    backbone: nn.Module,
    config: Config,
    sources: Sources,
    options: RobustnessOptions,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Return the errors of k-NN, 0 to 1, on clean and on corrupted test images.

    Images are corrupted before they are normalized, or read from ``options.folder``. The draws
    depend on ``train.seed`` and on the position of the image among the test images. Several ranks
    share the images and the search for neighbors.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.transforms``.
        sources: Training and test images, with labels.
        options: Corruptions, and number of test images.
        device: Device to compute features on; the backbone is moved to it.
        tell: Called with the rows of a table, a corruption and its error at each strength, and with
            warnings about images.

    Returns:
        ``clean_error``; ``corruption_error``, the mean over corruptions and strengths;
        ``relative_corruption_error``, this minus ``clean_error``; ``NAME_error`` for each
        corruption, the mean over strengths; ``test_images``; with ``alexnet`` also
        ``mean_corruption_error``, the mean of these errors divided by AlexNet's.

    Raises:
        UserError: If there are no test images, labels or neighbors, or if features of several
            layers are requested; with ``alexnet`` also if the number of classes differs from
            ImageNet's. Known labels are checked before features are computed.
    """
    test = _test_images(config, sources, options)
    plain, model = config.eval.transforms, evaluated_model(backbone, config.eval).to(device)
    if options.folder is None:
        corruptions = _made(test, plain, options.corruptions)
    else:
        corruptions = _read(options, sources.train, plain)

    def features(source: Source, key: str, transforms: list[Component]) -> Features:
        changed = replace(config, eval=replace(config.eval, transforms=transforms))
        once = tell if transforms is plain else log.debug
        return collect(iterate_source(model, changed, source, device=device, key=key, tell=once))

    def error(shown: Features) -> float:
        return 1 - KNN(k=[options.k])(part_of_rank(bank), part_of_rank(shown))["knn_top1"]

    bank, shown = features(sources.train, "data", plain), features(test, "data.val", plain)
    if options.alexnet:
        _check_imagenet(len(bank.targets.unique()))
    if shared := count_shared_images(bank, shown):
        tell(f"warning: {shared} of {len(shown)} test images are also training images")
    clean = error(shown)
    tell(f"{'clean':15} {clean:.3f}")
    errors: dict[str, float] = {}
    for name, sets in corruptions.items():
        of_strengths = [error(features(*images)) for images in sets]
        errors[name] = sum(of_strengths) / len(of_strengths)
        tell(f"{name:15} {errors[name]:.3f}   {' '.join(f'{e:.3f}' for e in of_strengths)}")
    return {**_means(clean, errors, options), "test_images": len(shown)}


def _test_images(config: Config, sources: Sources, options: RobustnessOptions) -> Source:
    """Return the test images; raise UserError if they are missing or the config does not fit."""
    if sources.val is None:
        raise UserError("data.val is missing: give the labeled images to test on, data.val=DIR")
    if len(config.eval.layers) > 1:
        raise UserError(
            "eval.layers: robustness is measured for one layer, such as eval.layers=[-1]"
        )
    test = limited(sources.val, options.images)
    counts = LabelCounts.of_sources(Sources(sources.train, test))
    if counts is not None:
        check_label_counts({"knn": Component(name="knn", args={"k": [options.k]})}, counts)
        if options.alexnet:
            _check_imagenet(len(counts.classes))
    return test


def _means(clean: float, errors: dict[str, float], options: RobustnessOptions) -> dict[str, float]:
    """Return the means of the errors of all corruptions, and each of them, by column."""
    mean = sum(errors.values()) / len(errors)
    row = {
        "clean_error": clean,
        "corruption_error": mean,
        "relative_corruption_error": mean - clean,
    }
    if options.alexnet:
        ratios = [errors[name] / ALEXNET[name] for name in errors if name in ALEXNET]
        row["mean_corruption_error"] = sum(ratios) / len(ratios)
    return row | {f"{name}_error": error for name, error in errors.items()}


def _made(test: Source, plain: list[Component], names: list[str]) -> dict[str, Iterable[Images]]:
    """Return the test images with transforms that corrupt them, by corruption and strength."""
    side = _side_of(test, plain, names)
    return {
        name: [
            (test, "data.val", corrupted(plain, name, strength, side))
            for strength in CORRUPTIONS[name].strengths
        ]
        for name in names
    }


def _read(
    options: RobustnessOptions, train: Source, plain: list[Component]
) -> dict[str, Iterable[Images]]:
    """Return the images of ``options.folder`` by corruption and strength, opened when needed."""

    def opened(path: Path) -> Images:
        key = f"folder: {path}"
        source = open_val(Component(name="folder", args={"path": str(path)}), train, key)
        return limited(source, options.images), key, plain

    folder = Path(str(options.folder)).expanduser()
    strengths = {
        corruption.name: sorted(path for path in corruption.iterdir() if path.is_dir())
        for corruption in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if corruption.is_dir()
    }
    if not strengths or not all(strengths.values()):
        raise UserError(f"folder: {folder}: expected CORRUPTION/STRENGTH/CLASS/IMAGE in it")
    if options.alexnet and not ALEXNET.keys() & strengths.keys():
        raise UserError(_UNCOUNTED)
    return {name: map(opened, paths) for name, paths in strengths.items()}


def corrupted(transforms: list[Component], name: str, strength: Any, side: int) -> list[Component]:
    """Return the transforms with a corruption before the first ``normalize``.

    Args:
        transforms: Transforms of the evaluation.
        name: Name of the corruption.
        strength: One of its strengths in ``CORRUPTIONS``.
        side: Shorter side of the images before ``normalize``, in pixels.
    """
    first = _num_before_normalize(transforms)
    return [*transforms[:first], *CORRUPTIONS[name].transforms(strength, side), *transforms[first:]]


def _check_imagenet(num_classes: int) -> None:
    if num_classes != _CLASSES:
        raise UserError(
            f"alexnet: its errors are those of the {_CLASSES} classes of ImageNet, and data has "
            f"{num_classes}; use alexnet=false"
        )


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
