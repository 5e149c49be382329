"""What commands of ``selftask eval`` share that measure a backbone on the images of its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import take_model, take_options
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import Frozen
from selftask.logs import announce, json_row


def print_measured(
    name: str,
    argv: list[str],
    usage: str,
    load: Callable[[], tuple[type[Any], Callable[..., dict[str, float]]]],
    open_model: Callable[[str, list[str]], tuple[Frozen, str]] = open_named,
) -> int:
    """Measure, print the metrics, append them to the run's ``evaluations.jsonl``, and return 0.

    Args:
        name: Name of the evaluation.
        argv: The words after it.
        usage: Its usage, for messages.
        load: Imports and returns the class of the options, and the function that measures.
        open_model: Opens the model at an address; see ``open_named``.
    """
    address, overrides = take_model(name, argv, usage)
    kind, measure = load()
    options, words = take_options(name, overrides, kind)
    frozen, address = open_model(address, words)
    figures = measure(
        frozen.backbone,
        frozen.config,
        frozen.sources,
        options,
        device=frozen.device,
        tell=announce,
    )
    from selftask.cli.model.result_row import described  # needs torch

    row, scores = described(figures, frozen.data_digests)
    print(json_row(row))
    keep(address, name, overrides, frozen, options, row | scores)
    return 0
