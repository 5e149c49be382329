"""``selftask eval``: evaluate features of a run, a file, or a model of timm or torchvision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import takewhile

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import check_words
from selftask.cli.model.evaluations.files import evaluate_files, is_features
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import FROZEN, WEIGHTS, Frozen
from selftask.cli.options import asks_for_help, is_setting, refuse_ranks, run_subcommand
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.compose.overrides import import_plugins
from selftask.config.config_class import config_class
from selftask.distributed.world import read_world
from selftask.errors import UserError, check_known
from selftask.logs import announce, json_row
from selftask.logs.lines import info_on_stderr
from selftask.registry import EVALUATIONS

_FOLDER = "selftask.cli.model.evaluations"
COMMANDS = {
    "retrieval": (f"{_FOLDER}.retrieval", "find images of the same object"),
    "views": (f"{_FOLDER}.views", "label-free measures of views of each image"),
    "segmentation": (f"{_FOLDER}.segmentation", "classes of pixels"),
    "depth": (f"{_FOLDER}.depth", "depth of pixels"),
    "correspondence": (f"{_FOLDER}.correspondence", "find places again, no labels"),
    "robustness": (f"{_FOLDER}.robustness", "errors on corrupted images"),
    "zeroshot": (f"{_FOLDER}.zeroshot", "classes by their names, with a text tower"),
    "geolocation": (f"{_FOLDER}.geolocation", "places by coordinates of neighbors"),
    "suite": ("selftask.cli.model.suite", "all checkpoints of a run"),
    "predictions": ("selftask.cli.model.predictions", "metrics of what `selftask test` wrote"),
}  # name -> module with USAGE and main(argv) -> exit code, description in one line

ALONE = ("retrieval", "suite", "predictions")
"""Commands that run in one process."""

USAGE = f"""\
usage: selftask eval knn|linear|svm|clusters|spectrum|clid RUN_OR_MODEL ... [key=value ...]
       selftask eval knn|linear|svm|clusters|spectrum|clid FEATURES [data.val=FEATURES]
       selftask eval linear RUN_OR_MODEL protocol=dinov2|mae|moco|simclr|vissl|lejepa|attentive
       selftask eval retrieval RUN_OR_MODEL [truth=FILE] [key=value ...]
       selftask eval views RUN [images=1000] [views=10] [key=value ...]
       selftask eval segmentation|depth RUN_OR_MODEL data=DIR data.val=DIR [key=value ...]
       selftask eval correspondence RUN_OR_MODEL data=DIR [key=value ...]
       selftask eval robustness RUN_OR_MODEL [images=N] [key=value ...]
       selftask eval zeroshot RUN_OR_FOLDER [classes=FILE.csv] [templates=FILE] [key=value ...]
       selftask eval geolocation RUN_OR_MODEL coordinates=FILE.csv [key=value ...]
       selftask eval suite RUN [EVALUATION ...] [key=value ...]
       selftask eval predictions FILE [FILE ...]

{FROZEN}
FEATURES      a folder of `selftask features`, or one of its .npy files; knn and spectrum read them
              block by block
