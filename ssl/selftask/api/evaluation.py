"""Evaluate a frozen model from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from selftask.api.model import Model
from selftask.api.objects import overrides, restore
from selftask.api.training import Run
from selftask.cli.model.evaluate import (
    COMMANDS,
    asked_words,
    by_protocol,
    evaluate_frozen,
    evaluate_named,
)
from selftask.cli.model.evaluate_words import OTHERS
from selftask.cli.model.load_model import open_frozen
from selftask.cli.model.result_row import described
from selftask.config.compose.overrides import import_plugins
from selftask.errors import UserError, check_known
from selftask.registry import EVALUATIONS


def evaluate(
    model: str | Path | Run | Model,
    name: str = "knn",
    *,
    data: Any = None,
    data_val: Any = None,
    **settings: Any,
) -> dict[str, float]:
    """Return the metrics of ``selftask eval NAME MODEL data=... data.val=...``.

    ::

        selftask.evaluate("runs/a", "knn", data="labeled/train", data_val="labeled/test")
        selftask.evaluate("timm:resnet50", "linear", data=train_set, data_val=test_set)

    Results of a run are also appended to its ``evaluations.jsonl``.

    Args:
        model: A run, a file, ``RUN@STEP``, ``timm:NAME`` and so on, as for the command; a ``Run``,
            whose own code is trusted; or a ``Model``, with which ``image_size``, ``weights``,
            ``prefix`` and ``trust`` cannot be given.
        name: Name of the evaluation.
        data: Training images: a value of ``data=`` or a map-style data set, as for ``train``. None:
            those of the run; for other models, scikit-learn's digits.
        data_val: Test images, given in the same ways as ``data``. None: those of the run if
            ``data`` is None, too; else k-NN leaves each image out of its own neighbors, and
            evaluations that need a test set raise UserError.
        **settings: Fields of the evaluation, such as ``k=[5]``, and other settings of the command,
            by dotted key or as nested dicts.

    Returns:
        Metrics by name. Those with a score for each image also have ``NAME_low`` and ``NAME_high``,
        their 95 % interval. The numbers of images and classes are included. Empty on ranks other
        than 0.

    Raises:
        UserError: If there is no such evaluation, or the model, images or labels do not fit it.
    """
    named = {"data": data, "data.val": data_val}
    given = {key: settings.pop(key, None) for key in OTHERS}
    plain = {key: value for key, value in given.items() if value is not None}
    if isinstance(model, Run):
        restore(model.task.objects)
        plain.setdefault("trust", True)
    words = overrides({k: v for k, v in named.items() if v is not None} | settings)
    words += [
        f"{key}={str(value).lower() if key == 'trust' else value}" for key, value in plain.items()
    ]
    import_plugins(words)
    if name in COMMANDS and name not in EVALUATIONS.names():
        raise UserError(f"evaluate: {name} is a command only: selftask eval {name}")
    check_known(name, EVALUATIONS, f"no evaluation named {name!r}")
    name = by_protocol(name, *words)
    # The caller's random numbers stay the same; the draws of new random weights continue.
    with torch.random.fork_rng(devices=(), enabled=plain.get("weights") != "none"):
        if not isinstance(model, Model):
            return evaluate_named(name, str(model.out if isinstance(model, Run) else model), words)
        if unused := sorted({*plain, "image_size"} & {*plain, *settings}):
            raise UserError(f"evaluate: {unused[0]} is for a model by its name; see selftask.load")
        address = type(model.backbone).__name__
        loaded = model.backbone, model.facts
        frozen = open_frozen(address, asked_words(name, words), loaded=loaded)
        return described(evaluate_frozen([name], frozen), frozen.data_digests)[0]
