"""Evaluation of trained weights: a run, a file, or a model of timm or torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from selftask.config.schema import Config
from selftask.data.loading.data_module import val_key
from selftask.data.loading.dataset import BadFiles, EvalDataset
from selftask.data.loading.loader import EvalBatches
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source, channels_of
from selftask.data.views import build_pipeline
from selftask.errors import UserError
from selftask.evaluate.features import Features, extract_features
from selftask.evaluate.label_counts import LabelCounts, check_label_counts, count_shared_images
from selftask.evaluate.online import evaluate_features, of_set, with_layers
from selftask.logs import get_logger
from selftask.logs.stages import stage

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
    """Evaluate a frozen backbone on labelled images with ``eval.evaluations``.

    Without a validation set the training images are also the test images; k-NN then excludes each
    image from its own neighbours. Metrics on ``data.val_sets`` are called ``NAME/knn_top1``.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.evaluations`` and ``eval.transforms``.
        sources: Training and test images.
        device: Device to compute features on.
        tell: Called with a line about images and classes, and another if test images are also
            training images.

    Returns:
        Metrics by name, and ``train_images``, ``test_images``, ``classes`` and ``chance`` of each
        set.

    Raises:
        UserError: If labels are missing or do not allow the evaluation. Known labels are checked
            before features are computed.
    """
    evaluations = config.eval.evaluations
    main = {} if sources.val is None and sources.val_sets else {"": sources.val}
    tests: dict[str, Source | None] = {**main, **sources.val_sets}  # None: the training images
    if None in tests.values() and set(evaluations) != {"knn"}:
        raise UserError("data.val is missing: give the labelled images to test on, data.val=DIR")
    known = {name: LabelCounts.of_sources(Sources(sources.train, s)) for name, s in tests.items()}
    for counts in known.values():
        if counts is not None:
            check_label_counts(evaluations, counts)
    backbone = with_layers(backbone, config.eval).to(device)
    features = partial(features_of, backbone, config, device=device, tell=tell)
    train = features(sources.train, key="data")
    row: dict[str, float] = {}
    for name, source in tests.items():
        test = train if source is None else features(source, key=val_key(name))
        shared = 0 if source is None else count_shared_images(train, test)
        if shared:
            tell(f"warning: {shared} of {len(test)} test images are also training images")
        with stage("evaluate", at_once=True):
            figures = evaluate_features(backbone, evaluations, train, test)
        before = known[name]
        counts = LabelCounts.of_targets(  # readable images only
            train.targets,
            test.targets,
            names=None if before is None else before.names,
            leave_one_out=test is train,
        )
        tell(f"{name}: {counts.describe()}" if name else counts.describe())
        row |= of_set(name, {**figures, **counts.facts()})
    return row


def features_of(
    backbone: nn.Module,
    config: Config,
    source: Source,
    *,
    device: torch.device,
    key: str = "data",
    tell: Callable[[str], None] = log.info,
) -> Features:
    """Return the features of every readable image of a source, with ``eval.transforms``.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.transforms``.
        source: The images.
        device: Device to compute features on.
        key: Config key of the images.
        tell: Called with a line about unreadable images, if there are any.
    """
    batches = eval_batches(config, source, device, key)
    features = extract_features(backbone, batches, device=device)
    if unreadable := batches.bad_files.summary():
        tell(f"warning: {unreadable}")
    return features


def eval_batches(
    config: Config, source: Source, device: torch.device, key: str = "data"
) -> EvalBatches:
    """Return the images of a source, whose config key is ``key``, with ``eval.transforms``."""
    pipeline = build_pipeline(config.eval.transforms, "eval.transforms", channels_of(source))
    return EvalBatches(
        EvalDataset(source, pipeline, config.train.seed),
        batch_size=_BATCH_SIZE,
        num_workers=config.data.num_workers,
        device=device,
        bad_files=BadFiles.of(source, config.data, None, key),
    )