data=DIR      the labeled images to learn from; default: those of the run
data.val=DIR  those to test on; without it, k-NN leaves each image out of its own neighbors;
              spectrum and clid need no labels
{WEIGHTS}
Fields of the evaluation need no prefix: k=[5,20], few_labels=[10]. linear, svm, clusters
and clid repeat with seeds=3. Ranks of torchrun share the images. Prints one JSON line last, with
95 % intervals over the test images; with several models, one after each, which names the model.
`selftask eval retrieval --help` describes its options; so do those of the commands below it.
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate models, print their metrics, and append those of a run to ``evaluations.jsonl``.

    A name in ``COMMANDS`` runs that command instead.
    """
    if argv and argv[0] in COMMANDS:
        if argv[0] in ALONE and not asks_for_help(argv):
            refuse_ranks(f"eval {argv[0]}")
        return run_subcommand(COMMANDS, argv)
    if not argv or asks_for_help(argv):
        print(USAGE)
        return 0
    name, models = by_protocol(*argv), [*takewhile(lambda word: not is_setting(word), argv[1:])]
    if not models:
        raise UserError(f"eval needs an evaluation and a run or model\n{USAGE}")
    import_plugins(argv)
    check_known(name, {*EVALUATIONS.names(), *COMMANDS}, f"no evaluation named {name!r}")
    for address in models:
        row = _row(name, address, argv[1 + len(models) :])
        if row:  # rank 0 has the results
            print(json_row({"model": address, **row} if len(models) > 1 else row), flush=True)
    return 0


def _row(name: str, address: str, overrides: list[str]) -> dict[str, float]:
    """Return the metrics with their intervals, and append those of a run to ``evaluations.jsonl``.

    If several hidden layers were evaluated, a table of them is printed. The result is empty on
    ranks other than 0.

    Args:
        name: Name of the evaluation.
        address: A run, a model, or features in files.
        overrides: ``key=value`` words.
    """
    if is_features(address):
        figures = evaluate_files(name, address, overrides)
        from selftask.cli.model.result_row import with_intervals  # needs torch

        return with_intervals(figures)
    row = evaluate_named(name, address, overrides, tell=announce)
    from selftask.cli.model.result_row import layer_table  # needs torch

    for line in layer_table(row):
        print(line)
    return row


def evaluate_named(
    name: str, address: str, overrides: list[str], *, tell: Callable[[str], None] | None = None
) -> dict[str, float]:
    """Evaluate a model, and append the metrics of a run to its ``evaluations.jsonl``.

    Args:
        name: Name of the evaluation.
        address: As for ``open_named``.
        overrides: ``key=value`` words.
        tell: As for ``evaluate_frozen``.

    Returns:
        Metrics with their intervals; empty on ranks other than 0.

    Raises:
        UserError: As ``open_named``, or if options, images or labels do not fit the evaluation.
    """
    frozen, run = open_named(address, asked_words(name, overrides))
    takes_backbone = EVALUATIONS.declared(name, "takes_backbone", False)
    # Evaluations that take the backbone have no `tell`; show their log lines on stderr instead.
    is_logged = takes_backbone and tell is not None
    with info_on_stderr() if is_logged else nullcontext():
        figures = evaluate_frozen([name], frozen, tell=tell)
    if not figures:
        return {}
    from selftask.cli.model.result_row import described  # needs torch

    row, scores = described(figures, frozen.data_digests)
    options = EVALUATIONS[name](**frozen.config.eval.evaluations[name].args)
    keep(run, name, overrides, frozen, options, row | scores)
    return row


def evaluate_frozen(
    names: Sequence[str], frozen: Frozen, *, tell: Callable[[str], None] | None = None
) -> dict[str, float]:
    """Return the metrics of the named evaluations; empty on ranks other than 0.

    Args:
        names: Names of the evaluations, which are in the config of ``frozen``.
        frozen: The model and its images.
        tell: Called with lines about images and classes; None logs them.

    Raises:
        UserError: If labels are missing or do not allow the evaluation.
    """
    from selftask.evaluate.offline import evaluate_backbone

    config = frozen.config
    chosen = {name: config.eval.evaluations[name] for name in names}
    return evaluate_backbone(
        frozen.backbone,
        replace(config, eval=replace(config.eval, evaluations=chosen)),
        frozen.sources,
        device=frozen.device,
        world=read_world(),
        **({} if tell is None else {"tell": tell}),
    )


def asked_words(name: str, overrides: list[str]) -> list[str]:
    """Return config overrides that enable the evaluation, then ``overrides`` with full keys."""
    return [f"eval.evaluations={{{name}: {{}}}}", *_with_prefix(name, overrides)]


def by_protocol(name: str, *words: str) -> str:
    """Return the name of the evaluation: ``linear`` with a ``protocol`` is ``probe``."""
    is_probe = name == "linear" and any(word.startswith("protocol=") for word in words)
    return "probe" if is_probe else name


def _with_prefix(name: str, overrides: list[str]) -> list[str]:
    """Expand ``k=[5]`` to ``eval.evaluations.knn.k=[5]``; raise UserError for unknown fields."""
    config = config_class(EVALUATIONS, name)
    names = {field.name for field in fields(config)} if config is not None else set()
    check_words(f"eval {name}", overrides, names)
    prefix = f"eval.evaluations.{name}."
    return [prefix + text if text.partition("=")[0] in names else text for text in overrides]
