"""Evaluate finished weights: a run, a file, or a model of timm or torchvision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from selftask.config.schema import Config
from selftask.data.loading.dataset import BadFiles, EvalDataset
from selftask.data.loading.loader import EvalBatches
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source, channels_of
from selftask.data.views import build_pipeline
from selftask.errors import UserError
from selftask.evaluate.features import Features, extract_features
from selftask.evaluate.label_counts import LabelCounts, check_label_counts, count_shared_images
from selftask.evaluate.online import run_evaluations
from selftask.logs import get_logger

log = get_logger(__name__)

_BATCH_SIZE = 256  # affects memory only


def evaluate_backbone(
    backbone: nn.Module,
    config: Config,
    sources: Sources,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Evaluate a frozen backbone on labelled images by ``eval.evaluations``.

    Without ``data.val`` the training images are also the test images; k-NN then excludes each image
    from its own neighbours.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.evaluations`` and ``eval.transforms``.
        sources: Training and test images.
        device: Device to compute features on.
        tell: Called with a line on the images and classes, and one if test images are also
            training images.

    Returns:
        Metrics by name, and ``train_images``, ``test_images``, ``classes`` and ``chance``.

    Raises:
        UserError: If labels are missing or do not allow the evaluation. Known labels are checked
            before features are computed.
    """
    evaluations = config.eval.evaluations
    if sources.val is None and set(evaluations) != {"knn"}:
        raise UserError("data.val is missing: give the labelled images to test on, data.val=DIR")
    counts = LabelCounts.of_sources(sources)
    if counts is not None:
        check_label_counts(evaluations, counts)
    backbone = backbone.to(device)
    train = features_of(backbone, config, sources.train, device=device)
    test = train
    if sources.val is not None:
        test = features_of(backbone, config, sources.val, device=device)
        shared = count_shared_images(train, test)
        if shared:
            tell(f"warning: {shared} of {len(test)} test images are also training images")
    figures = run_evaluations(evaluations, train, test)
    counts = LabelCounts.of_targets(  # of readable images only
        train.targets,
        test.targets,
        names=None if counts is None else counts.names,
        leave_one_out=test is train,
    )
    tell(counts.describe())
    return {**figures, **counts.facts()}


def features_of(
    backbone: nn.Module, config: Config, source: Source, *, device: torch.device
) -> Features:
    """Return the features of every image of a source, with ``eval.transforms``."""
    pipeline = build_pipeline(config.eval.transforms, "eval.transforms", channels_of(source))
    batches = EvalBatches(
        EvalDataset(source, pipeline, config.train.seed),
        batch_size=_BATCH_SIZE,
        num_workers=config.data.num_workers,
        device=device,
        bad_files=BadFiles.of(source, config.data, None),
    )
    return extract_features(backbone, batches, device=device)
