"""Semantic segmentation with frozen patch features: nearest neighbors, and a linear head.

Images of S x S pixels, patches in a grid of h x w, M patches in memory, E features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source
from selftask.data.sources.files import Folder
from selftask.distributed.accelerator import forked_rng
from selftask.errors import join_some
from selftask.evaluate.dense.confusion import Confusion, upsampled_classes
from selftask.evaluate.dense.heads import HeadOptions, check_choice, fit_heads, sample_patches
from selftask.evaluate.dense.masks import (
    TABLE,
    Classes,
    MaskFolder,
    classes_of,
    folder_problem,
    images_in,
    read_table,
)
from selftask.evaluate.dense.patches import PatchFeatures, limited, square_batches
from selftask.evaluate.on_ranks import in_order
from selftask.logs import get_logger
from selftask.models.eval_mode import in_eval_mode
from selftask.registry import register_evaluation

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SegmentationOptions(HeadOptions):
    """Options of the segmentation evaluation: patches, heads, and mask values to ignore."""

    ignore: list[int] = setting([255], min=0, max=65535)
    """Values in the masks whose pixels do not count, such as 255."""


@register_evaluation("segmentation")
@dataclass(frozen=True, kw_only=True)
class Segmentation(SegmentationOptions):
    """Semantic segmentation from frozen patch features, by k-NN and by a linear head.

    For each head: mIoU (``segmentation_knn_miou``, ``segmentation_linear_miou``), pixel accuracy
    (``_accuracy``) and mean class accuracy (``_class_accuracy``).
    """

    needs_labels: ClassVar[bool] = False
    takes_backbone: ClassVar[bool] = True

    data: str | None = setting(None, path=True)
    """Folder of training images and masks, ``images/NAME.jpg`` and ``masks/NAME.png``."""
    val: str | None = setting(None, path=True)
    """Folder of test images and masks."""

    def problems(self, config: dict[str, Any] | None = None) -> Iterator[str]:
        yield from super().problems(config)
        for name, root in (("data", self.data), ("val", self.val)):
            problem = "a folder with images and masks is expected"
            if root is None or (problem := folder_problem(root) or ""):
                yield f"{name}: {problem}"

    def __call__(
        self, backbone: nn.Module, config: Config, sources: Sources, device: torch.device
    ) -> dict[str, float]:
        """Return the metrics of the images in ``val``; those in ``data`` are the training images.

        Raises:
            UserError: As ``open_folders`` and ``evaluate_segmentation``.
        """
        assert self.data is not None and self.val is not None
        opened = [Folder(Folder.Config(path=images_in(root))) for root in (self.data, self.val)]
        train, test, classes = open_folders(
            {"data": self.data, "val": self.val}, opened, self, read_table(self.data)
        )
        return evaluate_segmentation(
            backbone, config, train, test, classes, self, device=device
        ).row()


def open_folders(
    roots: Mapping[str, str],
    sources: Sequence[Source],
    options: SegmentationOptions,
    table: Mapping[int, str] | None,
) -> tuple[MaskFolder, MaskFolder, Classes]:
    """Return training and test images with masks, and their classes.

    Args:
        roots: Folder of each set by its config key.
        sources: Their images.
        options: Number of images, and indices to ignore.
        table: Names of the classes by index, or None.

    Raises:
        UserError: As ``MaskFolder``.
    """
    train, test = (
        MaskFolder(
            root,
            limited(source, options.images, options.seed),
            key,
            ignore=options.ignore,
            table=table,
        )
        for (key, root), source in zip(roots.items(), sources, strict=True)
    )
    return train, test, classes_of(table, options.ignore, train.pixels, test.pixels)


@dataclass(frozen=True)
class SegmentationResult:
    """Confusion matrices of the test pixels by head.

    Attributes:
        classes: The classes, C.
        confusions: Confusion matrix by the name of the head.
        facts: Learning rate, and numbers of images, classes and patches, by column.
    """

    classes: Classes
    confusions: dict[str, Confusion]
    facts: dict[str, float]

    def row(self) -> dict[str, float]:
        """Return mIoU and accuracies of each head by column, such as ``segmentation_knn_miou``."""
        row: dict[str, float] = {}
        for head, confusion in self.confusions.items():
            row |= {f"segmentation_{head}_{k}": v for k, v in confusion.metrics().items()}
        return row

    def by_class(self) -> dict[str, float]:
        """Return the IoU of each class by column, ``segmentation_HEAD_iou/CLASS``.

        Classes that are neither present nor predicted are left out.
        """
        return {
            f"segmentation_{head}_iou/{name}": value
            for head, confusion in self.confusions.items()
            for name, value in zip(self.classes.names, confusion.iou().tolist(), strict=True)
            if value == value
        }


def evaluate_segmentation(
    backbone: nn.Module,
    config: Config,
    train: MaskFolder,
    test: MaskFolder,
    classes: Classes,
    options: SegmentationOptions,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> SegmentationResult:
    """Segment test images by the labeled patches of training images.

    Images and masks are resized to S x S. Class scores of patches are interpolated to S x S, and
    predictions are compared with masks pixel by pixel. Several ranks share the images of both sets,
    and each trains the heads.

    Args:
        backbone: A backbone with patches, see ``models.features``.
        config: Config with the normalization of images and the handling of unreadable ones.
        train: Training images and masks.
        test: Test images and masks.
        classes: Classes of both sets.
        options: Image size, heads and their options.
        device: Device to compute on; the backbone is moved to it.
        tell: Called with lines about images, classes and memory.

    Raises:
        UserError: If the backbone has no patches of this size, features are not finite, or there
            are too few images or patches.
    """
    size = options.size_of(config)
    patches = PatchFeatures(backbone.to(device), size, options.layer)
    if "linear" in options.heads and len(options.lr) > 1:
        check_choice(len(train.masks))
    for line in _warnings(classes, train, test):
        tell(f"warning: {line}")
    with in_eval_mode(backbone), forked_rng(), torch.no_grad():
        features, shares, images = sample_patches(
            patches,
            square_batches(train.open(size, classes), config, device, train.key),
            options,
            len(train.masks),
            lambda batch: batch.extras["mask"],
            len(classes),
        )
        heads, facts = fit_heads(options, features, shares, images)
        facts = {f"segmentation_{name}": value for name, value in facts.items()}
        tell(
            f"{len(train.masks)} training and {len(test.masks)} test images of {size}x{size} "
            f"pixels, {len(classes)} classes; memory: {len(features):,} patches of "
            f"{features.shape[1]} features, {features.nbytes / 1e6:,.1f} MB"
        )
        del features

        def segment(batch: Batch) -> dict[str, Tensor]:
            confusions = {name: Confusion(len(classes), device) for name in heads}
            masks = batch.extras["mask"].to(device)
            for dense, mask in zip(patches(batch.all_views[0]), masks, strict=True):
                queries = dense.flatten(1).T  # (h * w, E)
                for name, score in heads.items():
                    scores = score(queries).T.unflatten(1, dense.shape[1:])  # (C, h, w)
                    confusions[name].add(mask, upsampled_classes(scores, size))
            return {name: confusion.counts.cpu() for name, confusion in confusions.items()}

        confusions = {name: Confusion(len(classes)) for name in heads}
        batches = square_batches(test.open(size, classes), config, device, test.key)
        for counts in in_order(segment, batches):
            for name, confusion in confusions.items():
                confusion.counts += counts[name]
    facts |= {"train_images": len(train.masks), "test_images": len(test.masks)}
    facts |= {"classes": len(classes), "patches": len(shares), "size": size}
    return SegmentationResult(classes, confusions, facts)


def _warnings(classes: Classes, train: MaskFolder, test: MaskFolder) -> Iterator[str]:
    """Yield a line about classes without pixels, and one about those of one set only."""
    named = list(zip(classes.indices, classes.names, strict=True))
    empty = [n for i, n in named if not (train.pixels[i] or test.pixels[i])]
    untrained = [n for i, n in named if test.pixels[i] and not train.pixels[i]]
    untested = [n for i, n in named if train.pixels[i] and not test.pixels[i]]
    for names, text in (
        (empty, f"of {TABLE} without a pixel in any mask, left out of the means"),
        (untrained, f"only in {test.key}, not in {train.key}: never predicted, their IoU is 0"),
        (untested, f"only in {train.key}, not in {test.key}: IoU 0 if predicted anywhere"),
    ):
        if names:
            yield f"{len(names)} {'class' if len(names) == 1 else 'classes'} {text}: " + (
                join_some(names)
            )
