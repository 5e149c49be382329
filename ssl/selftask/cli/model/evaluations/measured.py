"""Shared code of the ``selftask eval`` commands that measure a backbone on its config's images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import take_model, take_options
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import Frozen
from selftask.distributed.world import read_world
from selftask.logs import announce, get_logger, json_row

T = TypeVar("T")


def print_measured(
    name: str,
    argv: list[str],
    usage: str,
    kind: type[Any],
    measure: Callable[..., dict[str, float]],
    open_model: Callable[[str, list[str]], tuple[Frozen, str]] = open_named,
) -> int:
    """Evaluate a model, print the metrics, and append those of a run to ``evaluations.jsonl``.

    Args:
        name: Name of the evaluation.
        argv: The words after the name.
        usage: Usage text, for messages.
        kind: Class of the options.
        measure: Function that computes the metrics; see ``on_all_ranks``.
        open_model: Opens the model at an address; see ``open_named``.

    Returns:
        The exit code, 0.
    """
    address, overrides = take_model(name, argv, usage)
    options, words = take_options(name, overrides, kind)
    frozen, address = open_model(address, words)
    figures = on_all_ranks(frozen, measure, frozen.sources, options)
    if is_first_rank():
        from selftask.cli.model.result_row import described  # needs torch

        row, scores = described(figures, frozen.data_digests)
        print(json_row(row))
        keep(address, name, overrides, frozen, options, row | scores)
    return 0


def on_all_ranks(frozen: Frozen, measure: Callable[..., T], *args: Any) -> T:
    """Return the result of ``measure``, called on all ranks of a launcher, which share the images.

    Args:
        frozen: The model.
        measure: Called with the backbone, its config, ``args``, and the keywords ``device`` and
            ``tell``, a function that takes log lines.
        *args: Additional arguments.
    """
    from selftask.evaluate.on_ranks import connected

    tell = announce if is_first_rank() else get_logger(__name__).debug
    with connected(read_world(), frozen.backbone):
        return measure(frozen.backbone, frozen.config, *args, device=frozen.device, tell=tell)


def is_first_rank() -> bool:
    """Return whether this process is rank 0, which prints and keeps the results."""
    return read_world().rank == 0
