"""Evaluations of finished weights: a run, a file, a model of timm or torchvision."""

from __future__ import annotations

import torch
from torch import nn

from selftask.config.schema import Config
from selftask.data.dataset import BadFiles, EvalDataset, Sources
from selftask.data.loader import EvalBatches
from selftask.data.source import Source, channels_of
from selftask.data.views import build_pipeline
from selftask.errors import UserError
from selftask.evaluate.features import Features, extract_features
from selftask.evaluate.online import run_evaluations

_BATCH_SIZE = 256  # images; only memory depends on it


def evaluate_backbone(
    backbone: nn.Module, config: Config, sources: Sources, *, device: torch.device
) -> dict[str, float]:
    """The numbers of ``eval.evaluations`` for a frozen backbone on the labelled images.

    Without ``data.val`` the training images are also those tested: k-NN then leaves each image
    out of its own neighbours. Raises UserError where labels are missing.
    """
    backbone = backbone.to(device)
    train = features_of(backbone, config, sources.train, device=device)
    if sources.val is not None:
        test = features_of(backbone, config, sources.val, device=device)
    elif set(config.eval.evaluations) == {"knn"}:
        test = train
    else:
        raise UserError("data.val is missing: give the labelled images to test on, data.val=DIR")
    return run_evaluations(config.eval.evaluations, train, test)


def features_of(
    backbone: nn.Module, config: Config, source: Source, *, device: torch.device
) -> Features:
    """Features of every image of a source, by ``eval.transforms``."""
    pipeline = build_pipeline(config.eval.transforms, "eval.transforms", channels_of(source))
    batches = EvalBatches(
        EvalDataset(source, pipeline, config.train.seed),
        batch_size=_BATCH_SIZE,
        num_workers=config.data.num_workers,
        device=device,
        bad_files=BadFiles.of(source, config.data, None),
    )
    return extract_features(backbone, batches, device=device)
