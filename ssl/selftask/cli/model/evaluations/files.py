"""``selftask eval`` of features in files that ``selftask features`` has written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from selftask.cli.model.evaluate_words import take_options
from selftask.cli.options import refuse_ranks, take
from selftask.config.schema import Component
from selftask.errors import UserError, check_known
from selftask.files.paths import exists, expand_user
from selftask.logs import announce
from selftask.registry import EVALUATIONS

if TYPE_CHECKING:
    from selftask.evaluate.features import FileFeatures


def is_features(address: str) -> bool:
    """Return whether an address ends with ``.npy``, or is a folder of ``selftask features``.

    Such a folder has ``features.npy`` or ``images.csv``.
    """
    path = expand_user(address)
    return path.suffix == ".npy" or any(exists(path / n) for n in ("features.npy", "images.csv"))


def evaluate_files(name: str, address: str, words: list[str]) -> dict[str, float]:
    """Return the metrics of one evaluation of features in files, and the numbers of images.

    Args:
        name: Name of the evaluation.
        address: Folder or file of the training features.
        words: ``key=value`` words: options, and ``data.val`` for the features to test on.

    Raises:
        UserError: If files or labels do not fit the evaluation, or if it does not support files.
    """
    refuse_ranks(f"eval {name} of files")
    if EVALUATIONS.declared(name, "takes_backbone", False):
        raise UserError(f"{address}: are features, and eval {name} takes a run or model")
    val, words = take("data.val", words)
    evaluation, rest = take_options(name, words, EVALUATIONS[name])
    if rest:
        raise UserError(f"{rest[0]}: has no effect on features in files")
    from selftask.evaluate.feature_files import read_features
    from selftask.evaluate.features import check_targets
    from selftask.evaluate.label_counts import LabelCounts, check_label_counts
    from selftask.evaluate.offline import check_test_set
    from selftask.evaluate.online import over_seeds

    train, classes = read_features(expand_user(address))
    test = train if val is None else _renumbered(*read_features(expand_user(val)), classes)
    facts: dict[str, float] = {"test_images": len(test)}
    if EVALUATIONS.declared(name, "needs_labels", True):
        if val is None:
            check_test_set([name])
        for key, part in (("features", train), ("data.val", test)):
            check_targets(part.targets, f"{name}, {key}")
        counts = LabelCounts.of_targets(
            train.targets,
            test.targets,
            names=classes,
            leave_one_out=val is None,
            only_test_classes=getattr(evaluation, "only_test_classes", False),
        )
        check_label_counts({name: Component(name=name, args=vars(evaluation))}, counts)
        announce(counts.describe())
        facts = counts.facts()
    pair: tuple[Any, Any] = train, test
    if not EVALUATIONS.declared(name, "takes_files", False):
        loaded = train.loaded()
        pair = loaded, loaded if val is None else test.loaded()
    return over_seeds(evaluation, pair, name) | facts


def _renumbered(test: FileFeatures, names: list[str], classes: list[str]) -> FileFeatures:
    """Give test images the class numbers of the training set, by the names of the classes.

    Without names they stay as they are. Raises UserError for a class that the training set lacks.
    """
    if not names or not classes or names == classes:
        return test
    for name in names:
        check_known(name, classes, f"data.val: the training features have no class {name!r}")
    import torch

    numbers = torch.tensor([*map(classes.index, names), -1])  # the last one: images without label
    return replace(test, targets=numbers[test.targets])
