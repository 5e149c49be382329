"""Evaluation of trained weights: a run, a file, or a model of timm or torchvision."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from selftask.config.checks.requirements import label_free, takes_backbone
from selftask.config.schema import Config
from selftask.data.data_module import val_key
from selftask.data.loading.dataset import EvalDataset
from selftask.data.loading.loader import EvalBatches
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source, channels_of
from selftask.data.transforms.pipeline import build_pipeline
from selftask.distributed.collectives import is_primary
from selftask.distributed.world import World
from selftask.errors import UserError
from selftask.evaluate.features import Features, collect
from selftask.evaluate.label_counts import LabelCounts, check_label_counts, count_shared_images
from selftask.evaluate.on_ranks import connected, iterate_in_order
from selftask.evaluate.online import evaluate_features, evaluated_model, of_set, run_on_backbone
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
    world: World | None = None,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Evaluate a frozen backbone on images with ``eval.evaluations``.

    Training images are read only if an evaluation needs labels or there is no validation set.
    Without a validation set the training images are also the test images; k-NN then excludes each
    image from its own neighbors. Metrics on ``data.val_sets`` are called ``NAME/knn_top1``.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.evaluations`` and ``eval.transforms``.
        sources: Training and test images.
        device: Device to compute features on; the backbone is moved to it.
        world: This process, if several extract the features together; None for a single one. Rank
            0 evaluates the features. Evaluations with ``takes_backbone = True`` run on all ranks,
            which share their batches.
        tell: Called with lines about images and classes, and with warnings about unreadable images
            and test images that are also training images.

    Returns:
        Metrics by name, and ``train_images``, ``test_images``, ``classes`` and ``chance`` of each
        set; without labels only ``test_images``. Empty on ranks other than 0.

    Raises:
        UserError: If labels are missing or do not allow the evaluation. Known labels are checked
            before features are computed.
        RunError: If another rank has failed or ended.
    """
    on_backbone = takes_backbone(config.eval.evaluations)
    evaluations = {k: c for k, c in config.eval.evaluations.items() if k not in on_backbone}
    learning = evaluations.keys() - label_free(evaluations).keys()
    tests = _test_sets(sources) if evaluations else {}
    if None in tests.values():
        check_test_set(learning)
    counts = {n: LabelCounts.of_sources(Sources(sources.train, s)) for n, s in tests.items()}
    for expected in counts.values() if learning else ():
        if expected is not None:
            check_label_counts(evaluations, expected)
    read = {"data": sources.train} if learning or None in tests.values() else {}
    read |= {val_key(name): source for name, source in tests.items() if source is not None}

    world = world or World()
    with connected(world, backbone):
        model = evaluated_model(backbone, config.eval).to(device) if read else backbone
        features = _extract(model, config, read, device, tell)
        on_images = run_on_backbone(on_backbone, backbone, config, sources, device)
    if world.rank:
        return {}
    row: dict[str, float] = {}
    for name, source in tests.items():
        test = features["data" if source is None else val_key(name)]
        train = features.get("data", test)
        if train is not test and (shared := count_shared_images(train, test)):
            tell(f"warning: {shared} of {len(test)} test images are also training images")
        with stage("evaluate", at_once=True):
            figures = evaluate_features(model, evaluations, train, test)
        row |= of_set(name, figures)
        if learning:
            chosen = [evaluations[key].args.get("only_test_classes", False) for key in learning]
            facts = _report_labels(
                name, train, test, counts[name], tell, only_test_classes=all(chosen)
            )
            row |= of_set(name, facts)
        else:
            row |= of_set(name, {"test_images": len(test)})
    return row | on_images


def _test_sets(sources: Sources) -> dict[str, Source | None]:
    """Return the test images by name of the set; None stands for the training images."""
    main = {} if sources.val is None and sources.val_sets else {"": sources.val}
    return {**main, **sources.val_sets}


def _extract(
    model: nn.Module,
    config: Config,
    sources: dict[str, Source],
    device: torch.device,
    tell: Callable[[str], None],
) -> dict[str, Features]:
    """Return the features of sources by config key on rank 0. All ranks share the images."""
    parts = {
        key: iterate_source(model, config, source, device=device, key=key, tell=tell)
        for key, source in sources.items()
    }
    if is_primary():
        return {key: collect(part) for key, part in parts.items()}
    deque(chain.from_iterable(parts.values()), maxlen=0)
    return {}


def _report_labels(
    name: str,
    train: Features,
    test: Features,
    expected: LabelCounts | None,
    tell: Callable[[str], None],
    *,
    only_test_classes: bool,
) -> dict[str, float]:
    """Report the label counts of the readable images of a test set, and return their facts.

    ``only_test_classes`` is whether all evaluations predict only classes with test images.
    """
    counts = LabelCounts.of_targets(
        train.targets,
        test.targets,
        names=None if expected is None else expected.names,
        leave_one_out=test is train,
        only_test_classes=only_test_classes,
    )
    tell(f"{name}: {counts.describe()}" if name else counts.describe())
    return counts.facts()


def check_test_set(names: Iterable[str]) -> None:
    """Raise UserError if an evaluation needs a separate test set; called if there is none.

    Args:
        names: Evaluations that need labels, of which only ``knn`` (leave-one-out) and ``clusters``
            need no test set.
    """
    if {*names} - {"knn", "clusters"}:
        raise UserError("data.val is missing: give the labeled images to test on, data.val=DIR")


def iterate_source(
    backbone: nn.Module,
    config: Config,
    source: Source,
    *,
    device: torch.device,
    key: str = "data",
    tell: Callable[[str], None] = log.info,
) -> Iterator[Features]:
    """Yield the features of every readable image of a source, with ``eval.transforms``.

    Several ranks share the images, and each yields the features of all. Every rank must exhaust the
    iterator.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.transforms``.
        source: The images.
        device: Device of the backbone.
        key: Config key of the images.
        tell: Called on rank 0 with a line about unreadable images, if there are any.

    Raises:
        UserError: As ``iterate_in_order``.
        RunError: As ``iterate_in_order``.
    """
    batches = eval_batches(config, source, device, key)
    yield from iterate_in_order(backbone, batches, device=device)
    if is_primary() and (unreadable := batches.bad_files.summary()):
        tell(f"warning: {unreadable}")


def eval_batches(
    config: Config, source: Source, device: torch.device, key: str = "data"
) -> EvalBatches:
    """Return batches of up to 256 images of a source, with ``eval.transforms``.

    Args:
        config: Config with ``eval.transforms``.
        source: The images.
        device: Device that the batches are moved to.
        key: Config key of the images, for messages.
    """
    pipeline = build_pipeline(config.eval.transforms, "eval.transforms", channels_of(source))
    dataset = EvalDataset(source, pipeline, config.train.seed)
    return EvalBatches.of(
        dataset, source, config.data, batch_size=_BATCH_SIZE, device=device, key=key
    )
